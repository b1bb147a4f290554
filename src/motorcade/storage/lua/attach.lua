-- attach: claim a home for a member, and raise its fence.
--
--   2 cell   3 home   4 member   5 token of the fence   6 owner whose mailbox is looked at
--
--   keys    a e:owner n
--   answer  number of the fence, previous member or nothing, the mailbox (entries, bytes, first, last, generation), and
--           the number of the last note of the cell

operations.attach = function(op)
    local at, home, number, previous = base(op[2]), op[3], 0, ''
    local stored = call('HGET', at .. 'a', home)
    if stored then
        number, previous = attachment(stored)
    end
    call('HSET', at .. 'a', home, digits(number + 1) .. ':' .. op[5] .. ':' .. op[4])
    return { number + 1, previous, told(open(at, op[6])), tonumber(call('HGET', at .. 'n', 'notes') or 0) }
end
