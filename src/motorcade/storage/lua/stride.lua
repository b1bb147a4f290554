-- stride: how far some entries of a stream reach, without sending them. Writes nothing.
--
--   KEYS    a stream
--   ARGV    after this id, up to this id, at most so many entries
--   answer  how many there are, and the id of the last of them ('' for none)

local page = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], ARGV[2], 'COUNT', ARGV[3])
return { #page, #page > 0 and page[#page][1] or '' }
