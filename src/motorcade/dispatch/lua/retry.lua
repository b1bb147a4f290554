-- A message that was given up goes back to the intake, once.
-- KEYS: stream, mark      ARGV: payload, how long the mark stays (ms)
if not redis.call('SET', KEYS[2], '1', 'NX', 'PX', ARGV[2]) then
  return 0
end
redis.call('XADD', KEYS[1], '*', 'payload', ARGV[1])
return 1
