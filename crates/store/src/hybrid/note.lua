-- Notes messages as seen, and counts duplicates.
-- KEYS: the group, then one for each message.
-- ARGV: how long ids are kept unless the group says so, the group's new word on that or nothing, duplicates to add,
--       then the digests. A message that was noted before keeps its time.
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'keep', ARGV[2]) end
if ARGV[3] ~= '0' then redis.call('HINCRBY', KEYS[1], 'duplicates', ARGV[3]) end
local keep = tonumber(redis.call('HGET', KEYS[1], 'keep') or ARGV[1])
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
if keep > 0 then
  for n = 2, #KEYS do
    redis.call('SET', KEYS[n], ARGV[n + 2] .. now, 'PX', string.format('%.0f', keep), 'NX')
  end
end
return redis.call('HGET', KEYS[1], 'duplicates') or 0
