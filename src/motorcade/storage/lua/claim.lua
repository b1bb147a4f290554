-- claim: take entries that nobody has claimed, the oldest of the first mailbox first.
--
--   2 cell   3 owners, all of one home   4 claimer   5 at most so many   6 now   7 for each owner positions that are left
--   out (or nothing at all)
--
--   keys    e:owner g:owner q:owner u:owner v:owner w:writer
--   answer  per owner: the positions
--
-- unclaim: give claims back.
--
--   2 cell   3 owner   4 claimer   5 positions
--
--   keys    e:owner q:owner u:owner v:owner
--   answer  how many were claimed
--
-- All claims are in q, up to the highest one, `claimed` of the mailbox. What is below it and not claimed is in u. So the
-- next ones are the first of u, and then what is above `claimed`: no claim is looked at twice.

local CLAIM_PAGE = 100

-- Claims that were taken out of q are given back.
local function give_back(box, claimer, places)
    local free = {}
    for _, place in ipairs(places) do
        free[#free + 1] = place
        free[#free + 1] = place
    end
    call('ZADD', box.at .. 'u:' .. box.owner, unpack(free))
    forget_claims(box, claimer, #places)
    settle_claims(box)
end

-- A writer is fenced, or its store closed: see commit.lua.
local function may_write(writer)
    local registered = call('GETRANGE', KEYS[1]:match('^(.*:w:)') .. writer, 0, 5)
    return registered ~= '' and registered ~= 'closed'
end

-- The claims of writers that are no more are void: up to a thousand of each at a time.
local function drop_void(box, claimer)
    local claimers = box.at .. 'v:' .. box.owner
    for _, writer in ipairs(call('HKEYS', claimers)) do
        if writer ~= claimer and not may_write(writer) then
            local void, places = {}, {}
            for _, claim in ipairs(call('ZRANGE', box.at .. 'q:' .. box.owner, 0, -1)) do
                local place, who = claim:match('^(%d+):(.*)$')
                if who == writer and #void < 1000 then
                    void[#void + 1], places[#places + 1] = claim, place
                end
            end
            if #void > 0 then
                call('ZREM', box.at .. 'q:' .. box.owner, unpack(void))
                give_back(box, writer, places)
            end
        end
    end
end

local function may_claim(entry, now)
    if not entry then
        return false
    end
    local _, expires = take_apart('>dd', entry)
    return expires == 0 or now < expires
end

-- The next entries of a mailbox, and those that were passed over.
local function next_entries(box, limit, now, skip)
    local found, passed, start = {}, {}, '-inf'
    while box.claimed and #found < limit do
        local places = call('ZRANGEBYSCORE', box.at .. 'u:' .. box.owner, start, '+inf', 'LIMIT', 0, CLAIM_PAGE)
        if #places == 0 then
            break
        end
        local values = call('HMGET', box.entries, unpack(places))
        for index, place in ipairs(places) do
            if #found < limit and not skip[place] and may_claim(values[index], now) then
                found[#found + 1] = place
            end
        end
        start = '(' .. places[#places]
    end
    local place = math.max(box.first, (box.claimed or 0) + 1)
    while #found < limit and place <= box.last do
        local places = {}
        for position = place, math.min(place + CLAIM_PAGE - 1, box.last) do
            places[#places + 1] = digits(position)
        end
        local values = call('HMGET', box.entries, unpack(places))
        for index, text in ipairs(places) do
            if values[index] and #found < limit then
                local into = not skip[text] and may_claim(values[index], now) and found or passed
                into[#into + 1] = text
            end
        end
        place = place + #places
        if not values[#places] then
            local _, to = hole_below(box, place - 1)
            place = math.max(place, (to or 0) + 1)
        end
    end
    return found, passed
end

local function claim_some(box, claimer, limit, now, skipped)
    local skip = {}
    for _, position in ipairs(skipped or {}) do
        skip[digits(position)] = true
    end
    local found, passed = next_entries(box, limit, now, skip)
    if #found == 0 then
        return found
    end
    local claims = {}
    for index, place in ipairs(found) do
        claims[2 * index - 1] = place
        claims[2 * index] = place .. ':' .. claimer
    end
    call('ZADD', box.at .. 'q:' .. box.owner, unpack(claims))
    call('HINCRBY', box.at .. 'v:' .. box.owner, claimer, #found)
    for _, place in ipairs(passed) do
        call('ZADD', box.at .. 'u:' .. box.owner, place, place)
    end
    call('ZREM', box.at .. 'u:' .. box.owner, unpack(found))
    settle_claims(box)
    for index, place in ipairs(found) do
        found[index] = tonumber(place)
    end
    return found
end

operations.claim = function(op)
    local at, claimer, left, answers = base(op[2]), op[4], op[5], {}
    for index, owner in ipairs(op[3]) do
        local box, found = open(at, owner), {}
        if box.held > 0 then
            local before = box.claimed
            if before then
                drop_void(box, claimer)
            end
            if left > 0 then
                found = claim_some(box, claimer, left, op[6], op[7][index])
                left = left - #found
            end
            if box.claimed ~= before then
                save(box)
            end
        end
        answers[index] = found
    end
    return answers
end

operations.unclaim = function(op)
    local box, places = open(base(op[2]), op[3]), {}
    for _, position in ipairs(box.claimed and op[5] or {}) do
        local place = digits(position)
        if call('ZREM', box.at .. 'q:' .. box.owner, place .. ':' .. op[4]) == 1 then
            places[#places + 1] = place
        end
    end
    if #places > 0 then
        give_back(box, op[4], places)
        save(box)
    end
    return #places
end
