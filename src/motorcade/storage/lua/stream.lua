-- stream: append records to a stream. Offsets are our own numbers, and the first half of the stream's ids.
--
--   2 cell   3 stream   4 values   5 now
--
--   keys    S:stream s:stream s
--   answer  the first offset; the others follow without a gap
--
-- Times never go back, so that find.lua can search by halves.

operations.stream = function(op)
    local at, name = base(op[2]), op[3]
    local meta, records = at .. 's:' .. name, at .. 'S:' .. name
    local state = call('HMGET', meta, 'last', 'time')
    local last, bytes = tonumber(state[1] or 0), 0
    local time = string.format('%.17g', math.max(op[5], tonumber(state[2] or 0)))
    if last == 0 then
        call('SADD', at .. 's', name)
    end
    for index, value in ipairs(op[4]) do
        call('XADD', records, digits(last + index) .. '-0', 't', time, 'v', value)
        bytes = bytes + #value
    end
    call('HSET', meta, 'last', last + #op[4], 'time', time)
    call('HINCRBY', meta, 'octets', bytes)
    return last + 1
end
