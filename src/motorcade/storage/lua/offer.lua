-- offer: one message for a client, if any of its subscriptions matches the topic; offers.py has the rules.
--
--   2 cell   3 home   4 owner   5 how the keys of its subscriptions begin   6 topic   7 QoS   8 whether it is retained
--   9 whether the client has published it itself   10 whether it is stored at QoS 0   11 beginning of the body
--   12 payload, or its digest   13 bytes of the payload   14 digest (empty: none)   15 now   16 expires_at (0: never)
--   17 most entries (0: any)   18 most bytes (0: any)   19 token (empty: none)
--
--   keys    i:home R:subscription a   and those of append
--   answer  false if nothing matches; else QoS, whether with the retain flag, identifiers, and what append answers, with
--           position 0 for what is not stored

local function levels_of(topic)
    local levels = {}
    for level in (topic .. '/'):gmatch('([^/]*)/') do
        levels[#levels + 1] = level
    end
    return levels
end

-- `filter` is valid, and `levels` are those of a valid topic that does not begin with $.
local function matches(filter, levels)
    local number = 0
    for level in (filter .. '/'):gmatch('([^/]*)/') do
        number = number + 1
        if level == '#' then
            return true
        end
        if not levels[number] or (level ~= '+' and level ~= levels[number]) then
            return false
        end
    end
    return number == #levels
end

-- How the client gets it: QoS (-1: not at all), with the retain flag, identifiers.
local function wanted(op, at, box)
    local levels, keys = levels_of(op[6]), {}
    for _, name in ipairs(call('SMEMBERS', at .. 'i:' .. op[3])) do
        local key = name:match('^subscription%z(.*)$')
        local filter = key and key:sub(#op[5] + 1)
        if filter and filter:sub(1, 7) ~= '$share/' and matches(filter, levels) then
            keys[#keys + 1] = key
        end
    end
    table.sort(keys)
    local granted, retained, identifiers = -1, false, {}
    for _, key in ipairs(keys) do
        local stored = call('HGET', at .. 'R:subscription', key)
        local expires = stored and take_apart('>d', stored)
        if stored and (expires == 0 or op[15] < expires) then
            local qos, no_local, as_published, _, identifier, _, generation = unpack(cmsgpack.unpack(stored:sub(9)))
            generation = generation or 0
            local is_of_box = generation == 0 or (box.made and box.begun + 1 == generation)
            if is_of_box and not (op[9] and no_local) then
                granted = math.max(granted, math.min(op[7], qos))
                retained = retained or (op[8] and as_published)
                if identifier and identifier > 0 then
                    identifiers[#identifiers + 1] = identifier
                end
            end
        end
    end
    return granted, retained, identifiers
end

-- What follows the beginning of a body.
local function ending(granted, retained, identifiers)
    local number = #identifiers
    local parts = { cmsgpack.pack(granted), cmsgpack.pack(retained) }
    parts[3] = number < 16 and string.char(0x90 + number) or '\220' .. pack('>I2', number)
    for _, identifier in ipairs(identifiers) do
        parts[#parts + 1] = cmsgpack.pack(identifier)
    end
    parts[#parts + 1] = '\160' -- no group
    return table.concat(parts)
end

operations.offer = function(op)
    local at, owner = base(op[2]), op[4]
    local granted, retained, identifiers = wanted(op, at, open(at, owner))
    if granted < 0 then
        return false
    end
    local attached, node, _ = call('HGET', at .. 'a', op[3]), '', nil
    if attached then
        _, node = attachment(attached)
    end
    if granted == 0 and (node ~= '' or not op[10]) then
        return { granted, retained, identifiers, { 0, 0, NONE, 0, node, 0 } }
    end
    local body = op[11] .. ending(granted, retained, identifiers)
    local bytes, flags = #body + op[13], (op[14] ~= '' and BY_DIGEST or 0) + (granted == 0 and DROPPABLE or 0)
    local entry = pack(HEADER, op[15], op[16], bytes, flags, 0, #body) .. body .. op[12]
    local one = {
        'append', op[2], entry, op[15], op[16], bytes, flags, '', op[14], op[17], op[18], op[19], -- see append.lua
    }
    return { granted, retained, identifiers, append(one, at, owner, node, 0, 0) }
end
