-- detach: give an owner up.
--
--   2 cell   3 owner   4 epoch of the attach that it ends
--
--   keys    e:owner
--   answer  1, or 0 if somebody attached since or nobody is attached

operations.detach = function(op)
    local meta = base(op[2]) .. 'e:' .. op[3]
    if tonumber(call('HGET', meta, 'epoch') or -1) ~= op[4] then
        return 0
    end
    return call('HDEL', meta, 'node')
end
