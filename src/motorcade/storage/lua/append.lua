-- append: one draft to the mailboxes of some owners of one cell.
--
--   2 cell   3 entry as it is stored   4 now   5 expires_at (0: never)   6 bytes   7 flags   8 key (empty: none)
--   9 digest of the payload (empty: it is in the entry)   10 most entries (0: any)   11 most bytes (0: any)
--   12 token (empty: none)   13 owners   14 for each owner the position up to which entries are not pushed out unless
--   they are droppable (-1: all of them; empty: 0 for all)   15 whether what does not fit is refused
--   16 for each owner the generation that its mailbox must have (0: any, also none; empty: 0 for all)   17 for each owner
--   its home   18 true, or nothing at all: only for owners whose home is not attached   19 other mailboxes of the same
--   home that count as well where what does not fit is refused, or nothing at all
--
--   keys    e:owner g:owner d:owner x:owner t0:owner t1:owner a o x r n p
--   answer  per owner: its position, if there is no more to tell; else position (0: pushed out itself, or not taken),
--           position replaced or 0, positions pushed out, 1 if the token was known, node the home is attached to, OVER if
--           the mailbox is too large since all of it is spared, REFUSED if it did not fit, GONE if there is no mailbox of
--           that generation, else 0
--
-- It answers where the owner is attached, and attach.lua answers whether something is pending: both run in the owner's
-- cell, one after the other, so at least one of them sees the other.

local HOUR = 3600

-- Tokens of even and of odd hours are kept apart: those of two hours ago go all at once, when their hash is needed again
-- (its field '' tells the hour), or by themselves. Two names, so that forget.lua knows them.
local function hash_of(at, owner, hour)
    return at .. 't' .. (hour % 2) .. ':' .. owner
end

local function position_of(found, now)
    if found then
        local position, time = found:match('^(%d+):(.+)$')
        if now < tonumber(time) + HOUR then
            return tonumber(position)
        end
    end
    return nil
end

-- The position of the first append with a token, or nil; and what `remember` needs to know.
local function known(at, owner, token, now)
    local hour = math.floor(now / HOUR)
    local state = call('HMGET', hash_of(at, owner, hour), '', token)
    local position = position_of(state[2], now) or position_of(call('HGET', hash_of(at, owner, hour + 1), token), now)
    return position, tonumber(state[1] or -1)
end

-- `told`: the hour that the hash says it is of; -1: there is none.
local function remember(at, owner, token, now, position, told)
    local hour = math.floor(now / HOUR)
    local tokens, value = hash_of(at, owner, hour), string.format('%.0f:%.17g', position, now)
    if told >= hour then -- later only if the clock went back
        call('HSET', tokens, token, value)
        return
    end
    call('UNLINK', tokens)
    call('HSET', tokens, '', hour, token, value)
    call('PEXPIRE', tokens, 2 * HOUR * 1000 + 60000)
end

local NONE = {}
local OVER, REFUSED, GONE = 1, 2, 3

-- What leads to a new entry, beside its position; `soon` of the mailbox from now on.
local function index(op, at, owner, position, soon)
    local expires = op[5]
    if op[7] % BY_DIGEST == DROPPABLE then
        call('ZADD', at .. 'd:' .. owner, position, position)
    end
    if expires > 0 then
        call('ZADD', at .. 'x:' .. owner, expires, position)
        if soon == 0 or expires < soon then
            call('ZADD', at .. 'x', expires, owner)
            return expires
        end
    end
    return soon
end

-- The short way, when nothing can be replaced, repeated or pushed out: a campaign, sleeping sessions.
local function append_plain(op, at, owner, node, _, generation)
    local entries = at .. 'e:' .. owner
    local packed = call('HGET', entries, 's')
    local last, first, held, size, soon, begun = unpack_state(at, packed)
    if generation > 0 and not (packed and begun + 1 == generation) then
        return { 0, 0, NONE, 0, node, GONE }
    end
    if last < horizon then
        local box = open(at, owner)
        extend(box, horizon)
        last, first = box.last, box.first
    end
    local position = last + 1
    soon = index(op, at, owner, position, soon)
    local state = pack(STATE, position, first, held + 1, size + op[6], soon, begun)
    if packed and #packed > STATE_SIZE then
        state = state .. packed:sub(STATE_SIZE + 1)
    end
    call('HSET', entries, position, op[3], 's', state)
    if held == 0 then
        call('SADD', at .. 'o', owner)
    end
    return node == '' and position or { position, 0, NONE, 0, node, 0 }
end

-- The entry that goes next: the oldest droppable one, or the oldest that is not spared; nil: all others are.
local function next_to_drop(box, spared)
    local droppable = call('ZRANGE', box.at .. 'd:' .. box.owner, 0, 0)[1]
    if droppable then
        return tonumber(droppable)
    end
    if spared < 0 then
        return nil
    end
    local place = math.max(box.first, spared + 1)
    if place > box.first and box.last - box.first >= box.held then
        local _, to = hole_below(box, place)
        if to and to >= place then
            place = to + 1
        end
    end
    return place <= box.last and place or nil
