-- home: the records that a home has in one collection. Writes nothing.
--
--   KEYS    i:home R:collection
--   ARGV    collection, most records
--   answer  key and value as it is stored, and again; or nothing at all if the index has more than so many

if redis.call('SCARD', KEYS[1]) > tonumber(ARGV[2]) then
    return false
end
local keys, found = {}, {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local collection, key = name:match('^(%Z*)%z(.*)$')
    if collection == ARGV[1] then
        keys[#keys + 1] = key
    end
end
if #keys == 0 then
    return found
end
for index, value in ipairs(redis.call('HMGET', KEYS[2], unpack(keys))) do
    if value then
        found[#found + 1] = keys[index]
        found[#found + 1] = value
    end
end
return found
