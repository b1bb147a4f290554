-- Go on being leader, and tell about it.
-- KEYS: lock, its state      ARGV: token, lease (ms), state (JSON), how long that is true (ms)
-- Answers 1, or 0 if this process does not lead.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.pcall('SET', KEYS[2], ARGV[3], 'PX', ARGV[4]) -- a server without memory refuses it; the lease counts
return 1
