-- put: write one record.
--
--   2 cell   3 collection   4 key   5 value as it is stored   6 expires_at (0: never)
--
--   keys    R:collection y n
--   answer  1 if it is new, else 0

operations.put = function(op)
    local at, member = base(op[2]), op[3] .. '\0' .. op[4]
    local new = call('HSET', at .. 'R:' .. op[3], op[4], op[5])
    count(at, 'records', new)
    if op[6] > 0 then
        call('ZADD', at .. 'y', op[6], member)
    else
        call('ZREM', at .. 'y', member)
    end
    return new
end
