-- condemn: single out blobs that a sweep may remove, if it then finds no entry that refers to them.
--
--   2 cell   3 now   4 sweep   5 digests
--
--   keys    b:digest h:digest c:digest b n
--   answer  per digest: 0 gone already, 1 to be kept, 2 condemned

operations.condemn = function(op)
    local at, now, answers = base(op[2]), op[3], {}
    local time = call('TIME')[1] * 1000
    for index, digest in ipairs(op[5]) do
        local head, holds = call('GETRANGE', at .. 'b:' .. digest, 0, 7), at .. 'h:' .. digest
        if head == '' then
            local size = call('HGET', at .. 'b', digest)
            if size then
                call('HDEL', at .. 'b', digest)
                count(at, 'blobs', -1)
                count(at, 'octets', -tonumber(size))
            end
            answers[index] = 0
        elseif now < struct.unpack('>d', head) or call('ZCOUNT', holds, time, '+inf') > 0 then
            answers[index] = 1
        else
            call('SET', at .. 'c:' .. digest, op[4], 'PX', 60000)
            answers[index] = 2
        end
    end
    return answers
end
