-- delete: remove one record.
--
--   2 cell   3 collection   4 key
--
--   keys    R:collection y n
--   answer  1, or 0 if it was not there

operations.delete = function(op)
    local at = base(op[2])
    local gone = call('HDEL', at .. 'R:' .. op[3], op[4])
    call('ZREM', at .. 'y', op[3] .. '\0' .. op[4])
    count(at, 'records', -gone)
    return gone
end
