-- commit: carry out all operations that a writer has collected for a cell (on a lone server: for all cells), at once.
-- This file comes last; the ones before it define the operations.
--
--   KEYS[1]  P:{N}:w:writer
--   ARGV     prefix, number of the call, packed operations, '1' on a cluster, '1' if a full server shall refuse it, history
--            of the server (empty: not known)
--   answer   packed answers, one per operation
--
-- The operations are those of many jobs. A job with conditions has a guard before its operations; if it does not hold,
-- these are skipped (and answered with 0), and no others.
--
-- A writer is registered in each cell (join.lua) before its first call. One without a key, or with one that was closed
-- (fence.lua), is fenced: nothing of its calls is carried out, however late they come.
--
-- A writer numbers its calls per cell and sends the next one only when it has the answer to the last. A call whose answer
-- was lost is sent again with the same number, to the master of that time, and is answered from what is stored here:
-- this is what makes every operation safe to repeat. A call that comes after a later one was held up somewhere, its
-- sender has given up on it, and it must not be carried out any more.

-- A server that takes over, or starts again, may have forgotten what was confirmed. It has another history then, as it
-- calls it (`master_replid`). The first call that finds one raises the horizon, above which positions are given from then
-- on: a reader that has got beyond what is left, and a late acknowledgement of what was forgotten, never meet new entries.
-- The horizon follows from the time, since a horizon may be forgotten too.

local HORIZON_BEGAN, POSITIONS_PER_SECOND = 1750000000, 131072

local function look_at_history()
    local key = KEYS[1]:match('^(.*:)w:') .. 'H'
    local known = call('GET', key)
    local history, raised = (known or ''):match('^(.*):(%d+)$')
    horizon = tonumber(raised or 0)
    if ARGV[6] == '' or history == ARGV[6] then
        return
    end
    if known then
        horizon = math.max(horizon + 1, (call('TIME')[1] - HORIZON_BEGAN) * POSITIONS_PER_SECOND)
    end
    call('SET', key, ARGV[6] .. ':' .. digits(horizon))
end

local number = tonumber(ARGV[2])

-- While a slot is being moved, keys that have gone already look as if they never existed. Asking for one that cannot exist
-- tells, before anything is written.
if ARGV[4] == '1' then
    local there = redis.pcall('EXISTS', KEYS[1] .. ':?')
    if type(there) == 'table' and there.err then
        return redis.error_reply('TRYAGAIN the cell is being moved')
    end
end

local stored = call('GET', KEYS[1])
local colon = stored and stored:find(':', 1, true)
if not colon then
    if trace_call then
        trace_call(false)
    end
    return redis.error_reply('FENCED this writer is not registered any more')
end
local last = tonumber(stored:sub(1, colon - 1))
if last == number then
    -- A write, so that the WAIT which follows also waits for what the first sending wrote; one that a full server takes.
    call('PEXPIRE', KEYS[1], 86400000)
    call('PERSIST', KEYS[1])
    return stored:sub(colon + 1)
elseif number < last then
    if trace_call then
        trace_call(false)
    end
    return redis.error_reply('STALE a later call was carried out already')
end

-- A server that takes no writes says so to the first command that writes, and only to that; one that is full says so only
-- to commands that may need room. So the first one, which does nothing, decides for all: everything or nothing is done.
if ARGV[5] == '1' then
    call('SETRANGE', KEYS[1] .. ':?', 0, '')
else
    call('DEL', KEYS[1] .. ':?')
end

look_at_history()
if trace_call then
    trace_call(true)
end
local answers, skipped = {}, 0
for index, op in ipairs(cmsgpack.unpack(ARGV[3])) do
    if skipped > 0 then
        answers[index], skipped = 0, skipped - 1
    else
        local answer = operations[op[1]](op)
        answers[index] = answer
        if op[1] == 'guard' and answer ~= 0 then
            skipped = op[4]
        end
    end
end
settle()
local packed = cmsgpack.pack(answers)
if closed then
    call('SET', KEYS[1], 'closed', 'PX', 86400000)
else
    call('SET', KEYS[1], ARGV[2] .. ':' .. packed)
end
return packed
