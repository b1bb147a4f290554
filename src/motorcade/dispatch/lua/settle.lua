-- Messages that are done.
-- KEYS: pending, fence, deliveries      ARGV: fence, how many of the ids took more than one delivery, those ids, the others
local several = tonumber(ARGV[2])
if several > 0 then
  redis.call('HDEL', KEYS[3], unpack(ARGV, 3, 2 + several))
end
return redis.call('ZREM', KEYS[1], unpack(ARGV, 3))
