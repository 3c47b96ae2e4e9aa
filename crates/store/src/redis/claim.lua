-- Taking messages: see claim.rs.

-- Messages whose wait is over, and followers, that are made sendable in one turn; entries read from a bucket at once.
local DUE, FOLLOWERS, CHUNK = 500, 500, 64

-- Candidates that are looked at beyond those that may be taken: the rest is for the next turn.
local PASSED = 500

local FIELDS = { 'id', 'topic', 'type', 'key', 'size', 'content_type', 'headers', 'occurred_at', 'ack_groups',
  'written_at', 'status', 'attempts', 'crashes', 'delivery', 'slot' }

-- Makes messages whose wait is over sendable, whichever lane they are on: it decides nothing yet.
local function promote()
  local due = redis.call('ZRANGEBYSCORE', key('due'), '-inf', now, 'LIMIT', 0, DUE)
  for _, seq in ipairs(due) do
    local topic, slot = unpack(redis.call('HMGET', message_key(seq), 'topic', 'slot'))
    if topic then
      redis.call('HDEL', message_key(seq), 'next_attempt_at')
      make_ready(seq, topic, tonumber(slot))
    end
  end
  if #due > 0 then redis.call('ZREM', key('due'), unpack(due)) end
end

-- The wait until the first message is due again, or false.
local function next_due()
  local first = redis.call('ZRANGE', key('due'), 0, 0, 'WITHSCORES')
  return first[2] and math.max(first[2] - now, 0) or false
end

-- Whether a lane waits for an open batch with messages of a topic that may be taken: nobody may overtake what is in it.
-- Of a topic whose rule is not known, the worst is thought.
local function waits(lane, rules, unknown)
  local waiting = false
  for _, text in ipairs(redis.call('HVALS', batches_key(lane))) do
    for topic in string.gmatch(string.match(text, '^%S+ %S+ %d+ %d+ (%S*) '), '[^,]+') do
      local rule = rules[topic]
      if not rule then unknown[topic] = true end
      waiting = waiting or not rule or rule.take > 0
    end
  end
  return waiting
end

-- The leases of the order that are valid and wait for no open batch, by lane.
local function free_lanes(asked, rules, unknown)
  local free, numbers = {}, {}
  for place, lease in ipairs(asked) do numbers[place] = lease.lane end
  local lanes = redis.call('HMGET', key('lanes'), unpack(numbers))
  for place, lease in ipairs(asked) do
    local lane = lane_from(lanes[place])
    if tonumber(lease.lane) < layout() and tostring(lane.epoch) == lease.epoch and lane.lease == lease.lease
      and not waits(lease.lane, rules, unknown) then
      free[lease.lane] = lease
    end
  end
  return free
end

-- A heap of cursors, the one with the lowest seq first.
local function push(heap, cursor)
  local place = #heap + 1
  while place > 1 do
    local parent = math.floor(place / 2)
    if heap[parent].seq <= cursor.seq then break end
    heap[place], place = heap[parent], parent
  end
  heap[place] = cursor
end

local function pop(heap)
  local first, last = heap[1], table.remove(heap)
  if #heap == 0 then return first end
  local place = 1
  while true do
    local child = place * 2
    if child > #heap then break end
    if child < #heap and heap[child + 1].seq < heap[child].seq then child = child + 1 end
    if last.seq <= heap[child].seq then break end
    heap[place], place = heap[child], child
  end
  heap[place] = last
  return first
end

-- Moves a cursor to its next candidate. False at the end of its bucket.
local function advance(cursor)
  cursor.at = cursor.at + 1
  if cursor.at > #cursor.chunk then
    if #cursor.chunk < CHUNK and cursor.seq > 0 then return false end
    cursor.chunk = redis.call('ZRANGEBYSCORE', cursor.bucket, '(' .. cursor.seq, '+inf', 'LIMIT', 0, CHUNK)
    cursor.at = 1
    if #cursor.chunk == 0 then return false end
  end
  cursor.seq = tonumber(cursor.chunk[cursor.at])
  return true
end

-- A cursor for each lane and topic that has candidates. Notes the topics of which no rule is known.
local function cursors(free, rules, unknown)
  local heap, lanes = {}, layout()
  for lane in pairs(free) do
    local topics = topics_key(lanes, lane)
    for _, topic in ipairs(redis.call('SMEMBERS', topics)) do
      local rule = rules[topic]
      if not rule then
        unknown[topic] = true
      elseif rule.take > 0 then
        local cursor = { lane = lane, topic = topic, bucket = bucket(lanes, lane, topic), chunk = {}, at = 0, seq = 0 }
        if advance(cursor) then
          push(heap, cursor)
        else
          redis.call('SREM', topics, topic)
        end
      end
    end
  end
  return heap
end

local function size_of(row)
  return tonumber(row[5] or 0) + #row[2] + #(row[4] or '') + #(row[7] or '')
