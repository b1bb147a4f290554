-- Before every script with which a leader writes: KEYS[1] is what it writes, KEYS[2] the fence beside it, ARGV[1] the
-- `EPOCH TOKEN` of the leader. A fence that is not there lets no write pass; the next leader puts it back.
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return redis.error_reply('FENCED ' .. KEYS[1] .. ' is fenced for ' .. tostring(redis.call('GET', KEYS[2])))
end
