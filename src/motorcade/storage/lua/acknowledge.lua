-- acknowledge: remove entries of one owner.
--
--   2 cell   3 owner   4 positions
--
--   keys    i:owner e:owner d:owner x:owner o r n
--   answer  how many were there

operations.acknowledge = function(op)
    local at, owner = base(op[2]), op[3]
    local gone, octets = 0, 0
    for _, position in ipairs(op[4]) do
        local size = remove(at, owner, digits(position))
        if size then
            gone = gone + 1
            octets = octets + size
        end
    end
    shrink(at, owner, gone, octets)
    return gone
end
