-- guard: whether the conditions of a job hold. If not, nothing of that job is carried out (commit.lua).
--
--   2 cell   3 conditions   4 how many operations follow that depend on them
--
--   expect   2 cell   3 collection   4 key   5 value that the record must have now (false: there must be none)   6 now
--   holds    2 cell   3 owner   4 position of an entry that must be there
--   fence    2 cell   3 home   4 the fence that it must have: NUMBER:TOKEN:
--
--   keys    R:collection e:owner a
--   answer  what does not hold: CONFLICT or FENCED, or 0 if everything does

local conditions = {}

conditions.expect = function(op)
    local stored = call('HGET', base(op[2]) .. 'R:' .. op[3], op[4])
    if stored then
        local expires = struct.unpack('>d', stored)
        if expires > 0 and expires <= op[6] then
            stored = false
        end
    end
    if (stored and stored:sub(9)) ~= op[5] then
        return 'CONFLICT'
    end
    return 0
end

conditions.holds = function(op)
    return op[4] > 0 and call('HEXISTS', base(op[2]) .. 'e:' .. op[3], digits(op[4])) == 1 and 0 or 'CONFLICT'
end

conditions.fence = function(op)
    local stored = call('HGET', base(op[2]) .. 'a', op[3])
    if not stored or stored:sub(1, #op[4]) ~= op[4] then
        return 'FENCED'
    end
    return 0
end

operations.guard = function(op)
    for _, condition in ipairs(op[3]) do
        local verdict = conditions[condition[1]](condition)
        if verdict ~= 0 then
            return verdict
        end
    end
    return 0
end
