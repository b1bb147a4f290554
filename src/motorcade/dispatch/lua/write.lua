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
local ids = {}
for index = 5, #ARGV, 2 do
  ids[#ids + 1] = ARGV[index]
end
local recent = redis.call('SMISMEMBER', KEYS[3 + newer], unpack(ids))
local older = redis.call('SMISMEMBER', KEYS[4 - newer], unpack(ids))
local fresh, here = {}, {}
local last
for number, id in ipairs(ids) do
  if recent[number] == 0 and older[number] == 0 and not here[id] then
    here[id] = true
    fresh[#fresh + 1] = id
    last = redis.call('XADD', KEYS[1], '*', 'id', id, 'payload', ARGV[4 + 2 * number], 'worker', ARGV[1])
  end
end
if last then
  redis.call('SADD', KEYS[3 + newer], unpack(fresh))
  if tonumber(ARGV[4]) > 0 then
    redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[4])
  end
end
return {#fresh, now}
