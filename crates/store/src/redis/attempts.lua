-- The tries in vain of a message, oldest first.
begin(KEYS[1])
local seq = redis.call('HGET', key('ids'), ARGV[1])
return seq and redis.call('LRANGE', key('attempts:' .. seq), 0, -1) or {}
