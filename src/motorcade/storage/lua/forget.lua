-- forget: remove the entries of one owner as clear does, and then all that is known of it but where it is attached.
--
--   2 cell   3 owner   4 up to this position (-1: the last one now)   5 at most so many
--
--   keys    e:owner g:owner d:owner x:owner t0:owner t1:owner o r n
--   answer  how many went, the position it goes up to, 1 if there is more

operations.forget = function(op)
    local at, owner = base(op[2]), op[3]
    local answer = operations.clear(op)
    if answer[3] == 0 and open(at, owner).held == 0 then -- else something came meanwhile
        call('HDEL', at .. 'e:' .. owner, 's')
        call('UNLINK', at .. 't0:' .. owner, at .. 't1:' .. owner)
    end
    return answer
end
