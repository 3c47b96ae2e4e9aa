-- All lanes, as an operator sees them.
begin(KEYS[1])
local lanes, answer, names = all_lanes(), {}, {}
local instances = redis.call('HGETALL', key('instances'))
for place = 1, #instances, 2 do
  names[instances[place]] = string.match(instances[place + 1], '^%d+ (.*)$')
end
for number = 0, tonumber(settings[2]) - 1 do
  local lane = lanes[number] or lane_from(nil)
  local flying = 0
  for _, batch in ipairs(batches_on(number)) do flying = flying + batch.size end
  local owned = lane.till > now
  answer[#answer + 1] = { number, lane.epoch, owned and (names[lane.owner] or lane.owner), owned and lane.till,
    flying }
end
return answer
