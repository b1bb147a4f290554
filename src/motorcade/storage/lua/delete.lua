-- delete: remove one record.
--
--   2 cell   3 collection   4 key   5 home (empty: the key itself)
--
--   keys    R:collection i:home y n
--   answer  1, or 0 if it was not there

local function delete(at, collection, key, home)
    local gone = call('HDEL', at .. 'R:' .. collection, key)
    if gone == 1 then
        local name = collection .. '\0' .. key
        call('ZREM', at .. 'y', name .. '\0' .. home)
        if home ~= '' then
            call('SREM', at .. 'i:' .. home, name)
        end
        count(at, 'records', -1)
    end
    return gone
end

operations.delete = function(op)
    return delete(base(op[2]), op[3], op[4], op[5])
end
