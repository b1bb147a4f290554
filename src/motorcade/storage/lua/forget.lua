-- forget: remove the entries of one owner as clear does, and then all that is known of it but where it is attached.
--
--   2 cell   3 owner   4 up to this position (-1: the last one now)   5 at most so many
--
--   keys    i:owner e:owner d:owner x:owner t0:owner t1:owner o r n
--   answer  how many went, the position it goes up to, 1 if there is more

operations.forget = function(op)
    local at, owner = base(op[2]), op[3]
    local answer = operations.clear(op)
    local entries = at .. 'e:' .. owner
    if answer[3] == 0 and tonumber(call('HGET', entries, 'entries') or 0) == 0 then -- else something came meanwhile
        call('HDEL', entries, 'last', 'entries', 'octets')
        call('UNLINK', at .. 't0:' .. owner, at .. 't1:' .. owner)
    end
    return answer
end
