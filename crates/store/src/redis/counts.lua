-- How many messages are where, and what has happened so far.
begin(KEYS[1])
local flying, flying_failed = 0, 0
for lane = 0, layout() - 1 do
  for _, text in ipairs(redis.call('HVALS', batches_key(lane))) do
    local failed, size = string.match(text, '^%S+ %S+ (%d+) (%d+) ')
    flying, flying_failed = flying + size, flying_failed + failed
  end
end
local oldest = redis.call('ZRANGE', key('unsent'), 0, 0)[1]
local written_at = oldest and redis.call('HGET', message_key(oldest), 'written_at')
return { redis.call('ZCARD', key('unsent')), redis.call('ZCARD', key('sent')), redis.call('ZCARD', key('dead')),
  flying, flying_failed, written_at and math.max(now - written_at, 0) or false, redis.call('HGETALL', key('counters')) }
