-- Renew and list the registry of live workers.
-- KEYS: registry, fence      ARGV: fence, lease (ms), how many are connected, those, then those that are gone
-- Answers all that live.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local connected = tonumber(ARGV[3])
for index = 4, 3 + connected do
  redis.call('ZADD', KEYS[1], 'GT', string.format('%.0f', now + tonumber(ARGV[2])), ARGV[index])
end
for index = 4 + connected, #ARGV do
  redis.call('ZREM', KEYS[1], ARGV[index])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. string.format('%.0f', now))
return redis.call('ZRANGE', KEYS[1], 0, -1)
