-- put: write one record.
--
--   2 cell   3 collection   4 key   5 value as it is stored   6 expires_at (0: never)   7 home (empty: the key itself)
--   8 rank: bytes that never become less, behind the 8 of expires_at (absent: none)
--
--   keys    R:collection i:home y n
--   answer  1 if it is new, else 0
--
-- The index y has the home too, so that what has expired leaves the index of its home as well.

-- Return whether one of two strings is greater than the other in some bytes. `<` would go by the locale of the server.
local function greater(one, other, first, last)
    for place = first, last do
        local a, b = one:byte(place) or -1, other:byte(place) or -1
        if a ~= b then
            return a > b
        end
    end
    return false
end

operations.put = function(op)
    local at, collection, key, home = base(op[2]), op[3], op[4], op[7]
    if op[8] then
        local stored = call('HGET', at .. 'R:' .. collection, key)
        if stored and greater(stored, op[5], 9, 8 + op[8]) then
            return 0
        end
    end
    local new = call('HSET', at .. 'R:' .. collection, key, op[5])
    if new == 1 then
        count(at, 'records', 1)
        if home ~= '' then
            call('SADD', at .. 'i:' .. home, collection .. '\0' .. key)
        end
    end
    if op[6] > 0 then
        call('ZADD', at .. 'y', op[6], collection .. '\0' .. key .. '\0' .. home)
    elseif new == 0 then
        call('ZREM', at .. 'y', collection .. '\0' .. key .. '\0' .. home)
    end
    return new
end
