-- A fence has a higher epoch than the counter: a failover has lost the counter's last step. Go on above the fence.
-- KEYS: lock, its epoch      ARGV: token, the highest epoch that was seen
-- Answers the new epoch, or 0 if the lock is not ours any more.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
local epoch = math.max(tonumber(redis.call('GET', KEYS[2]) or 0), tonumber(ARGV[2])) + 1
redis.call('SET', KEYS[2], string.format('%.0f', epoch))
return epoch
