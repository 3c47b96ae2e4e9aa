-- What all scripts use. KEYS[1] is the prefix of all keys; its braces put them into one slot.
local prefix = KEYS[1]

local function stream_of(topic, partition)
  return prefix .. ':stream:' .. topic .. ':' .. partition
end

-- Who is in a group and who owns what: `m:<member>`, `p:<topic>:<partition>`, `generation`.
local function group_key(group)
  return prefix .. ':group:' .. group
end

-- Milliseconds by the server's clock.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function whole(number)
  return string.format('%.0f', number)
end

-- Tells all members that the group has changed: those that wait for messages wait for this too.
local function ring(group)
  local generation = redis.call('XADD', prefix .. ':bell:' .. group, 'MAXLEN', 1, '*', 'changed', '1')
  redis.call('HSET', group_key(group), 'generation', generation)
  return generation
end

-- The arguments, one after another.
local place = 0
local function read()
  place = place + 1
  return ARGV[place]
end

