-- What every script starts with: names of keys, the clock, the transitions of a message, and the counters.
local P, now, settings, tally

local function key(name)
  return P .. ':' .. name
end

local function message_key(seq)
  return P .. ':m:' .. seq
end

-- Apart from its message: Redis keeps a hash of short fields in a third of the room, and reads it faster.
local function payload_key(seq)
  return P .. ':b:' .. seq
end

local function refuse(text)
  error({ err = 'ERR postrider: ' .. text })
end

-- Sets the scene. Nothing may survive from an earlier call: functions of a library keep their variables.
local function begin(prefix)
  P, tally = prefix, {}
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
  settings = redis.call('HMGET', key('settings'), 'layout', 'lanes', 'lanes_wanted')
  -- Going on in a store that was flushed would give out epochs a second time.
  if not settings[1] then
    refuse('there is no store at ' .. P .. ': start postrider, or mend the prefix; was Redis flushed?')
  end
end

-- Lets a script write although Redis is full: Redis asks only before the first write of a script, and never for DEL.
-- For whoever makes room: relays and retention must go on while writers are turned away.
local function even_when_full()
  redis.call('DEL', key('full'))
end

-- A reader of ARGV from `first` on, and where it is.
local function arguments(first)
  local at = first - 1
  local function read()
    at = at + 1
    return ARGV[at]
  end
  return read, function() return at + 1 end
end

-- '' is nothing, '=text' is text: an empty text is something.
local function optional(text)
  if text ~= '' then
    return string.sub(text, 2)
  end
end

-- A random-looking UUID from a seed that is never used twice; `head` is put in front of it.
local function uuid(seed, head)
  local hex = (head or '') .. redis.sha1hex(seed)
  local version = head and '7' or '8'
  return string.sub(hex, 1, 8) .. '-' .. string.sub(hex, 9, 12) .. '-' .. version .. string.sub(hex, 14, 16)
    .. '-a' .. string.sub(hex, 18, 20) .. '-' .. string.sub(hex, 21, 32)
end

-- The one place in Lua that decides what may follow what; `message::step` says the same, and a test compares them.
local CRASHES_BEFORE_ALONE, CRASHES_BEFORE_DEAD = 2, 5

local function at(state, status, attempts, crashes)
  return {
    status = status,
    rest = status,
    attempts = attempts or state.attempts,
    crashes = crashes or state.crashes,
    delivery = state.delivery,
  }
end

local function in_flight(state)
  local next = at(state, 'in_flight')
  next.rest = state.status
  return next
end

local function again(state)
  local next = at(state, 'pending', 0, 0)
  next.delivery = state.delivery + 1
  return next
end

local function gone()
  return 'gone'
end

local function same(state)
  return state
end

local steps = {
  pending = { claimed = in_flight, deleted = gone },
  failed = { claimed = in_flight, deleted = gone },
  in_flight = {
    confirmed = function(state) return at(state, 'sent') end,
    failed = function(state, most)
      local attempts = state.attempts + 1
      return at(state, attempts >= most and 'dead' or 'failed', attempts)
    end,
    rejected = function(state) return at(state, 'dead', state.attempts + 1) end,
    ['given up'] = function(state) return at(state, 'dead') end,
    released = function(state) return at(state, state.rest) end,
    orphaned = function(state)
      local crashes = state.crashes + 1
      return at(state, crashes >= CRASHES_BEFORE_DEAD and 'dead' or state.rest, nil, crashes)
    end,
    acknowledged = same,
  },
  sent = { acknowledged = same, redelivered = again, deleted = gone, expired = gone },
  dead = { requeued = again, discarded = gone, deleted = gone, expired = gone },
}

-- What `event` makes of a message in `state`: a state, 'gone', or nil when it cannot happen.
local function step(state, event, most)
  local follow = steps[state.status][event]
  return follow and follow(state, most)
end

