-- A relay says that it is alive: renew, take, answer.
begin(KEYS[1])
even_when_full()
local read = arguments(1)
local owner, name, lease, wants, seed, anyhow, reason =
  read(), read(), tonumber(read()), read() == '1', read(), read() == '1', read()
local asked = {}
for place = 1, tonumber(read()) do
  asked[place] = { lane = tonumber(read()), epoch = tonumber(read()), lease = read() }
end
-- By topic: whether a Dead message holds its key. Until all are known, it does: that loses nothing.
local rules, unknown = {}, {}
for _ = 1, tonumber(read()) do
  rules[read()] = read() == '1'
end

local till, lanes = now + lease, all_lanes()

local alive, instances = 1, redis.call('HGETALL', key('instances'))
local gone = {}
for place = 1, #instances, 2 do
  if instances[place] ~= owner then
    if tonumber(string.match(instances[place + 1], '^%d+')) < now then
      gone[#gone + 1] = instances[place]
    else
      alive = alive + 1
    end
  end
end

local held = {}
for _, ask in ipairs(asked) do
  local lane = lanes[ask.lane]
  if lane and lane.epoch == ask.epoch and lane.lease == ask.lease then
    lane.till, lane.renewed = till, true
    held[#held + 1] = { ask.lane, lane.epoch, lane.lease }
  end
end

-- What this beat would take or resolve, looked at before anything is written: a rule may be missing.
local resizing = settings[1] ~= settings[2] or settings[2] ~= settings[3]
local open = {}
local function look(number)
  local found = orphans_on(number)
  open[number] = #found > 0 and found or nil
  for _, orphan in ipairs(found) do
    if orphan.topic and orphan.after.status == 'dead' and rules[orphan.topic] == nil then
      unknown[#unknown + 1] = orphan.topic
      rules[orphan.topic] = true
    end
  end
end

local free, number_of = {}, tonumber(settings[2])
local share = resizing and 0 or math.ceil(number_of / alive)
if resizing then
  for number, lane in pairs(lanes) do
    if lane.till <= now then look(number) end
  end
elseif wants then
  for number = 0, number_of - 1 do
    if #free >= share - #held then break end
    if (lanes[number] or lane_from(nil)).till <= now then
      free[#free + 1] = number
      look(number)
    end
  end
end
if #unknown > 0 and not anyhow then return { 'unknown', unknown } end

redis.call('HSET', key('instances'), owner, string.format('%.0f', till) .. ' ' .. name)
if #gone > 0 then redis.call('HDEL', key('instances'), unpack(gone)) end
for number, lane in pairs(lanes) do
  if lane.renewed then write_lane(number, lane) end
end
local orphans, dead = 0, 0
if resizing then
  for number, found in pairs(open) do
    -- A new epoch first: the late owner must find its batch gone and its lease void.
    local lane = lanes[number] or lane_from(nil)
    lane.epoch = lane.epoch + 1
    set_free(number, lane)
    lanes[number] = lane
    resolve(number, found, rules, reason)
  end
end
for _, number in ipairs(free) do
  local lane = lanes[number] or lane_from(nil)
  lane.epoch, lane.lease, lane.till, lane.owner = lane.epoch + 1, uuid(seed .. number), till, owner
  write_lane(number, lane)
  if open[number] then
    local left, died = resolve(number, open[number], rules, reason)
    orphans, dead = orphans + left, dead + died
  end
  held[#held + 1] = { number, lane.epoch, lane.lease }
end
local state = resizing and resize(lanes) or 'settled'
finish()
return { 'beaten', held, math.max(#held - share, 0), math.max(share - #held, 0), alive, orphans, dead, state }
