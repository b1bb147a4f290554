-- spare: note with a mailbox up to which position no append pushes entries out, unless they are droppable.
--
--   2 cell   3 owner   4 position (-1: all; 0: none)
--
--   keys    e:owner
--   answer  1, or 0 if there is no such mailbox

operations.spare = function(op)
    local box = open(base(op[2]), op[3])
    if not box.made then
        return 0
    end
    box.spare = op[4] ~= 0 and op[4] or nil
    save(box)
    return 1
end
