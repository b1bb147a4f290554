-- land: bring what tasks have staged into the stream. All keys are in one slot.
--
--   begin   KEYS ledger   ARGV 'begin', batch, staged keys (as one text)
--           answer  'done' if the batch is in the stream already, 'past' if a later one is,
--                   else the staged keys that were decided on: the first answer for a batch holds for ever
--   move    KEYS stream, staged   ARGV 'move', number of the part
--           answer  rows added; 0 if the part was moved before
--   end     KEYS ledger   ARGV 'end', batch

local step = ARGV[1]
if step == 'move' then
    local part = redis.call('HGET', KEYS[2], ARGV[2])
    if not part then
        return 0
    end
    local rows = cmsgpack.unpack(part)
    for _, row in ipairs(rows) do
        redis.call('XADD', KEYS[1], '*', unpack(row))
    end
    redis.call('HDEL', KEYS[2], ARGV[2])
    return #rows
end

local ledger, batch = KEYS[1], tonumber(ARGV[2])
local done = tonumber(redis.call('HGET', ledger, 'batch') or -1)
if step == 'end' then
    if batch > done then
        redis.call('HSET', ledger, 'batch', ARGV[2])
        redis.call('HDEL', ledger, 'landing', 'staged')
    end
    return 'done'
end
if batch == done then
    return 'done'
elseif batch < done then
    return 'past'
end
if tonumber(redis.call('HGET', ledger, 'landing') or -1) ~= batch then
    redis.call('HSET', ledger, 'landing', ARGV[2], 'staged', ARGV[3])
end
return redis.call('HGET', ledger, 'staged')
