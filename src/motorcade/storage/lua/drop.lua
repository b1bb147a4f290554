-- drop: remove a stream. Freed by the server in the background, however long it is.
--
--   2 cell   3 stream
--
--   keys    S:stream s:stream s
--   answer  1

operations.drop = function(op)
    local at, name = base(op[2]), op[3]
    call('UNLINK', at .. 'S:' .. name, at .. 's:' .. name)
    call('SREM', at .. 's', name)
    return 1
end
