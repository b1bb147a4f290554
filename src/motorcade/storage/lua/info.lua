-- info: size and ends of one mailbox. Writes nothing.
--
--   KEYS    e:owner i:owner
--   answer  entries, octets, first position or 0, last position

local state = redis.call('HMGET', KEYS[1], 'entries', 'octets', 'last')
local first = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
return { tonumber(state[1] or 0), tonumber(state[2] or 0), tonumber(first or 0), tonumber(state[3] or 0) }
