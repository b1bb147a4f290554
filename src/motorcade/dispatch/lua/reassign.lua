-- Store messages as pending that are about to be redelivered to workers.
-- KEYS: pending, fence, deliveries      ARGV: fence, time, id, deliveries so far, id, deliveries so far …
for index = 3, #ARGV, 2 do
  redis.call('ZADD', KEYS[1], ARGV[2], ARGV[index])
  redis.call('HSET', KEYS[3], ARGV[index], ARGV[index + 1])
end
return (#ARGV - 2) / 2
