-- Leases of lanes: see lanes.rs.

-- Entries of old buckets that are sorted anew in one call.
local MOVE = 2000

local function all_lanes()
  local lanes, list = {}, redis.call('HGETALL', key('lanes'))
  for place = 1, #list, 2 do
    lanes[tonumber(list[place])] = lane_from(list[place + 1])
  end
  return lanes
end

local function write_lane(number, lane)
  redis.call('HSET', key('lanes'), number, lane_text(lane))
end

local function set_free(number, lane)
  lane.lease, lane.till, lane.owner = '', 0, ''
  write_lane(number, lane)
end

-- Sorts sendable messages into the buckets of the new number of lanes, a bounded number of them. True at the end.
local function move(old, left)
  for lane = 0, old - 1 do
    local topics = topics_key(old, lane)
    for _, topic in ipairs(redis.call('SMEMBERS', topics)) do
      local from = bucket(old, lane, topic)
      local seqs = redis.call('ZRANGE', from, 0, left - 1)
      for _, seq in ipairs(seqs) do
        local slot = redis.call('HGET', message_key(seq), 'slot')
        if slot then make_ready(seq, topic, tonumber(slot)) end
      end
      if #seqs > 0 then redis.call('ZREM', from, unpack(seqs)) end
      left = left - #seqs
      if left <= 0 then return false end
      redis.call('SREM', topics, topic)
    end
  end
  return true
end

-- Puts a wanted number of lanes in force if nothing stands in its way: 'done', 'moving' (call again) or 'busy'.
-- The key of a bucket has the number of lanes in it, so that writers need not wait while the others are sorted.
local function resize(lanes)
  local new, current, wanted = unpack(settings)
  if new == current then
    if wanted == current then return 'done' end
    -- An open batch counts even when its owner is dead: only a relay, which knows the routes, can resolve it.
    for number, lane in pairs(lanes) do
      if lane.till > now or redis.call('EXISTS', batches_key(number)) == 1 then return 'busy' end
    end
    new = wanted
    settings[1] = new
    redis.call('HSET', key('settings'), 'layout', new)
  end
  if not move(tonumber(current), MOVE) then return 'moving' end
  settings[2] = new
  redis.call('HSET', key('settings'), 'lanes', new)
  return wanted == new and 'done' or 'moving'
end

-- The messages of the batches that a former owner left open, and what becomes of each.
local function orphans_on(number)
  local seqs, found = {}, {}
  for _, batch in ipairs(batches_on(number)) do
    for _, seq in ipairs(batch.seqs) do seqs[#seqs + 1] = seq end
  end
  for _, seq in ipairs(seqs) do
    local topic, name, slot, status, attempts, crashes, delivery =
      unpack(redis.call('HMGET', message_key(seq), 'topic', 'key', 'slot', 'status', 'attempts', 'crashes', 'delivery'))
    local orphan = { seq = seq, topic = topic, key = name, slot = tonumber(slot or 0) }
    -- Somebody deleted it by hand; that must not keep the lane from its new owner.
    if topic then
      orphan.before = in_flight(state_of(status, attempts, crashes, delivery))
      orphan.after = step(orphan.before, 'orphaned')
    end
    found[#found + 1] = orphan
  end
  return found
end

local function bury(orphan, rule, reason)
  moved(orphan.before.rest, 'dead')
  redis.call('HSET', message_key(orphan.seq), 'status', 'dead', 'dead_reason', reason, 'dead_at', now)
  unready(orphan.seq, orphan.topic, orphan.slot)
  redis.call('ZREM', key('unsent'), orphan.seq)
  redis.call('ZADD', key('dead'), orphan.seq, orphan.seq)
  if orphan.key and rule then
    hold.place(orphan.topic, orphan.key, tonumber(orphan.seq))
  elseif orphan.key then
    hold.lift(orphan.topic, orphan.key, tonumber(orphan.seq))
  end
end

-- Makes what was left sendable again. Answers how many messages it had and how many of them are Dead now.
local function resolve(number, found, rules, reason)
  redis.call('DEL', batches_key(number))
  local dead = 0
  for _, orphan in ipairs(found) do
    if orphan.topic then
      redis.call('HSET', message_key(orphan.seq), 'crashes', orphan.after.crashes)
      if orphan.after.status == 'dead' then
        dead = dead + 1
        bury(orphan, rules[orphan.topic], reason)
      end
    end
  end
  return #found, dead
end

