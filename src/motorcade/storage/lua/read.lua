-- read: entries of one mailbox after a position, oldest first, without those that have expired. Writes nothing.
--
--   KEYS    e:owner g:owner
--   ARGV    after, limit, now (-1: also those that have expired)
--   answer  position, entry as it is stored, mark or nothing; and again

local after, limit, now = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local found = {}
local packed = redis.call('HGET', KEYS[1], 's')
if not packed then
    return found
end
local last, first, held = struct.unpack('>ddddd', packed)
if held == 0 then
    return found
end

-- Where most is holes, pages are short: each costs one look for the hole at its end.
local page = last - first < 4 * held and 200 or 10
local place = math.max(after + 1, first)
while limit > 0 and place <= last do
    local stop = math.min(place + math.min(page, limit) - 1, last)
    local fields = {}
    for position = place, stop do
        local name = string.format('%.0f', position)
        fields[#fields + 1] = name
        fields[#fields + 1] = 'm' .. name
    end
    local values = redis.call('HMGET', KEYS[1], unpack(fields))
    for index = 1, #fields, 2 do
        local entry = values[index]
        if entry then
            local _, expires = struct.unpack('>dd', entry)
            if expires == 0 or now < expires then
                found[#found + 1] = fields[index]
                found[#found + 1] = entry
                found[#found + 1] = values[index + 1] or ''
                limit = limit - 1
            end
        end
    end
    place = stop + 1
    if not values[#fields - 1] then
        local hole = redis.call('ZREVRANGEBYSCORE', KEYS[2], fields[#fields - 1], '-inf', 'LIMIT', 0, 1)[1]
        place = math.max(place, tonumber(hole and hole:match(':(%d+)$') or 0) + 1)
    end
end
return found
