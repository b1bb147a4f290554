-- trace: write down what is decided in a cell, in the order in which it happens; for tests (`RedisOptions.trace`). It comes
-- after the operations and before commit.lua, in a script that is used only where that is wanted.
--
--   keys    T, one entry for each of these: c cell, h name, f number and token, w what, a whether it was accepted
--
--   what                name            f               accepted
--   attach MEMBER       home            NUMBER:TOKEN    0: try_open has found it with another member (NUMBER is 0 then)
--   detach              home            NUMBER:TOKEN    0: it was no longer its fence
--   decision            home            NUMBER:TOKEN    0: a job with this fence was refused, whichever condition failed
--   expect              COLLECTION/KEY  0:              0: likewise
--   take                owner           POSITION:       0: likewise
--   call                writer          NUMBER:         0: the writer was fenced, or the call comes too late
--   fence               writer          0:              1: from here on it has no call any more

local TRACE_KEPT = 1000000

local function traced(cell, name, fence, what, accepted)
    local entry = { 'c', cell, 'h', name, 'f', fence, 'w', what, 'a', accepted and 1 or 0 }
    call('XADD', base(cell) .. 'T', 'MAXLEN', '~', TRACE_KEPT, '*', unpack(entry))
end

trace_call = function(accepted)
    local cell, writer = KEYS[1]:match('{(%d+)}:w:(.*)$')
    traced(cell, writer, ARGV[2] .. ':', 'call', accepted)
end

local guard, attach, try_open = operations.guard, operations.attach, operations.try_open
local detach, fence = operations.detach, operations.fence

local conditions_told = {
    fence = function(op)
        return op[3], op[4]:sub(1, -2), 'decision'
    end,
    expect = function(op)
        return op[3] .. '/' .. op[4], '0:', 'expect'
    end,
    holds = function(op)
        return op[3], digits(op[4]) .. ':', 'take'
    end,
}

operations.guard = function(op)
    local verdict = guard(op)
    for _, condition in ipairs(op[3]) do
        local name, told_fence, what = conditions_told[condition[1]](condition)
        traced(condition[2], name, told_fence, what, verdict == 0)
    end
    return verdict
end

operations.attach = function(op)
    local answer = attach(op)
    traced(op[2], op[3], digits(answer[1]) .. ':' .. op[5], 'attach ' .. op[4], true)
    return answer
end

operations.try_open = function(op)
    local answer = try_open(op)
    if type(answer) == 'string' then
        traced(op[2], op[3], '0:' .. op[5], 'attach ' .. op[4], false)
    end
    return answer
end

operations.detach = function(op)
    local answer = detach(op)
    traced(op[2], op[3], op[4]:sub(1, -2), 'detach', answer == 1)
    return answer
end

operations.fence = function(op)
    traced(op[2], op[3], '0:', 'fence', true)
    return fence(op)
end
