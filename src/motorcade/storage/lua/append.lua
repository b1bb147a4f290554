-- append: one draft to the mailboxes of some owners of one cell.
--
--   2 cell   3 entry as it is stored   4 now   5 expires_at (0: never)   6 octets   7 flags   8 key (empty: none)
--   9 digest of the payload (empty: it is in the entry)   10 most entries (0: any)   11 most octets (0: any)
--   12 token (empty: none)   13 owners
--
--   keys    i:owner e:owner d:owner x:owner t0:owner t1:owner o x r n
--   answer  per owner: position (0: pushed out itself), position replaced or 0, positions pushed out, 1 if the token was
--           known, node the owner is attached to
--
-- It answers where the owner is attached, and attach.lua answers whether something is pending: both run in the owner's
-- cell, one after the other, so at least one of them sees the other.

local HOUR = 3600

-- Tokens of even and of odd hours are kept apart: those of two hours ago go all at once, when their hash is needed again
-- (its field '' tells the hour), or by themselves. Two names, so that forget.lua knows them.
local function known(at, owner, token, now)
    for parity = 0, 1 do
        local found = call('HGET', at .. 't' .. parity .. ':' .. owner, token)
        if found then
            local position, time = found:match('^(%d+):(.+)$')
            if now < tonumber(time) + HOUR then
                return tonumber(position)
            end
        end
    end
    return nil
end

local function remember(at, owner, token, now, position)
    local hour = math.floor(now / HOUR)
    local tokens = at .. 't' .. (hour % 2) .. ':' .. owner
    local told = tonumber(call('HGET', tokens, '') or hour)
    if told < hour then
        call('UNLINK', tokens)
        told = hour
    end
    call('HSET', tokens, '', told, token, string.format('%.0f:%.17g', position, now))
    call('PEXPIRE', tokens, 2 * HOUR * 1000 + 60000)
end

local function append(op, at, owner)
    local entry, now, expires, octets, flags, key = op[3], op[4], op[5], op[6], op[7], op[8]
    local digest, most_entries, most_octets, token = op[9], op[10], op[11], op[12]
    local entries, order = at .. 'e:' .. owner, at .. 'i:' .. owner
    local state = call('HMGET', entries, 'node', 'last', 'entries', 'octets')
    local node = state[1] or ''
    local last, held, size = tonumber(state[2] or 0), tonumber(state[3] or 0), tonumber(state[4] or 0)
    if token ~= '' then
        local position = known(at, owner, token, now)
        if position then
            return { position, 0, {}, 1, node }
        end
    end
    local before = held
    local replaced = 0
    if key ~= '' then
        local old = call('HGET', entries, 'k' .. key)
        if old then
            size = size - remove(at, owner, old)
            held = held - 1
            replaced = tonumber(old)
        end
    end
    local position, dropped, grown = 0, {}, nil
    if most_octets == 0 or octets <= most_octets then
        last = last + 1
        position = last
        held = held + 1
        size = size + octets
        grown = held
        call('HSET', entries, position, entry, 'last', last, 'entries', held, 'octets', size)
        call('ZADD', order, position, position)
        if key ~= '' then
            call('HSET', entries, 'k' .. key, position)
        end
        if flags % BY_DIGEST == DROPPABLE then
            call('ZADD', at .. 'd:' .. owner, position, position)
        end
        if expires > 0 then
            call('ZADD', at .. 'x:' .. owner, expires, position)
            call('ZADD', at .. 'x', 'LT', expires, owner)
        end
        if digest ~= '' then
            refer(at, digest, 1)
        end
        count(at, 'entries', 1)
    end
    if position > 0 then -- what can never fit leaves the mailbox alone
        while (most_entries > 0 and held > most_entries) or (most_octets > 0 and size > most_octets) do
            local victim = call('ZRANGE', at .. 'd:' .. owner, 0, 0)[1] or call('ZRANGE', order, 0, 0)[1]
            size = size - remove(at, owner, victim)
            held = held - 1
            if tonumber(victim) == last then
                position = 0
            else
                dropped[#dropped + 1] = tonumber(victim)
            end
        end
    end
    if position == 0 or held ~= grown then
        call('HSET', entries, 'last', last, 'entries', held, 'octets', size)
    end
    if before == 0 and held > 0 then
        call('SADD', at .. 'o', owner)
    elseif before > 0 and held == 0 then
        call('SREM', at .. 'o', owner)
    end
    if token ~= '' then
        remember(at, owner, token, now, position)
    end
    return { position, replaced, dropped, 0, node }
end

operations.append = function(op)
    local at, answers = base(op[2]), {}
    for index, owner in ipairs(op[13]) do
        answers[index] = append(op, at, owner)
    end
    return answers
end
