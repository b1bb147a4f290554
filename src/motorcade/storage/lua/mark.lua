-- mark: note a small number with an entry.
--
--   2 cell   3 owner   4 position   5 mark (0: none)
--
--   keys    e:owner
--   answer  1, or 0 if the entry is gone

operations.mark = function(op)
    local entries, position = base(op[2]) .. 'e:' .. op[3], digits(op[4])
    if call('HEXISTS', entries, position) == 0 then
        return 0
    end
    if op[5] == 0 then
        call('HDEL', entries, 'm' .. position)
    else
        call('HSET', entries, 'm' .. position, op[5])
    end
    return 1
end
