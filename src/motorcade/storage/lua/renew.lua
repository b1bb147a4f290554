-- renew: hold on to a lease.
--
--   2 cell   3 name   4 token   5 ttl in ms
--
--   keys    l:name
--   answer  1, or 0 if it is no longer ours

operations.renew = function(op)
    local lease = base(op[2]) .. 'l:' .. op[3]
    if tonumber(call('HGET', lease, 'token') or 0) ~= op[4] then
        return 0
    end
    return call('PEXPIRE', lease, op[5])
end
