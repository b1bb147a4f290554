-- Stop being leader.
-- KEYS: lock, its state      ARGV: token
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
