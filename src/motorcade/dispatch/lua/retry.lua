-- Return a dead letter to the intake for a retry, once.
-- KEYS: stream, mark      ARGV: payload, how long the mark stays (ms)
-- The mark is set last: an entry that could not be added must not look as if it had been.
if redis.call('EXISTS', KEYS[2]) == 1 then
  return 0
end
redis.call('XADD', KEYS[1], '*', 'payload', ARGV[1])
redis.call('SET', KEYS[2], '1', 'PX', ARGV[2])
return 1
