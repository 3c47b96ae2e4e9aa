-- Keys whose later messages wait for an earlier one: see hold.rs.
local hold = {}

local function hold_name(topic, name)
  return topic .. ':' .. name
end

local function held_key(field)
  return P .. ':held:' .. field
end

function hold.any()
  return redis.call('EXISTS', key('holds')) == 1
end

-- Whether the message `seq` of this key must wait.
function hold.blocks(topic, name, seq)
  local field = hold_name(topic, name)
  local holder = tonumber(redis.call('HGET', key('holds'), field) or nil)
  if not holder or holder >= seq then return false end
  return holder > 0 or tonumber(redis.call('HGET', key('draining'), field) or 0) < seq
end

local function wait_behind(field, seq)
  redis.call('HSET', message_key(seq), 'held', 1)
  redis.call('ZADD', held_key(field), seq, seq)
end

-- The message waits behind nobody any more.
function hold.stand(field, seq)
  redis.call('HDEL', message_key(seq), 'held')
  redis.call('ZREM', held_key(field), seq)
end

local function set_holder(field, seq)
  redis.call('HSET', key('holds'), field, seq)
  redis.call('HDEL', key('draining'), field)
end

-- Makes the later messages of the key wait for `seq`, which is in trouble.
function hold.place(topic, name, seq)
  local field = hold_name(topic, name)
  local holder = tonumber(redis.call('HGET', key('holds'), field) or 0)
  if holder > 0 and holder ~= seq then
    -- Both are in trouble: the later one waits for the earlier one as any follower does.
    wait_behind(field, math.max(holder, seq))
    if holder < seq then return end
  end
  set_holder(field, seq)
end

-- A follower that a claim met.
function hold.park(topic, name, slot, seq)
  unready(seq, topic, slot)
  wait_behind(hold_name(topic, name), seq)
end

-- The message `seq` no longer holds its key, if it did. The claims that follow let its followers go: a bounded number
-- in each, whatever one settle lifted.
function hold.lift(topic, name, seq)
  local field = hold_name(topic, name)
  if tonumber(redis.call('HGET', key('holds'), field) or 0) ~= seq then return end
  redis.call('HSET', key('holds'), field, 0)
  redis.call('HSET', key('draining'), field, 0)
end

-- Lets go up to `most` followers of a key in order. Answers how many, and whether any are left.
local function drain(field, most)
  local followers = redis.call('ZRANGE', held_key(field), 0, most - 1)
  for number, seq in ipairs(followers) do
    local topic, slot, status, due =
      unpack(redis.call('HMGET', message_key(seq), 'topic', 'slot', 'status', 'next_attempt_at'))
    hold.stand(field, seq)
    if status == 'dead' or due then
      -- The next one in trouble holds the rest.
      set_holder(field, seq)
      return number, false
    end
    if topic then make_ready(seq, topic, tonumber(slot)) end
  end
  if #followers == most then
    redis.call('HSET', key('draining'), field, followers[most])
    return most, true
  end
  redis.call('HDEL', key('holds'), field)
  redis.call('HDEL', key('draining'), field)
  return #followers, false
end

-- Lets go up to `most` followers of keys that are being drained. Answers whether any are left.
function hold.drain_some(most)
  if redis.call('EXISTS', key('draining')) == 0 then return false end
  for _, field in ipairs(redis.call('HRANDFIELD', key('draining'), 16)) do
    if most <= 0 then return true end
    most = most - drain(field, most)
  end
  return redis.call('EXISTS', key('draining')) == 1
end

