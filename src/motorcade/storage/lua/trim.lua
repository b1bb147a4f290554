-- trim: remove the oldest records of a stream, at most so many.
--
--   2 cell   3 stream   4 those older than this   5 those above so many bytes (0: any)   6 above so many records (0: any)
--   7 at most so many
--
--   keys    S:stream s:stream
--   answer  how many went, their bytes, 1 if there is more

operations.trim = function(op)
    local at, before, max_bytes, max_records, budget = base(op[2]), op[4], op[5], op[6], op[7]
    local records, meta = at .. 'S:' .. op[3], at .. 's:' .. op[3]
    local held = call('XLEN', records)
    local size = tonumber(call('HGET', meta, 'octets') or 0)
    local gone, bytes, more, cut, start = 0, 0, 0, nil, '-'
    local done = false
    while not done do
        local page = call('XRANGE', records, start, '+', 'COUNT', 100)
        done = #page == 0
        for _, record in ipairs(page) do
            local id, time, value = record[1], tonumber(record[2][2]), record[2][4]
            local old = time < before
            local too_many = max_records > 0 and held - gone > max_records
            local too_large = max_bytes > 0 and size - bytes > max_bytes
            if not (old or too_many or too_large) then
                done = true
                break
            end
            if gone == budget then
                more = 1
                done = true
                break
            end
            gone = gone + 1
            bytes = bytes + #value
            cut = tonumber(id:match('^(%d+)-'))
            start = '(' .. id
        end
    end
    if cut then
        call('XTRIM', records, 'MINID', digits(cut + 1) .. '-0')
        call('HINCRBY', meta, 'octets', 0 - bytes) -- not -bytes: the server takes no "-0"
    end
    return { gone, bytes, more }
end
