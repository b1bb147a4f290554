-- acknowledge: remove entries of one owner.
--
--   2 cell   3 owner   4 positions
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