-- A state from the fields status, attempts, crashes and delivery as HMGET gives them.
local function state_of(status, attempts, crashes, delivery)
  status = status or 'pending'
  return {
    status = status,
    rest = status,
    attempts = tonumber(attempts or 0),
    crashes = tonumber(crashes or 0),
    delivery = tonumber(delivery or 0),
  }
end

-- Counters are added up and written once, at the end.
local function count(name, by)
  tally[name] = (tally[name] or 0) + by
end

local function moved(from, to)
  if from == 'failed' then count('failed', -1) end
  if to == 'failed' then count('failed', 1) end
  if to == 'dead' and from ~= 'dead' then count('dead_total', 1) end
end

local BOUNDS = { 1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 5000, 30000, 300000, 3600000 }

local function waited(name, wait)
  wait = math.max(wait, 0)
  local bucket = #BOUNDS
  for index, bound in ipairs(BOUNDS) do
    if wait <= bound then
      bucket = index - 1
      break
    end
  end
  count(name .. ':' .. bucket, 1)
  count(name .. ':millis', wait)
end

local function finish()
  for name, by in pairs(tally) do
    if by ~= 0 then redis.call('HINCRBY', key('counters'), name, by) end
  end
  tally = {}
end

-- The number of lanes by which sendable messages are sorted; while it changes, the number that is coming.
local function layout()
  return tonumber(settings[1])
end

local function bucket(lanes, lane, topic)
  return P .. ':ready:' .. lanes .. ':' .. lane .. ':' .. topic
end

local function topics_key(lanes, lane)
  return P .. ':topics:' .. lanes .. ':' .. lane
end

local function make_ready(seq, topic, slot)
  local lanes = layout()
  local lane = slot % lanes
  redis.call('ZADD', bucket(lanes, lane, topic), seq, seq)
  redis.call('SADD', topics_key(lanes, lane), topic)
end

local function unready(seq, topic, slot)
  redis.call('ZREM', bucket(layout(), slot % layout(), topic), seq)
end

-- The open batches of a lane, by id: 'epoch lease failed size topic,topic,… seq,seq,…'.
local function batches_key(lane)
  return P .. ':batches:' .. lane
end

local function batch_from(id, text)
  local epoch, lease, failed, size, topics, seqs = string.match(text, '^(%S+) (%S+) (%d+) (%d+) (%S*) (%S*)$')
  local batch = { id = id, epoch = epoch, lease = lease, failed = tonumber(failed), size = tonumber(size),
    topics = topics, seqs = {} }
  for seq in string.gmatch(seqs, '%d+') do
    batch.seqs[#batch.seqs + 1] = seq
  end
  return batch
end

local function batches_on(lane)
  local batches, list = {}, redis.call('HGETALL', batches_key(lane))
  for place = 1, #list, 2 do
    batches[#batches + 1] = batch_from(list[place], list[place + 1])
  end
  return batches
end

-- A lane: 'epoch:lease:until:owner'.
local function lane_from(text)
  local epoch, lease, till, owner = string.match(text or '0::0:', '^(%d+):([^:]*):(%d+):(.*)$')
  return { epoch = tonumber(epoch), lease = lease, till = tonumber(till), owner = owner }
end

local function lane_text(lane)
  return lane.epoch .. ':' .. lane.lease .. ':' .. lane.till .. ':' .. lane.owner
end

-- Until when the relay that has the message in its hands may work on it, or nil when nobody has it. `seen` remembers
-- the batches that were read before.
local function flies(seq, slot, seen)
  local lane = slot % layout()
  local known = seen[lane]
  if known == nil then
    known = {}
    for _, batch in ipairs(batches_on(lane)) do
      known.till = known.till or lane_from(redis.call('HGET', key('lanes'), lane)).till
      for _, other in ipairs(batch.seqs) do
        known[other] = true
      end
    end
    seen[lane] = known
  end
  if known[tostring(seq)] then return known.till end
end

-- A list of names as JSON; what cannot be read is nobody.
local function names(json)
  local readable, list = pcall(cjson.decode, json or '[]')
  return readable and type(list) == 'table' and list or {}
end

