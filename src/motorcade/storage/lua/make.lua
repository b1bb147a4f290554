-- make: make a mailbox, unless there is one.
--
--   2 cell   3 owner
--
--   keys    e:owner p
--   answer  its generation

operations.make = function(op)
    local box = open(base(op[2]), op[3])
    if not box.made then
        save(box)
    end
    return box.begun + 1
end
