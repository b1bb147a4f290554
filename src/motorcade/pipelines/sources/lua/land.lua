-- land: bring what tasks have staged into the stream. All keys are in one slot.
--
--   begin   KEYS ledger   ARGV 'begin', batch, staged tasks (as one text), their rows, token, checkpoint, seconds
--           answer  {'done', rows}     the batch is in the stream already
--                   {'past', batch}    a later one is
--                   {'other', id}      the ledger belongs to another checkpoint
--                   {'cut', batch, landed, rows}   another batch was decided on and has landed in part
--                   {'old', batch}     a batch was decided on by version 0.1.0, which noted no progress
--                   {'go', tasks, rows, token}     what was decided on: what lands, and nothing else
--           A decision may be replaced until its first row has landed.
--   check   KEYS ledger, staged   ARGV 'check', token, task, parts, seconds
--           answer  parts moved before; -1: another decision holds; -3: parts are gone
--   move    KEYS ledger, stream, staged   ARGV 'move', token, task, number of the part, seconds
--           answer  rows added; 0: moved before; -1: another decision holds; -2: not its turn; -3: it is gone
--   end     KEYS ledger   ARGV 'end', batch, token, seconds
--           answer  {'done', rows}, {'short', landed, rows} or {'other'}
--   drop    KEYS ledger, staged   ARGV 'drop', task
--           answer  1 if it was removed, 0 if it was decided on: then it must land
--
-- Seconds: how long the ledger (begin, end; 0: for ever) or what is staged (check, move) is kept from now on.

local step, ledger = ARGV[1], KEYS[1]

local function number(field, default)
    return tonumber(redis.call('HGET', ledger, field) or default)
end

local function keep(seconds)
    if tonumber(seconds) > 0 then
        redis.call('EXPIRE', ledger, seconds)
    end
end

local function forget_landing()
    for _, field in ipairs(redis.call('HKEYS', ledger)) do
        if string.sub(field, 1, 6) == 'moved:' then
            redis.call('HDEL', ledger, field)
        end
    end
    redis.call('HDEL', ledger, 'landing', 'staged', 'decision', 'expected', 'landed')
end

if step == 'check' or step == 'move' then
    local token, task = ARGV[2], ARGV[3]
    if redis.call('HGET', ledger, 'decision') ~= token then
        return -1
    end
    local moved = number('moved:' .. task, 0)
    if step == 'check' then
        if redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[4]) - moved then
            return -3
        end
        redis.call('EXPIRE', KEYS[2], ARGV[5])
        return moved
    end
    local wanted = tonumber(ARGV[4])
    if wanted < moved then
        return 0
    elseif wanted > moved then
        return -2
    end
    local part = redis.call('HGET', KEYS[3], ARGV[4])
    if not part then
        return -3
    end
    local rows = cmsgpack.unpack(part)
    for _, row in ipairs(rows) do
        redis.call('XADD', KEYS[2], '*', unpack(row))
    end
    redis.call('HDEL', KEYS[3], ARGV[4])
    redis.call('EXPIRE', KEYS[3], ARGV[5])
    redis.call('HSET', ledger, 'moved:' .. task, moved + 1)
    redis.call('HINCRBY', ledger, 'landed', #rows)
    return #rows
end

if step == 'drop' then
    local decided = ' ' .. (redis.call('HGET', ledger, 'staged') or '')
    if string.find(decided, ' ' .. ARGV[2] .. '=', 1, true) then
        return 0
    end
    redis.call('DEL', KEYS[2])
    return 1
end

local batch = tonumber(ARGV[2])
local done = number('batch', -1)
if step == 'end' then
    if batch == done then
        return {'done', number('rows', 0)}
    end
    if redis.call('HGET', ledger, 'decision') ~= ARGV[3] then
        return {'other'}
    end
    local landed, expected = number('landed', 0), number('expected', 0)
    if landed ~= expected then
        return {'short', landed, expected}
    end
    redis.call('HSET', ledger, 'batch', ARGV[2], 'rows', landed)
    forget_landing()
    keep(ARGV[4])
    return {'done', landed}
end

local checkpoint = ARGV[6]
local known = redis.call('HGET', ledger, 'checkpoint')
if known and checkpoint ~= '' and known ~= checkpoint then
    return {'other', known}
end
if batch < done then
    return {'past', done}
end
if checkpoint ~= '' and not known then
    redis.call('HSET', ledger, 'checkpoint', checkpoint)
end
if batch == done then
    return {'done', number('rows', -1)}
end
local landing, landed = number('landing', -1), number('landed', 0)
if landing >= 0 and not redis.call('HGET', ledger, 'decision') then
    return {'old', landing}
end
if landed > 0 and landing ~= batch then
    return {'cut', landing, landed, number('expected', 0)}
end
if landed == 0 then
    forget_landing()
    redis.call('HSET', ledger, 'landing', ARGV[2], 'staged', ARGV[3], 'expected', ARGV[4], 'decision', ARGV[5],
        'landed', 0)
end
keep(ARGV[7])
return {'go', redis.call('HGET', ledger, 'staged'), number('expected', 0), redis.call('HGET', ledger, 'decision')}
