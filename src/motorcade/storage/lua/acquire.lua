-- acquire: take a lease that has no holder, or that has run out.
--
--   2 cell   3 name   4 holder   5 ttl in ms
--
--   keys    l:name f:name f
--   answer  fencing token, or 0 if it is held
--
-- Leases go by the server's clock, which all nodes share: the key goes when the lease ends.

operations.acquire = function(op)
    local at, name = base(op[2]), op[3]
    local lease = at .. 'l:' .. name
    if call('EXISTS', lease) == 1 then
        return 0
    end
    local floor = call('GET', at .. 'f') -- in a store that was imported: tokens were given elsewhere, up to here
    if floor then
        call('SET', at .. 'f:' .. name, floor, 'NX')
    end
    local token = call('INCR', at .. 'f:' .. name)
    call('HSET', lease, 'token', token, 'holder', op[4])
    call('PEXPIRE', lease, op[5])
    return token
end
