-- put: write one record.
--
--   2 cell   3 collection   4 key   5 value as it is stored   6 expires_at (0: never)   7 home (empty: the key itself)
--
--   keys    R:collection i:home y n
--   answer  1 if it is new, else 0
--
-- The index y has the home too, so that what has expired leaves the index of its home as well.

operations.put = function(op)
    local at, name = base(op[2]), op[3] .. '\0' .. op[4]
    local new = call('HSET', at .. 'R:' .. op[3], op[4], op[5])
    count(at, 'records', new)
    if new == 1 and op[7] ~= '' then
        call('SADD', at .. 'i:' .. op[7], name)
    end
    if op[6] > 0 then
        call('ZADD', at .. 'y', op[6], name .. '\0' .. op[7])
    else
        call('ZREM', at .. 'y', name .. '\0' .. op[7])
    end
    return new
end
