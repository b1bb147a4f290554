-- clear: remove the entries of one owner, in steps that do not hold up the server.
--
--   2 cell   3 owner   4 up to this position (-1: the last one now)   5 at most so many
--
--   keys    e:owner g:owner d:owner x:owner o r n
--   answer  how many went, the position it goes up to, 1 if there is more

operations.clear = function(op)
    local box, upto, gone = open(base(op[2]), op[3]), op[4], 0
    if upto < 0 then
        upto = box.last
    end
    while gone < op[5] and box.held > 0 and box.first <= upto do
        if not remove(box, box.first) then
            error('the first entry of a mailbox is missing')
        end
        gone = gone + 1
    end
    if gone > 0 then
        save(box)
    end
    return { gone, upto, box.held > 0 and box.first <= upto and 1 or 0 }
end
