-- expire: remove entries and records of one cell that have expired, at most so many.
--
--   2 cell   3 now   4 at most so many
--
--   keys    x y and, of each owner, collection and home found there, e: g: d: x: R: i:, and o r n
--   answer  how many went, their bytes, 1 if there is more, and owner and position of each entry among them
--
-- The index x of a cell may name an owner too early, when its entry was acknowledged: it is put right here.

operations.expire = function(op)
    local at, now, budget = base(op[2]), op[3], op[4]
    local gone, bytes, steps = 0, 0, 0
    local entries = {}
    while steps < budget do
        local owner = call('ZRANGEBYSCORE', at .. 'x', '-inf', now, 'LIMIT', 0, 1)[1]
        if not owner then
            break
        end
        steps = steps + 1
        local expiring = at .. 'x:' .. owner
        local positions = call('ZRANGEBYSCORE', expiring, '-inf', now, 'LIMIT', 0, budget - steps + 1)
        local box = open(at, owner)
        for _, position in ipairs(positions) do
            bytes = bytes + remove(box, tonumber(position))
            entries[#entries + 1] = owner
            entries[#entries + 1] = tonumber(position)
        end
        gone = gone + #positions
        steps = steps + #positions
        local following = call('ZRANGE', expiring, 0, 0, 'WITHSCORES')
        if following[2] then
            box.soon = tonumber(following[2])
            call('ZADD', at .. 'x', following[2], owner)
        else
            box.soon = 0
            call('ZREM', at .. 'x', owner)
        end
        if box.made then -- else it was forgotten
            save(box)
        end
    end
    if steps < budget then
        for _, member in ipairs(call('ZRANGEBYSCORE', at .. 'y', '-inf', now, 'LIMIT', 0, budget - steps)) do
            local first = member:find('\0', 1, true)
            local second = member:find('\0', first + 1, true)
            local collection, key = member:sub(1, first - 1), member:sub(first + 1, second - 1)
            bytes = bytes + math.max(call('HSTRLEN', at .. 'R:' .. collection, key) - 8, 0)
            gone = gone + delete(at, collection, key, member:sub(second + 1))
            call('ZREM', at .. 'y', member) -- also if it was there without a record, or this would never end
            steps = steps + 1
        end
    end
    return { gone, bytes, steps >= budget and 1 or 0, entries }
end
