-- Put what came over the channel into a stream, once.
-- KEYS: stream, fence, number      ARGV: fence, number of the call, entries that may wait, message …
-- Answers how many were taken; the others found no room. A call that was carried out already is answered as it was.
local call = ARGV[1] .. ' ' .. ARGV[2]
local last = redis.call('HMGET', KEYS[3], 'call', 'taken')
if last[1] == call then
  return tonumber(last[2])
end
local room = tonumber(ARGV[3]) - redis.call('XLEN', KEYS[1])
local taken = math.max(math.min(#ARGV - 3, room), 0)
for index = 4, 3 + taken do
  redis.call('XADD', KEYS[1], '*', 'payload', ARGV[index])
end
redis.call('HSET', KEYS[3], 'call', call, 'taken', taken)
return taken
