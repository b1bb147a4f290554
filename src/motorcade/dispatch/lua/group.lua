-- Make the consumer group of the intake, if it is not there.
-- KEYS: stream, fence, origin, trimmed      ARGV: fence, group, number for the ids of this group
-- Answers the number in use: a stream that was deleted and made again must not give its entries the ids of the old ones.
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[2], '0', 'MKSTREAM')
if made.err then
  if string.sub(made.err, 1, 9) ~= 'BUSYGROUP' then
    return made
  end
  local origin = redis.call('GET', KEYS[3])
  if origin then
    return origin
  end
end
local stream = redis.call('XINFO', 'STREAM', KEYS[1])
local facts = {}
for index = 1, #stream, 2 do
  facts[stream[index]] = stream[index + 1]
end
-- What was trimmed before there was a group was meant for others.
redis.call('HDEL', KEYS[4], 'begun', 'read', 'jumped', 'found')
redis.call('HSET', KEYS[4], 'before', facts['entries-added'] - facts['length'])
redis.call('SET', KEYS[3], ARGV[3])
return ARGV[3]
