-- Messages that are about to be handed to workers, not for the first time.
-- KEYS: pending, fence, deliveries      ARGV: fence, time, id, deliveries so far, id, deliveries so far …
for index = 3, #ARGV, 2 do
  redis.call('ZADD', KEYS[1], ARGV[2], ARGV[index])
  redis.call('HSET', KEYS[3], ARGV[index], ARGV[index + 1])
end
return (#ARGV - 2) / 2
