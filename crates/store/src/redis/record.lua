-- One message by its id.
begin(KEYS[1])
local seq = redis.call('HGET', key('ids'), ARGV[1])
return seq and record(seq, {}) or false
