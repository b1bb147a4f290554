-- blob: store a payload once, or keep the one that is there for longer.
--
--   2 cell   3 digest   4 data   5 keep_until   6 time to live in ms (0: for ever)   7 hold (empty: none)   8 ms it counts
--
--   keys    b:digest h:digest c:digest b n
--   answer  1 if it is new, else 0
--
-- A blob and the entries that refer to it are in different cells and cannot be changed together. So an append takes a
-- hold on the blob, writes the entries, and lets go (unhold.lua); a sweep removes only what is not held (condemn.lua).
-- The server's own expiry is the safety net for blobs all of whose entries expire; it only ever grows.

operations.blob = function(op)
    local at, digest, data, keep, ttl, hold = base(op[2]), op[3], op[4], op[5], op[6], op[7]
    local blob, new = at .. 'b:' .. digest, 0
    local head = call('GETRANGE', blob, 0, 7)
    if head == '' then
        if ttl > 0 then
            call('SET', blob, struct.pack('>d', keep) .. data, 'PX', ttl)
        else
            call('SET', blob, struct.pack('>d', keep) .. data)
        end
        new = call('HSET', at .. 'b', digest, #data)
        count(at, 'blobs', new)
        count(at, 'octets', new * #data)
    else
        if keep > struct.unpack('>d', head) then
            call('SETRANGE', blob, 0, struct.pack('>d', keep))
        end
        if ttl > 0 then
            call('PEXPIRE', blob, ttl, 'GT')
        else
            call('PERSIST', blob)
        end
    end
    call('DEL', at .. 'c:' .. digest)
    if hold ~= '' then
        local time = call('TIME')
        call('ZADD', at .. 'h:' .. digest, time[1] * 1000 + op[8], hold)
        call('PEXPIRE', at .. 'h:' .. digest, op[8])
    end
    return new
end
