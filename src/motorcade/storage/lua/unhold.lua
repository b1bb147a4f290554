-- unhold: the entries of an append are written, the blobs need not be held for it any more.
--
--   2 cell   3 hold   4 digests
--
--   keys    h:digest
--   answer  1

operations.unhold = function(op)
    local at = base(op[2])
    for _, digest in ipairs(op[4]) do
        call('ZREM', at .. 'h:' .. digest, op[3])
    end
    return 1
end
