-- Results of a worker, each id once.
-- KEYS: processed, seen, seen:0, seen:1
-- ARGV: worker, until when they may be written (ms of this server; 0: any time), how long ids are known (ms),
--       entries that are kept (0: all), id, result, id, result …
-- Answers {how many were written now, the server's time}.
--
-- Ids are in one of two sets. When the newer one has been in use for as long as ids must be known, the older one is
-- emptied and becomes the newer: never both at once, however long nothing was written.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local deadline = tonumber(ARGV[2])
if deadline > 0 and now > deadline then
  return redis.error_reply('STALE ' .. (now - deadline) .. ' ms too late')
end
local state = redis.call('HMGET', KEYS[2], 'newer', 'since')
local newer, since = tonumber(state[1] or 0), tonumber(state[2] or 0)
if since > now then
  since = now -- the clock was put back
end
if now - since >= tonumber(ARGV[3]) then
  if since > 0 then
    newer = 1 - newer
    redis.call('UNLINK', KEYS[3 + newer])
  end
  redis.call('HSET', KEYS[2], 'newer', newer, 'since', string.format('%.0f', now))
end
local call, try = redis.call, redis.pcall -- looked up once: most of the time goes into the loop below
local ids = {}
for index = 5, #ARGV, 2 do
  ids[#ids + 1] = ARGV[index]
end
local recent = call('SMISMEMBER', KEYS[3 + newer], unpack(ids))
local older = call('SMISMEMBER', KEYS[4 - newer], unpack(ids))
local fresh, places = {}, {}
for number, id in ipairs(ids) do
  if recent[number] == 0 and older[number] == 0 then
    fresh[#fresh + 1] = id
    places[#places + 1] = 4 + 2 * number
  end
end
if #fresh == 0 then
  return {0, now}
end
local once = call('SADD', KEYS[3 + newer], unpack(fresh)) < #fresh and {} -- some stand here twice
local written = 0
for number, id in ipairs(fresh) do
  if not once or not once[id] then
    local entry = try('XADD', KEYS[1], '*', 'id', id, 'payload', ARGV[places[number]], 'worker', ARGV[1])
    if type(entry) == 'table' then -- another kind of key, or no permission: what is not written must not be known
      call('SREM', KEYS[3 + newer], unpack(fresh, number))
      return entry
    end
    written = written + 1
    if once then
      once[id] = true
    end
  end
end
if tonumber(ARGV[4]) > 0 then
  call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[4])
end
return {written, now}
