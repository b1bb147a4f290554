-- Take over what was read and never acknowledged.
-- KEYS: stream, fence      ARGV: fence, group, consumer, least idle time (ms), where to go on, count
return redis.call('XAUTOCLAIM', KEYS[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], 'COUNT', ARGV[6])
