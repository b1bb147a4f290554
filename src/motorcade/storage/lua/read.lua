-- read: entries of one mailbox after a position, oldest first, without those that have expired. Writes nothing.
--
--   KEYS    i:owner e:owner
--   ARGV    after, limit, now
--   answer  position, entry as it is stored, mark or nothing; and again

local after, limit, now = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local found = {}
while limit > 0 do
    local page = math.min(limit, 200)
    local positions = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. after, '+inf', 'LIMIT', 0, page)
    if #positions == 0 then
        break
    end
    local fields = {}
    for index, position in ipairs(positions) do
        fields[2 * index - 1] = position
        fields[2 * index] = 'm' .. position
    end
    local values = redis.call('HMGET', KEYS[2], unpack(fields))
    for index, position in ipairs(positions) do
        local entry = values[2 * index - 1]
        local _, expires = struct.unpack('>dd', entry)
        if expires == 0 or now < expires then
            found[#found + 1] = position
            found[#found + 1] = entry
            found[#found + 1] = values[2 * index] or ''
            limit = limit - 1
        end
    end
    after = positions[#positions]
    if #positions < page then
        break
    end
end
return found
