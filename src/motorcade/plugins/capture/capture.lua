-- capture: add messages to a stream, or publish them in a channel, each once.
--
--   KEYS[1]  what one writer has done last; in a cluster at the same place as the target
--   KEYS[2]  the stream; no second key: a channel
--   ARGV     1 number of the first message, 2 how many, 3 entries that the stream keeps (0: all), 4 channel,
--            5 milliseconds that KEYS[1] is kept, then for each message: how many words, the words
--   answer   how many messages were not there yet
--
-- A writer numbers its messages and sends the next ones only when it knows what became of those before. A call whose
-- answer was lost is sent again with the same numbers, perhaps to another server, perhaps beside the first one that is
-- still on its way: whichever comes later finds the numbers taken.

local first, count = tonumber(ARGV[1]), tonumber(ARGV[2])
local last = tonumber(redis.call('GET', KEYS[1]) or '0')
local at, added = 6, 0

-- A server that takes no writes, or that is full, says so to the first command that writes. So that it is all or nothing,
-- that one changes nothing.
redis.call('SETRANGE', KEYS[1], 0, '')

for number = first, first + count - 1 do
    local words = tonumber(ARGV[at])
    if number > last then
        if not KEYS[2] then
            redis.call('PUBLISH', ARGV[4], ARGV[at + 1])
        elseif ARGV[3] == '0' then
            redis.call('XADD', KEYS[2], '*', unpack(ARGV, at + 1, at + words))
        else
            redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', unpack(ARGV, at + 1, at + words))
        end
        added = added + 1
    end
    at = at + words + 1
end

-- Always a write, so that a WAIT that follows also waits for what an earlier sending has written.
redis.call('SET', KEYS[1], math.max(last, first + count - 1), 'PX', ARGV[5])
return added
