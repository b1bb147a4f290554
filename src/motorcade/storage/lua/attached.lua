-- attached: the homes of a cell that a member has attached, page by page. Writes nothing.
--
--   KEYS    a
--   ARGV    member, cursor, homes to look at
--   answer  next cursor ('0': that was all), homes, each followed by its fence, NUMBER:TOKEN; one may come twice

local page = redis.call('HSCAN', KEYS[1], ARGV[2], 'COUNT', ARGV[3])
local found, rows = {}, page[2]
for index = 1, #rows, 2 do
    local fence, member = rows[index + 1]:match('^(%d+:%x*):(.*)$')
    if member == ARGV[1] then
        found[#found + 1] = rows[index]
        found[#found + 1] = fence
    end
end
return { page[1], found }
