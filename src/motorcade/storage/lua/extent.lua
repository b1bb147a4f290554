-- extent: size and ends of one stream. Writes nothing.
--
--   KEYS    S:stream s:stream
--   answer  first offset or 0, last offset, records, bytes

local state = redis.call('HMGET', KEYS[2], 'last', 'octets')
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
return {
    first and tonumber(first[1]:match('^(%d+)-')) or 0,
    tonumber(state[1] or 0),
    redis.call('XLEN', KEYS[1]),
    tonumber(state[2] or 0),
}
