-- load_mailbox, load_tokens, load_stream, load_lease, load_floor: fill a store that was empty from a file
-- (transfer_redis.py). Positions, offsets and fencing tokens come from there, so that nothing is given twice.
--
--   load_mailbox   2 cell   3 owner   4 last position   5 rows: position, entry as it is stored, expires_at, bytes, flags,
--                  key, digest, mark   6 position that it began above   7 position up to which entries are in flight
--   load_tokens    2 cell   3 owner   4 rows: token, position, time of the append
--   load_stream    2 cell   3 stream   4 last offset   5 time of the last   6 rows: offset, time, value
--   load_lease     2 cell   3 name   4 token   5 ms it has left
--   load_floor     2 cell   3 no token of a lease of this cell may be this one or below   4 nor a position of a mailbox
--                  that is made later
--
--   keys    e:owner g:owner d:owner x:owner t0:owner t1:owner o x r n   S:stream s:stream s   l:name f:name f p
--   answer  1

-- A position that was in a hole, or before everything, gets an entry; positions come in ascending order.
local function fill(box, position)
    if box.held == 0 then
        box.first = position
        if position < box.last then
            add_hole(box, position + 1, box.last)
        end
    else
        local from, to, hole = hole_below(box, position)
        call('ZREM', box.at .. 'g:' .. box.owner, hole)
        if from < position then
            add_hole(box, from, position - 1)
        end
        if position < to then
            add_hole(box, position + 1, to)
        end
    end
    box.held = box.held + 1
end

operations.load_mailbox = function(op)
    local at, owner = base(op[2]), op[3]
    local box = open(at, owner)
    local entries = box.entries
    box.begun = op[6]
    box.spare = op[7] ~= 0 and op[7] or nil
    extend(box, op[4])
    for _, row in ipairs(op[5]) do
        local position, entry, expires, bytes, flags, key, digest, mark = unpack(row)
        local text = digits(position)
        call('HSET', entries, text, entry)
        if mark > 0 then
            call('HSET', entries, 'm' .. text, mark)
        end
        if key ~= '' then
            call('HSET', entries, 'k' .. key, text)
        end
        if flags % BY_DIGEST == DROPPABLE then
            call('ZADD', at .. 'd:' .. owner, text, text)
        end
        if expires > 0 then
            call('ZADD', at .. 'x:' .. owner, expires, text)
            if box.soon == 0 or expires < box.soon then
                call('ZADD', at .. 'x', expires, owner)
                box.soon = expires
            end
        end
        if digest ~= '' then
            refer(at, digest, 1)
        end
        fill(box, position)
        box.size = box.size + bytes
    end
    count(at, 'entries', #op[5])
    save(box)
    return 1
end

operations.load_tokens = function(op)
    local at = base(op[2])
    for _, row in ipairs(op[4]) do
        local _, told = known(at, op[3], row[1], row[3])
        remember(at, op[3], row[1], row[3], row[2], told)
    end
    return 1
end

operations.load_stream = function(op)
    local at, name = base(op[2]), op[3]
    local meta, bytes = at .. 's:' .. name, 0
    for _, row in ipairs(op[6]) do
        call('XADD', at .. 'S:' .. name, digits(row[1]) .. '-0', 't', string.format('%.17g', row[2]), 'v', row[3])
        bytes = bytes + #row[3]
    end
    call('SADD', at .. 's', name)
    call('HSET', meta, 'last', digits(op[4]), 'time', string.format('%.17g', op[5]))
    call('HINCRBY', meta, 'octets', bytes)
    return 1
end

operations.load_lease = function(op)
    local at, name = base(op[2]), op[3]
    call('SET', at .. 'f:' .. name, digits(op[4]))
    call('HSET', at .. 'l:' .. name, 'token', digits(op[4]), 'holder', '')
    call('PEXPIRE', at .. 'l:' .. name, op[5])
    return 1
end

operations.load_floor = function(op)
    call('SET', base(op[2]) .. 'f', digits(op[3]))
    raise_floor(base(op[2]), op[4])
    return 1
end
