-- mark: note a small number with an entry. Marked, it never expires.
--
--   2 cell   3 owner   4 position   5 mark (0: none)
--
--   keys    e:owner x:owner
--   answer  1, or 0 if the entry is gone

operations.mark = function(op)
    local entries, position = base(op[2]) .. 'e:' .. op[3], digits(op[4])
    local entry = call('HGET', entries, position)
    if not entry then
        return 0
    end
    if op[5] == 0 then
        call('HDEL', entries, 'm' .. position)
        return 1
    end
    call('HSET', entries, 'm' .. position, op[5])
    local stored, expires = struct.unpack('>dd', entry)
    if expires > 0 then
        call('HSET', entries, position, struct.pack('>dd', stored, 0) .. entry:sub(17))
        call('ZREM', base(op[2]) .. 'x:' .. op[3], position)
    end
    return 1
end
