-- info: size and ends of one mailbox. Writes nothing.
--
--   KEYS    e:owner
--   answer  entries, bytes, first position or 0, last position, generation or 0

local packed = redis.call('HGET', KEYS[1], 's')
if not packed then
    return { 0, 0, 0, 0, 0 }
end
local last, first, held, size, _, begun = struct.unpack('>dddddd', packed)
return { held, size, held > 0 and first or 0, last, begun + 1 }
