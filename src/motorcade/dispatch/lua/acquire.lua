-- Become leader if there is none.
-- KEYS: lock, its epoch      ARGV: token, lease (ms)
-- Answers {epoch, 0}, or {0, ms left of another leader's lease}. Asked again by the holder, it is the same leadership.
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return {redis.call('INCR', KEYS[2]), 0}
end
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {tonumber(redis.call('GET', KEYS[2]) or redis.call('INCR', KEYS[2])), 0}
end
return {0, redis.call('PTTL', KEYS[1])}
