-- Gives a Dead or parked message a fresh start.
begin(KEYS[1])
open_inbox(ARGV[1], {})
local id, actor, detail = ARGV[2], ARGV[3], ARGV[4]
local place = place_of(id)
if not place then return 'unknown' end
audit(actor, 'inbox requeue', id, detail)
redis.call('HSET', in_key('p:' .. id), 'attempts', 0, 'dead', 0)
stand_in_line(id, place.topic, place.key or nil, place.position, false)
-- One that waits behind another of its key goes on waiting; whether one that was Dead must wait is seen, by the rules
-- of its group, when it is tried.
if place.dead or place.due then set_due(id, now) end
if place.dead then
  tell('dead', -1)
  tell('parked', 1)
end
close_inbox()
return 'done'
