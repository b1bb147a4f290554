-- discard: remove blobs that this sweep condemned and that were not wanted since.
--
--   2 cell   3 sweep   4 digests
--
--   keys    b:digest c:digest b n
--   answer  how many went, their bytes

operations.discard = function(op)
    local at, gone, bytes = base(op[2]), 0, 0
    for _, digest in ipairs(op[4]) do
        if call('GET', at .. 'c:' .. digest) == op[3] then
            call('UNLINK', at .. 'b:' .. digest, at .. 'c:' .. digest, at .. 'h:' .. digest)
            local size = tonumber(call('HGET', at .. 'b', digest) or 0)
            count(at, 'blobs', -call('HDEL', at .. 'b', digest))
            count(at, 'octets', -size)
            gone = gone + 1
            bytes = bytes + size
        end
    end
    return { gone, bytes }
end
