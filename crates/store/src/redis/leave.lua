-- An instance is gone for good: its lanes are free and it no longer counts.
begin(KEYS[1])
even_when_full()
redis.call('HDEL', key('instances'), ARGV[1])
for number, lane in pairs(all_lanes()) do
  if lane.owner == ARGV[1] then set_free(number, lane) end
end
