-- Let only this leader write here.
-- KEYS: fence      ARGV: epoch, token
-- Answers 0, or the epoch of a fence that is as high.
local mine = ARGV[1] .. ' ' .. ARGV[2]
local now = redis.call('GET', KEYS[1])
if now and now ~= mine then
  local epoch = tonumber(string.match(now, '^(%d+) '))
  if epoch and epoch >= tonumber(ARGV[1]) then
    return epoch
  end
end
redis.call('SET', KEYS[1], mine)
return 0
