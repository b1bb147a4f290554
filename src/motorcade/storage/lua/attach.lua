-- attach: claim an owner for a node.
--
--   2 cell   3 owner   4 node
--
--   keys    e:owner
--   answer  epoch, previous node or nothing, 1 if the mailbox is not empty

operations.attach = function(op)
    local meta = base(op[2]) .. 'e:' .. op[3]
    local state = call('HMGET', meta, 'node', 's')
    local _, _, held = unpack_state(state[2])
    local epoch = call('HINCRBY', meta, 'epoch', 1)
    call('HSET', meta, 'node', op[4])
    return { epoch, state[1] or '', held > 0 and 1 or 0 }
end
