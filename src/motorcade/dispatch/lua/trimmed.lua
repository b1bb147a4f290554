-- Count entries of the intake that were trimmed before the group has read them.
-- KEYS: stream, fence, trimmed
-- ARGV: fence, group, entries read since the last call (-1: unknown), entries that were gone before they were
--       finished, as far as this leader knows (the highest number holds)
-- Answers {unread entries that were trimmed, entries that were gone before they were finished}, since it is counted.
--
-- The stream knows how many entries were ever added (A) and how many are there (L), the group how many it has read (R).
-- At most L are unread, so at least A - R - L were trimmed unread; it is exactly that whenever all that was read is
-- finished. Servers since 7.2 let R jump over what was trimmed when the group reads on: what R has grown by more than
-- was read counts too.
local function facts_of(list)
  local facts = {}
  for index = 1, #list, 2 do
    facts[list[index]] = list[index + 1]
  end
  return facts
end

local tally = KEYS[3]
local function number(field)
  return tonumber(redis.call('HGET', tally, field) or 0)
end

local unfinished = math.max(number('unfinished'), tonumber(ARGV[4]))
redis.call('HSET', tally, 'unfinished', unfinished)
local stream, group = redis.pcall('XINFO', 'STREAM', KEYS[1])
if stream.err then
  return {number('unread'), unfinished}
end
stream = facts_of(stream)
for _, one in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local facts = facts_of(one)
  if facts['name'] == ARGV[2] then
    group = facts
  end
end
if not group then
  return {number('unread'), unfinished}
end
local read = group['entries-read']
if read then
  redis.call('HSET', tally, 'begun', 1)
elseif group['last-delivered-id'] == '0-0' and number('begun') == 0 then
  read = number('before') -- nothing was ever read
end
if read then -- else entries were deleted one by one, and the server does not know
  local since, before = tonumber(ARGV[3]), redis.call('HGET', tally, 'read')
  if since >= 0 and before and group['consumers'] <= 1 then
    local jumped = read - tonumber(before) - since
    if jumped > 0 then
      redis.call('HINCRBY', tally, 'jumped', jumped)
    end
  end
  redis.call('HSET', tally, 'read', read)
  local found = math.max(stream['entries-added'] - read - stream['length'], 0) + number('jumped')
  local known = number('found')
  if found > known then
    redis.call('HSET', tally, 'found', found)
    redis.call('HINCRBY', tally, 'unread', found - known)
  end
end
return {number('unread'), unfinished}
