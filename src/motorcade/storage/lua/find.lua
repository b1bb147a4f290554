-- find: the offset after which records of a time and later begin, by halves. Writes nothing.
--
--   KEYS    S:stream s:stream
--   ARGV    time
--   answer  offset

local wanted = tonumber(ARGV[1])
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
local low = first and tonumber(first[1]:match('^(%d+)-')) or 1
local high = tonumber(redis.call('HGET', KEYS[2], 'last') or 0) + 1
if not first then
    return high - 1
end
-- Records before `low` are too old, the one at `high` is not (or there is none).
while low < high do
    local middle = math.floor((low + high) / 2)
    local record = redis.call('XRANGE', KEYS[1], string.format('%.0f-0', middle), '+', 'COUNT', 1)[1]
    if record and tonumber(record[2][2]) < wanted then
        low = tonumber(record[1]:match('^(%d+)-')) + 1
    else
        high = middle
    end
end
return high - 1
