-- A member says that it is alive: gives up what it is done with, buries the dead, takes its share of what is free.
-- Answers the generation, and for each circle of partitions that the same members may take: how many this member should
-- hold, and what it holds.
local group, me, lease = read(), read(), tonumber(read())
local topics, released = {}, {}
for number = 1, tonumber(read()) do topics[number] = read() end
for _ = 1, tonumber(read()) do released['p:' .. read()] = read() .. ' ' .. me end

local now, key = clock(), group_key(group)
local members, owners, generation, changed = {}, {}, '0-0', false
local all = redis.call('HGETALL', key)
for field = 1, #all, 2 do
  local name, value = all[field], all[field + 1]
  local member = string.match(name, '^m:(.*)')
  if member then
    if member ~= me and tonumber(string.match(value, '^%d+')) <= now then
      redis.call('HDEL', key, name)
      changed = true
    else
      members[member] = value .. ' '
    end
  elseif name == 'generation' then
    generation = value
  elseif released[name] == value then
    redis.call('HSET', key, name, string.match(value, '^%d+') .. ' -')
    owners[name], changed = string.match(value, '^%d+') .. ' -', true
  else
    owners[name] = value
  end
end
changed = changed or not members[me]
local standing = whole(now + lease) .. ' ' .. table.concat(topics, ' ')
redis.call('HSET', key, 'm:' .. me, standing)
members[me] = standing .. ' '

-- Partitions that the same members may take are divided together; a count over all of them at once could fill a member up
-- with what others could have taken and leave without an owner what only it can take.
local circles, order = {}, {}
for _, topic in ipairs(topics) do
  local interested = {}
  for member, value in pairs(members) do
    if string.find(value, ' ' .. topic .. ' ', 1, true) then interested[#interested + 1] = member end
  end
  table.sort(interested)
  local name = table.concat(interested, ' ')
  local circle = circles[name]
  if not circle then
    circle = { members = interested, partitions = 0, held = {}, free = {} }
    circles[name], order[#order + 1] = circle, circle
  end
  for partition = 0, tonumber(redis.call('HGET', prefix .. ':topics', topic) or '0') - 1 do
    circle.partitions = circle.partitions + 1
    local field = 'p:' .. topic .. ':' .. partition
    local epoch, owner = string.match(owners[field] or '0 -', '^(%d+) (.*)')
    local one = { topic = topic, partition = partition, epoch = epoch, field = field }
    if owner == me then
      circle.held[#circle.held + 1] = one
    elseif not members[owner] then
      circle.free[#circle.free + 1] = one
    end
  end
end

local answer = { '' }
for _, circle in ipairs(order) do
  local rank
  for number, member in ipairs(circle.members) do
    if member == me then rank = number end
  end
  -- The first few get one more when it does not come out even.
  local fair = math.floor(circle.partitions / #circle.members)
  if rank <= circle.partitions % #circle.members then fair = fair + 1 end
  for _, one in ipairs(circle.free) do
    if #circle.held >= fair then break end
    one.epoch = whole(one.epoch + 1)
    redis.call('HSET', key, one.field, one.epoch .. ' ' .. me)
    circle.held[#circle.held + 1] = one
    changed = true
  end
  local held = {}
  for number, one in ipairs(circle.held) do held[number] = { one.topic, one.partition, one.epoch } end
  answer[#answer + 1] = { fair, held }
end
answer[1] = changed and ring(group) or generation
return answer
