-- open: attach a home as attach does, and tell its records. try_open: the same, unless another member has it.
--
--   2 cell   3 home   4 member   5 token of the fence   6 owner whose mailbox is looked at   7 collections, each with the
--   key of the one record that a home has there (empty: those of the index)   8 most records   9 try_open: member that
--   may be displaced (empty: none)
--
--   keys    a e:owner i:home R:collection
--   answer  what attach answers; and of each collection key and value of its records, the value as it is stored, but in
--           UTF-8 as if it were Latin-1; or false if there are more records than so many: the caller reads them bit by
--           bit, since only it decides about them now. try_open: the member that has the home, if it stays there

local utf8 -- made by the first operation of a call that needs it: most calls open nothing

operations.open = function(op)
    utf8 = utf8 or setmetatable({}, {
        __index = function(known, letter)
            local byte = letter:byte()
            known[letter] = string.char(192 + math.floor(byte / 64), 128 + byte % 64)
            return known[letter]
        end,
    })
    local at, indexed, found = base(op[2]), {}, {}
    local index = at .. 'i:' .. op[3]
    local attached = operations.attach(op)
    if call('SCARD', index) > op[8] then
        return { attached, false }
    end
    for _, name in ipairs(call('SMEMBERS', index)) do
        local collection, key = name:match('^(%Z*)%z(.*)$')
        local keys = indexed[collection] or {}
        indexed[collection] = keys
        keys[#keys + 1] = key
    end
    for number, place in ipairs(op[7]) do
        local collection, rows = place[1], {}
        local keys = place[2] ~= '' and { place[2] } or indexed[collection]
        if keys then
            for at_key, value in ipairs(call('HMGET', at .. 'R:' .. collection, unpack(keys))) do
                if value then
                    rows[#rows + 1] = { keys[at_key], (value:gsub('[\128-\255]', utf8)) }
                end
            end
        end
        found[number] = rows
    end
    return { attached, found }
end

operations.try_open = function(op)
    local stored = call('HGET', base(op[2]) .. 'a', op[3])
    if stored then
        local _, member = attachment(stored)
        if member ~= op[4] and member ~= op[9] then
            return member
        end
    end
    return operations.open(op)
end
