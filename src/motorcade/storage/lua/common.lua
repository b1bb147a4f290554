-- What the operations share. Every operation is a function of one packed list, whose first item is its name and whose
-- second is its cell; cells.py lists the keys. All keys of a call are in the slot of KEYS[1] (on a lone server: anywhere),
-- which is why they may be made up here instead of being listed.
--
-- Lua's numbers are doubles: positions, offsets and epochs are exact up to 2^53.

local call = redis.call
local prefix = ARGV[1]
local operations = {}

-- An entry: when stored, when it expires, octets of body and payload, flags, length of key, length of body; then key,
-- body, and the payload or its digest.
local HEADER = '>ddI4BI4I4'
local HEADER_SIZE = 29
local DROPPABLE = 1
local BY_DIGEST = 2

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

-- Remove one entry (position as text) and everything that leads to it; its octets, or nil if it is not there.
-- The caller brings the owner's totals up to date with `shrink`.
local function remove(at, owner, position)
    local entries = at .. 'e:' .. owner
    local value = call('HGET', entries, position)
    if not value then
        return nil
    end
    local _, expires, octets, flags, key_length, body_length = struct.unpack(HEADER, value)
    call('HDEL', entries, position, 'm' .. position)
    call('ZREM', at .. 'i:' .. owner, position)
    if flags % BY_DIGEST == DROPPABLE then
        call('ZREM', at .. 'd:' .. owner, position)
    end
    if expires > 0 then
        call('ZREM', at .. 'x:' .. owner, position)
    end
    if key_length > 0 then
        local field = 'k' .. value:sub(HEADER_SIZE + 1, HEADER_SIZE + key_length)
        if call('HGET', entries, field) == position then
            call('HDEL', entries, field)
        end
    end
    if flags >= BY_DIGEST then
        refer(at, value:sub(HEADER_SIZE + key_length + body_length + 1), -1)
    end
    count(at, 'entries', -1)
    return octets
end

-- The owner's totals after so many entries and octets went.
local function shrink(at, owner, entries, octets)
    if entries == 0 then
        return
    end
    local meta = at .. 'e:' .. owner
    call('HINCRBY', meta, 'octets', 0 - octets) -- not -octets: the server takes no "-0"
    if call('HINCRBY', meta, 'entries', -entries) <= 0 then
        call('SREM', at .. 'o', owner)
    end
end
