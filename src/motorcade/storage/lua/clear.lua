-- clear: remove the entries of one owner, in steps that do not hold up the server.
--
--   2 cell   3 owner   4 up to this position (-1: the last one now)   5 at most so many
--
--   keys    i:owner e:owner d:owner x:owner o r n
--   answer  how many went, the position it goes up to, 1 if there is more

operations.clear = function(op)
    local at, owner, upto, budget = base(op[2]), op[3], op[4], op[5]
    if upto < 0 then
        upto = tonumber(call('HGET', at .. 'e:' .. owner, 'last') or 0)
    end
    local positions = call('ZRANGEBYSCORE', at .. 'i:' .. owner, '-inf', upto, 'LIMIT', 0, budget)
    local octets = 0
    for _, position in ipairs(positions) do
        octets = octets + remove(at, owner, position)
    end
    shrink(at, owner, #positions, octets)
    return { #positions, upto, #positions == budget and 1 or 0 }
end
