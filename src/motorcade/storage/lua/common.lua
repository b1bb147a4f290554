-- What the operations share. Every operation is a function of one packed list, whose first item is its name and whose
-- second is its cell; cells.py lists the keys. All keys of a call are in the slot of KEYS[1] (on a lone server: anywhere),
-- which is why they may be made up here instead of being listed.
--
-- Lua's numbers are doubles: positions, offsets and numbers of fences are exact up to 2^53.

local call = redis.call
local pack, take_apart = struct.pack, struct.unpack -- looked up once for all owners
local prefix = ARGV[1]
local operations = {}

-- An entry: when stored, when it expires, bytes of body and payload, flags, length of key, length of body; then key,
-- body, and the payload or its digest.
local HEADER = '>ddI4BI4I4'
local HEADER_SIZE = 29
local DROPPABLE = 1
local BY_DIGEST = 2

local trace_call -- see trace.lua; nil where nothing is traced
local counted = {} -- base of a cell -> counter -> change
local referred = {} -- base of a cell -> digest -> change

local function base(cell)
    return prefix .. ':{' .. cell .. '}:'
end

local function digits(number)
    return string.format('%.0f', number)
end

local function count(at, name, change)
    local of = counted[at] or {}
    counted[at] = of
    of[name] = (of[name] or 0) + change
end

local function refer(at, digest, change)
    local of = referred[at] or {}
    referred[at] = of
    of[digest] = (of[digest] or 0) + change
end

-- Write the changes that were collected: once per counter and digest, however many entries there were.
local function settle()
    for at, changes in pairs(counted) do
        for name, change in pairs(changes) do
            if change ~= 0 then
                call('HINCRBY', at .. 'n', name, change)
            end
        end
    end
    for at, changes in pairs(referred) do
        for digest, change in pairs(changes) do
            if change ~= 0 and call('HINCRBY', at .. 'r', digest, change) <= 0 then
                call('HDEL', at .. 'r', digest)
            end
        end
    end
end

-- A mailbox. Its entries lie between `first` and `last`, and there is one at `first` unless it is empty. Positions in
-- between that are gone are in holes: a sorted set of 'from:to' by from, maximal, and only there if something went out of
-- order. So appending touches one key, and so does removing from the front. `soon` is what the cell's index x says: when
-- the next entry expires, or sooner; 0: none does. `begun` is the position that it began above, which is the floor of the
-- cell when it was made; its generation is the next one. `spare` is the position up to which entries are in flight (-1:
-- all of them; nil: none), and `claimed` the highest position that is claimed (nil: none is); they are stored only if
-- there are any. See claim.lua.
local STATE = '>dddddd'
local STATE_SIZE = 48

local floors = {} -- base of a cell -> its floor: a new mailbox begins above it
local horizon = 0 -- positions are given above it: those below may have been given, and forgotten (commit.lua)

local function floor_of(at)
    local floor = floors[at]
    if not floor then
        floor = math.max(tonumber(call('GET', at .. 'p') or 0), horizon)
        floors[at] = floor
    end
    return floor
end

local function raise_floor(at, position)
    if position > floor_of(at) then
        floors[at] = position
        call('SET', at .. 'p', digits(position))
    end
end

-- last, first, held, size, soon, begun
local function unpack_state(at, packed)
    if packed then
        return take_apart(STATE, packed)
    end
    local floor = floor_of(at)
    return floor, floor + 1, 0, 0, 0, floor
end

local function open(at, owner)
    local entries = at .. 'e:' .. owner
    local packed = call('HGET', entries, 's')
    local last, first, held, size, soon, begun = unpack_state(at, packed)
    local box = {
        at = at, owner = owner, entries = entries, -- key of the entries
        last = last, first = first, held = held, size = size, soon = soon, begun = begun,
        before = held, -- entries when it was opened
        made = packed and true, -- it exists
    }
    if packed and #packed > STATE_SIZE then
        local spare = take_apart('>d', packed, STATE_SIZE + 1)
        box.spare = spare ~= 0 and spare or nil
        box.claimed = #packed > STATE_SIZE + 8 and take_apart('>d', packed, STATE_SIZE + 9) or nil
    end
    return box
end

local function packed_state(box)
    local state = pack(STATE, box.last, box.first, box.held, box.size, box.soon, box.begun)
    if box.claimed then
        return state .. pack('>dd', box.spare or 0, box.claimed)
    end
    return box.spare and state .. pack('>d', box.spare) or state
end

-- Who has attached a home, stored as NUMBER:TOKEN:MEMBER: the number of its fence, and the member.
local function attachment(stored)
    local number, member = stored:match('^(%d+):%x*:(.*)$')
    return tonumber(number), member
end

-- Whether it has entries decides whether its owner is listed.
local function list(box)
    if box.before == 0 and box.held > 0 then
        call('SADD', box.at .. 'o', box.owner)
    elseif box.before > 0 and box.held == 0 then
        call('SREM', box.at .. 'o', box.owner)
    end
