-- Entries of the intake that are done.
-- KEYS: stream, fence      ARGV: fence, group, whether they stay in the stream (1), entry …
redis.call('XACK', KEYS[1], ARGV[2], unpack(ARGV, 4))
if ARGV[3] ~= '1' then
  redis.call('XDEL', KEYS[1], unpack(ARGV, 4))
end
return #ARGV - 3
