-- note: put a note into the feed of a cell. Its number is one more than that of the note before. Its nonce is its own: it
-- tells a reader whether this is the note that it knows, or another one since a server has forgotten some.
--
--   2 cell   3 nonce   4 data   5 notes that are kept, at least
--
--   keys    F n
--   answer  its number

operations.note = function(op)
    local at = base(op[2])
    local number = call('HINCRBY', at .. 'n', 'notes', 1)
    call('XADD', at .. 'F', 'MAXLEN', '~', op[5], digits(number) .. '-0', 'n', op[3], 'd', op[4])
    return number
end
