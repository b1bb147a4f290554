-- join: register a writer in a cell. Not an operation, since only registered writers have those.
--
--   KEYS    P:{N}:w:writer, and in the first cell P:{N}:w
--   ARGV    writer, what is told of it
--   answer  1, or 0 if it was fenced meanwhile
--
-- May be repeated. A full server takes it (commit.lua has the reason), since a full store has to be opened to be emptied.

redis.call('DEL', KEYS[1] .. ':?')
local stored = redis.call('GET', KEYS[1])
if not stored then
    redis.call('SET', KEYS[1], '0:')
elseif stored ~= '0:' then
    return 0
end
if KEYS[2] then
    redis.call('HSET', KEYS[2], ARGV[1], redis.call('TIME')[1] .. ':' .. ARGV[2])
end
return 1
