-- Entries of the intake that are done.
-- KEYS: stream, fence      ARGV: fence, group, whether they stay in the stream (1), entry …
--
-- A group reads in order, so what lies below its lowest entry that waits for an acknowledgement, and not above what it
-- has read last, is done; to cut that off costs a tenth of deleting it entry by entry. What lies above goes later.
redis.call('XACK', KEYS[1], ARGV[2], unpack(ARGV, 4))
if ARGV[3] == '1' then
  return #ARGV - 3
end

local function parts(id)
  local time, number = string.match(id, '^(%d+)-(%d+)$')
  if #time < 16 and #number < 16 then -- else Lua's numbers do not tell it from its neighbours
    return tonumber(time), tonumber(number)
  end
end

local read
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local facts = {}
  for index = 1, #group, 2 do
    facts[group[index]] = group[index + 1]
  end
  if facts['name'] == ARGV[2] then
    read = facts['last-delivered-id']
  end
end
local time, number = parts(read)
local limit = time and string.format('%.0f-%.0f', time, number + 1)
local lowest = redis.call('XPENDING', KEYS[1], ARGV[2], '-', '+', 1)[1]
if limit and lowest then
  local waiting, place = parts(lowest[1])
  if not waiting then
    limit = nil
  elseif waiting < time or waiting == time and place <= number then
    limit = lowest[1]
  end
end
if limit then
  redis.call('XTRIM', KEYS[1], 'MINID', '=', limit)
else
  redis.call('XDEL', KEYS[1], unpack(ARGV, 4))
end
return #ARGV - 3
