-- due: when a home wants to be looked at; it has one such time.
--
--   2 cell   3 home   4 time (0: not any more)
--
--   keys    D n
--   answer  1
--
-- It counts as a record, as in the engines that keep it as one.

operations.due = function(op)
    local at = base(op[2])
    if op[4] > 0 then
        count(at, 'records', call('ZADD', at .. 'D', op[4], op[3]))
    else
        count(at, 'records', -call('ZREM', at .. 'D', op[3]))
    end
    return 1
end