end

-- Fills one batch for each lane and channel; `pick.rs` says the same of the SQL stores.
local function pick(heap, rules, order)
  local batches, closed, parked, bytes, taken, looked, skipped = {}, {}, {}, 0, 0, 0, false
  local holds = hold.any()
  while #heap > 0 do
    if taken >= order.limit or looked >= order.limit + PASSED then
      skipped = true
      break
    end
    local cursor = pop(heap)
    local rule, lane, seq = rules[cursor.topic], cursor.lane, cursor.seq
    local place = lane .. ':' .. rule.channel
    looked = looked + 1
    local more = true
    if closed[place] then
      skipped, more = true, false
    elseif rule.take <= 0 then
      more = false
    else
      local row = redis.call('HMGET', message_key(seq), unpack(FIELDS))
      local batch = batches[place] or { lane = lane, channel = rule.channel, failed = 0, rows = {}, seqs = {}, topics = {} }
      local alone = tonumber(row[13] or 0) >= CRASHES_BEFORE_ALONE
      if not row[2] then
        -- Somebody deleted it by hand.
        parked[#parked + 1] = { seq = seq, bucket = cursor.bucket }
      elseif holds and rule.hold and row[4] and hold.blocks(cursor.topic, row[4], seq) then
        skipped = true
        parked[#parked + 1] = { seq = seq, topic = cursor.topic, key = row[4], slot = tonumber(row[15]) }
      elseif alone and #batch.rows > 0 then
        closed[place], skipped, more = true, true, false
      elseif bytes > 0 and bytes + size_of(row) > order.bytes then
        skipped = true
        break
      else
        closed[place] = alone
        bytes, taken, rule.take = bytes + size_of(row), taken + 1, rule.take - 1
        if row[11] == 'failed' then batch.failed = batch.failed + 1 end
        batch.rows[#batch.rows + 1] = { seq, row }
        batch.seqs[#batch.seqs + 1] = tostring(seq)
        batch.topics[cursor.topic] = true
        batches[place] = batch
      end
    end
    if more and advance(cursor) then push(heap, cursor) end
  end
  for _, follower in ipairs(parked) do
    if follower.key then
      hold.park(follower.topic, follower.key, follower.slot, follower.seq)
    else
      redis.call('ZREM', follower.bucket, follower.seq)
    end
  end
  return batches, skipped
end

-- The names that are keys of a table.
local function names_in(set)
  local names = {}
  for name in pairs(set) do names[#names + 1] = name end
  return names
end

-- Puts the payload of each row where its size was.
local function load_payloads(batch)
  local keys = {}
  for place, seq in ipairs(batch.seqs) do keys[place] = payload_key(seq) end
  for place, payload in ipairs(redis.call('MGET', unpack(keys))) do batch.rows[place][2][5] = payload end
end

-- The leases of the order, and whether any of their lanes has candidates: nearly always an idle relay asks in vain.
local function read_leases(read)
  local asked, topics, lanes = {}, {}, layout()
  for place = 1, tonumber(read()) do
    asked[place] = { lane = read(), epoch = read(), lease = read() }
    topics[place] = topics_key(lanes, asked[place].lane)
  end
  return asked, #asked > 0 and redis.call('EXISTS', unpack(topics)) > 0
end

-- Takes what the order allows: batches, whether more is waiting, the wait until something is due, unknown topics.
local function claim(read)
  promote()
  local draining = hold.drain_some(FOLLOWERS)
  local order = { limit = tonumber(read()), bytes = tonumber(read()), seed = read(), anyhow = read() == '1' }
  local asked, some = read_leases(read)
  -- While the number of lanes changes, nobody owns any.
  if not some or settings[1] ~= settings[2] then return {}, draining, next_due(), {} end
  local rules, unknown = {}, {}
  for _ = 1, tonumber(read()) do
    rules[read()] = { take = tonumber(read()), hold = read() == '1', channel = read() }
  end
  local free = free_lanes(asked, rules, unknown)
  local heap = cursors(free, rules, unknown)
  local names = names_in(unknown)
  -- One that is left out could be earlier than those that are taken.
  if #names > 0 and not order.anyhow then return {}, true, false, names end
  local batches, skipped = pick(heap, rules, order)
  local answer = {}
  for place, batch in pairs(batches) do
    local id, lease = uuid(order.seed .. place), free[batch.lane]
    load_payloads(batch)
    redis.call('HSET', batches_key(batch.lane), id, table.concat({ lease.epoch, lease.lease, batch.failed, #batch.seqs,
      table.concat(names_in(batch.topics), ','), table.concat(batch.seqs, ',') }, ' '))
    answer[#answer + 1] = { tonumber(batch.lane), id, tonumber(batch.channel), now, batch.rows }
  end
  return answer, skipped or draining or #names > 0, #answer == 0 and next_due(), names
end

