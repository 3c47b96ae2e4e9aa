-- Gives up a Dead or parked message, if it is still the one that the audit entry tells of.
begin(KEYS[1])
even_when_full()
open_inbox(ARGV[1], {})
local id, position, actor, detail = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local place = place_of(id)
if not place or place.position ~= position then return 'changed' end
take_out(id, place)
-- One that waited behind another leaves that one as it is: those behind both go on waiting.
if place.dead or place.due then wake_next(place.topic, place.key) end
-- The group will never do it: the producer must not wait for it for ever.
acknowledge(id, nil, inbox.group, {})
audit(actor, 'inbox discard', id, detail)
close_inbox()
return 'done'