end

-- Whether an entry fits when the one that it replaces (0: none) is gone.
local function fits(op, box, replaced)
    local max_entries, max_bytes, held, size = op[10], op[11], box.held + 1, box.size + op[6]
    if replaced > 0 then
        local _, _, bytes = struct.unpack(HEADER, call('HGET', box.entries, digits(replaced)))
        held, size = held - 1, size - bytes
    end
    for _, owner in ipairs(op[19] or NONE) do
        local other = open(box.at, owner)
        held, size = held + other.held, size + other.size
    end
    return (max_entries == 0 or held <= max_entries) and (max_bytes == 0 or size <= max_bytes)
end

-- Add an entry to a mailbox, and push out what does not fit: its position (0: pushed out itself), what was, and OVER if
-- it is too large all the same.
local function add(op, box, spared)
    local at, owner, key, max_entries, max_bytes = box.at, box.owner, op[8], op[10], op[11]
    extend(box, horizon)
    local position, dropped, over = box.last + 1, NONE, 0
    box.last = position
    box.held = box.held + 1
    box.size = box.size + op[6]
    box.soon = index(op, at, owner, position, box.soon)
    if key ~= '' then
        call('HSET', box.entries, position, op[3], 's', packed_state(box), 'k' .. key, position)
    else
        call('HSET', box.entries, position, op[3], 's', packed_state(box))
    end
    if op[9] ~= '' then
        refer(at, op[9], 1)
    end
    count(at, 'entries', 1)
    while (max_entries > 0 and box.held > max_entries) or (max_bytes > 0 and box.size > max_bytes) do
        local victim = next_to_drop(box, spared)
        if not victim then
            over = position > 0 and OVER or 0
            break
        end
        remove(box, victim)
        if victim == box.last then
            position = 0
        else
            dropped = dropped == NONE and {} or dropped
            dropped[#dropped + 1] = victim
        end
    end
    if position == 0 or dropped ~= NONE then
        call('HSET', box.entries, 's', packed_state(box))
    end
    list(box)
    return position, dropped, over
end

local function append(op, at, owner, node, spared, generation)
    local key, token, max_bytes = op[8], op[12], op[11]
    local box = open(at, owner)
    if generation > 0 and not (box.made and box.begun + 1 == generation) then
        return { 0, 0, NONE, 0, node, GONE }
    end
    local told
    if token ~= '' then
        local position
        position, told = known(at, owner, token, op[4])
        if position then
            return { position, 0, NONE, 1, node, 0 }
        end
    end
    local replaced, position, dropped, over = 0, 0, NONE, 0
    if key ~= '' then
        replaced = tonumber(call('HGET', box.entries, 'k' .. key) or 0)
    end
    if box.spare then
        spared = (box.spare < 0 or spared < 0) and -1 or math.max(box.spare, spared)
    end
    if box.claimed and spared >= 0 then
        spared = math.max(box.claimed, spared)
    end
    if op[15] and not fits(op, box, replaced) then
        return { 0, 0, NONE, 0, node, REFUSED }
    end
    if replaced > 0 then
        remove(box, replaced)
    end
    if max_bytes == 0 or op[6] <= max_bytes then
        position, dropped, over = add(op, box, spared)
    elseif replaced > 0 then -- what can never fit leaves the rest of the mailbox alone
        save(box)
    end
    if token ~= '' then
        remember(at, owner, token, op[4], position, told)
    end
    if replaced == 0 and dropped == NONE and node == '' and over == 0 then
        return position
    end
    return { position, replaced, dropped, 0, node, over }
end

-- What is only for those who are away: the way of all others if the home is not attached.
local function append_away(way)
    return function(op, at, owner, node, spared, generation)
        if node == '' then
            return way(op, at, owner, node, spared, generation)
        end
        local box = generation > 0 and open(at, owner)
        local gone = box and not (box.made and box.begun + 1 == generation)
        return { 0, 0, NONE, 0, node, gone and GONE or 0 }
    end
end

operations.append = function(op)
    local at, owners, spared, generations, answers = base(op[2]), op[13], op[14], op[16], {}
    local attached = call('HLEN', at .. 'a') > 0 and call('HMGET', at .. 'a', unpack(op[17])) or NONE
    local plain = op[8] == '' and op[12] == '' and op[10] == 0 and op[11] == 0
    local one = plain and append_plain or append
    if op[18] then
        one = append_away(one)
    end
    local stored, type = 0, type
    for number, owner in ipairs(owners) do
        local node = ''
        if attached[number] then
            local _
            _, node = attachment(attached[number])
        end
        local answer = one(op, at, owner, node, spared[number] or 0, generations[number] or 0)
        answers[number] = answer
        if plain and (type(answer) == 'number' or answer[1] > 0) then
            stored = stored + 1
        end
    end
    if stored > 0 then
        count(at, 'entries', stored)
        if op[9] ~= '' then
            refer(at, op[9], stored)
        end
    end
    return answers
end
