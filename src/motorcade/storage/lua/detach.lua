-- detach: give a home up. Nothing of it is left: the number of the next fence may be this one, its token is another.
--
--   2 cell   3 home   4 the fence: NUMBER:TOKEN:
--
--   keys    a
--   answer  1, or 0 if it was attached since or is not attached

operations.detach = function(op)
    local all = base(op[2]) .. 'a'
    local stored = call('HGET', all, op[3])
    if not stored or stored:sub(1, #op[4]) ~= op[4] then
        return 0
    end
    return call('HDEL', all, op[3])
end
