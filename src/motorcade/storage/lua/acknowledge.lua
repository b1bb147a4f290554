-- acknowledge: remove entries of one owner. take: one entry, which a guard has found there (guard.lua).
--
--   2 cell   3 owner   4 positions; take: the position
--
--   keys    e:owner g:owner d:owner x:owner o r n
--   answer  how many were there

operations.acknowledge = function(op)
    local box, gone = open(base(op[2]), op[3]), 0
    for _, position in ipairs(op[4]) do
        if remove(box, position) then
            gone = gone + 1
        end
    end
    if gone > 0 then
        save(box)
    end
    return gone
end

operations.take = function(op)
    local box = open(base(op[2]), op[3])
    if not remove(box, op[4]) then
        return 0 -- its batch takes it twice
    end
    save(box)
    return 1
end