end

-- Entries, bytes, first position or 0, last position, generation; all 0 if there is no such mailbox.
local function told(box)
    if not box.made then
        return { 0, 0, 0, 0, 0 }
    end
    return { box.held, box.size, box.held > 0 and box.first or 0, box.last, box.begun + 1 }
end

local function save(box)
    call('HSET', box.entries, 's', packed_state(box))
    list(box)
end

-- The hole with the highest beginning at or below a position: from, to, as it is stored.
local function hole_below(box, position)
    local hole = call('ZREVRANGEBYSCORE', box.at .. 'g:' .. box.owner, digits(position), '-inf', 'LIMIT', 0, 1)[1]
    if not hole then
        return nil
    end
    local from, to = hole:match('^(%d+):(%d+)$')
    return tonumber(from), tonumber(to), hole
end

local function add_hole(box, from, to)
    call('ZADD', box.at .. 'g:' .. box.owner, digits(from), digits(from) .. ':' .. digits(to))
end

-- Positions up to this one are used up.
local function extend(box, last)
    if last > box.last then
        if box.held == 0 then
            box.first = last + 1
        else
            local from, to, hole = hole_below(box, box.last)
            if from and to == box.last then
                call('ZREM', box.at .. 'g:' .. box.owner, hole)
                add_hole(box, from, last)
            else
                add_hole(box, box.last + 1, last)
            end
        end
        box.last = last
    end
end

-- An entry went; `held` tells already.
local function leave(box, position)
    local holes = box.at .. 'g:' .. box.owner
    local had_holes = box.last - box.first > box.held
    if box.held == 0 then
        box.first = box.last + 1
        if had_holes then
            call('UNLINK', holes)
        end
    elseif position == box.first then
        box.first = position + 1
        if had_holes then
            local from, to, hole = hole_below(box, box.first)
            if from then -- no hole begins before the first entry, so this one begins where it was
                call('ZREM', holes, hole)
                box.first = to + 1
            end
        end
    else
        local begin, finish = position, position
        if had_holes then
            local from, to, hole = hole_below(box, position)
            if from and to == position - 1 then
                call('ZREM', holes, hole)
                begin = from
            end
            from, to, hole = hole_below(box, position + 1)
            if from == position + 1 then
                call('ZREM', holes, hole)
                finish = to
            end
        end
        add_hole(box, begin, finish)
    end
end

-- Look which claim is the highest now. Above it nobody has claimed anything, and nothing is listed as given back.
local function settle_claims(box)
    local top = call('ZREVRANGE', box.at .. 'q:' .. box.owner, 0, 0)[1]
    local free = box.at .. 'u:' .. box.owner
    if top then
        local place = top:match('^%d+')
        box.claimed = tonumber(place)
        call('ZREMRANGEBYSCORE', free, place, '+inf')
    else
        box.claimed = nil
        call('UNLINK', free)
    end
end

-- The claimer has so many claims less.
local function forget_claims(box, claimer, number)
    local claimers = box.at .. 'v:' .. box.owner
    if call('HINCRBY', claimers, claimer, -number) <= 0 then
        call('HDEL', claimers, claimer)
    end
end

-- An entry goes; with it its claim, or what tells that it was given back.
local function unclaim(box, position)
    local claims, place = box.at .. 'q:' .. box.owner, digits(position)
    local claim = call('ZRANGEBYSCORE', claims, place, place)[1]
    if not claim then
        call('ZREM', box.at .. 'u:' .. box.owner, place)
        return
    end
    call('ZREM', claims, claim)
    forget_claims(box, claim:match(':(.*)$'), 1)
    if position == box.claimed then
        settle_claims(box)
    end
end

-- Remove one entry and everything that leads to it; its bytes, or nil if it is not there. The caller saves the mailbox.
local function remove(box, position)
    local entries, place = box.entries, digits(position)
    local value = call('HGET', entries, place)
    if not value then
        return nil
    end
    local _, expires, bytes, flags, key_length, body_length = struct.unpack(HEADER, value)
    call('HDEL', entries, place, 'm' .. place)
    if flags % BY_DIGEST == DROPPABLE then
        call('ZREM', box.at .. 'd:' .. box.owner, place)
    end
    if expires > 0 then
        call('ZREM', box.at .. 'x:' .. box.owner, place)
    end
    if key_length > 0 then
        local field = 'k' .. value:sub(HEADER_SIZE + 1, HEADER_SIZE + key_length)
        if call('HGET', entries, field) == place then
            call('HDEL', entries, field)
        end
    end
    if box.claimed then
        unclaim(box, position)
    end
    if flags >= BY_DIGEST then
        refer(box.at, value:sub(HEADER_SIZE + key_length + body_length + 1), -1)
    end
    count(box.at, 'entries', -1)
    box.held = box.held - 1
    box.size = box.size - bytes
    leave(box, position)
    return bytes
end
