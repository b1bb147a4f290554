-- release: give a lease back.
--
--   2 cell   3 name   4 token
--
--   keys    l:name
--   answer  1, or 0 if it was no longer ours

operations.release = function(op)
    local lease = base(op[2]) .. 'l:' .. op[3]
    if tonumber(call('HGET', lease, 'token') or 0) ~= op[4] then
        return 0
    end
    call('DEL', lease)
    return 1
end
