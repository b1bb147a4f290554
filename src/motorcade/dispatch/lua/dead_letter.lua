-- Add a message to the dead letters, once.
-- KEYS: dead, fence, ids      ARGV: fence, id, payload, reason, deliveries, worker, time, entries that are kept
if redis.call('HEXISTS', KEYS[3], ARGV[2]) == 1 then
  return redis.call('HGET', KEYS[3], ARGV[2])
end
local trim = tonumber(ARGV[8]) > 0
local entry = redis.call('XADD', KEYS[1], '*', 'id', ARGV[2], 'payload', ARGV[3], 'reason', ARGV[4],
  'deliveries', ARGV[5], 'worker', ARGV[6], 'time', ARGV[7])
if trim then
  redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[8])
end
redis.call('HSET', KEYS[3], ARGV[2], entry)
return entry
