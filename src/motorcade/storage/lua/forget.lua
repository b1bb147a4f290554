-- forget: remove the entries of one owner as clear does, and then all that is known of it. The floor of the cell rises
-- to its last position, so that a mailbox made later under any name of this cell begins above it.
--
--   2 cell   3 owner   4 up to this position (-1: the last one now)   5 at most so many
--
--   keys    e:owner g:owner d:owner x:owner t0:owner t1:owner o x r n p
--   answer  how many went, the position it goes up to, 1 if there is more

operations.forget = function(op)
    local at, owner = base(op[2]), op[3]
    local answer = operations.clear(op)
    local box = open(at, owner)
    if answer[3] == 0 and box.made and box.held == 0 then -- else something came meanwhile
        raise_floor(at, math.max(box.last, box.begun + 1)) -- one that was never used has had its generation too
        call('UNLINK', box.entries, at .. 't0:' .. owner, at .. 't1:' .. owner)
        call('ZREM', at .. 'x', owner)
    end
    return answer
end
