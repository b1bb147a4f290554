-- fence: close the registration of a writer in one cell: nothing of its calls is carried out any more. The key stays for
-- a day, so that a registration that is still under way finds it closed.
--
--   2 cell   3 writer
--
--   keys    w:writer
--   answer  1
--
-- seen: a writer that is listed is alive.
--
--   2 cell   3 writer   4 seconds
--
--   keys    w
--   answer  the writers that were not seen for so long, by the clock of the server

local closed = false -- the writer of this call has fenced itself

operations.fence = function(op)
    local key = base(op[2]) .. 'w:' .. op[3]
    if key == KEYS[1] then
        closed = true
    else
        call('SET', key, 'closed', 'PX', 86400000)
    end
    return 1
end

operations.seen = function(op)
    local list, now, overdue = base(op[2]) .. 'w', tonumber(call('TIME')[1]), {}
    local stored = call('HGETALL', list)
    for index = 1, #stored, 2 do
        local seen, rest = stored[index + 1]:match('^(%d+)(:.*)$')
        if stored[index] == op[3] then
            call('HSET', list, op[3], now .. rest)
        elseif tonumber(seen) + op[4] < now then
            overdue[#overdue + 1] = stored[index]
        end
    end
    return overdue
end
