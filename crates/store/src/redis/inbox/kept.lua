-- One parked message, or nothing.
begin(KEYS[1])
open_inbox(ARGV[1], {})
return redis.call('HGETALL', in_key('p:' .. ARGV[2]))
