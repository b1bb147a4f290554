-- Register a worker, or remove one that has ended.
-- KEYS: registry      ARGV: HOST:PORT, lease (ms; 0: it has ended)
-- Answers the server's time in milliseconds.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lease = tonumber(ARGV[2])
if lease > 0 then
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + lease), ARGV[1])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. string.format('%.0f', now))
return now
