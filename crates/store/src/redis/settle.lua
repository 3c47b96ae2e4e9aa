-- Writing what became of a batch: see settle.rs.

-- Tries in vain that are kept for each message.
local history

-- Reads settlements and decides, before anything is written, which of them are too late.
local function read_settlements(read)
  local settlements, spent = {}, {}
  history = tonumber(read())
  for _ = 1, tonumber(read()) do
    local settlement = { lane = read(), epoch = read(), lease = read(), id = read(), verdicts = {}, beside = {} }
    for place = 1, tonumber(read()) do
      local verdict = { seq = read(), kind = read() }
      if verdict.kind == 'sent' then
        verdict.ack_groups = read()
      elseif verdict.kind == 'failed' then
        verdict.error, verdict.wait, verdict.hold = read(), tonumber(read()), read() == '1'
      elseif verdict.kind == 'dead' then
        verdict.reason, verdict.error, verdict.attempted, verdict.hold = read(), read(), read() == '1', read() == '1'
      elseif verdict.kind == 'tried' then
        verdict.error = read()
      elseif verdict.kind == 'postponed' then
        verdict.wait = tonumber(read())
      end
      settlement.verdicts[place] = verdict
    end
    for place = 1, tonumber(read()) do settlement.beside[place] = read_message(read) end
    local lane = lane_from(redis.call('HGET', key('lanes'), settlement.lane))
    local text = redis.call('HGET', batches_key(settlement.lane), settlement.id)
    local batch = text and batch_from(settlement.id, text)
    settlement.fenced = not batch or spent[settlement.id]
      or tostring(lane.epoch) ~= settlement.epoch or lane.lease ~= settlement.lease
      or batch.epoch ~= settlement.epoch or batch.lease ~= settlement.lease
    if not settlement.fenced then
      spent[settlement.id] = true
      settlement.whole = #batch.seqs == #settlement.verdicts
      settlement.size = #batch.seqs
      for place, verdict in ipairs(settlement.verdicts) do
        settlement.whole = settlement.whole and batch.seqs[place] == verdict.seq
      end
    end
    settlements[#settlements + 1] = settlement
  end
  return settlements
end

local function in_vain(seq, outcome, text)
  count('publish_failure_total', 1)
  redis.call('RPUSH', key('attempts:' .. seq), now .. ' ' .. outcome .. ' ' .. text)
  redis.call('LTRIM', key('attempts:' .. seq), -history, -1)
end

-- Where seqs go and leave, a sorted set at a time.
local function mover()
  local adds, removes = {}, {}
  local function of(list, name)
    list[name] = list[name] or {}
    return list[name]
  end
  local function write(command, list)
    for name, values in pairs(list) do
      for from = 1, #values, 2000 do
        redis.call(command, name, unpack(values, from, math.min(from + 1999, #values)))
      end
    end
  end
  return {
    add = function(name, seq)
      local list = of(adds, name)
      list[#list + 1] = seq
      list[#list + 1] = seq
    end,
    remove = function(name, seq)
      local list = of(removes, name)
      list[#list + 1] = seq
    end,
    write = function()
      write('ZREM', removes)
      write('ZADD', adds)
    end,
  }
end

local function sent(message, verdict)
  local seq = verdict.seq
  -- An empty list of groups is as much an answer as a full one.
  local ack_groups = message.ack_groups or verdict.ack_groups
  redis.call('HSET', message_key(seq), 'status', message.after.status, 'sent_at', now, 'ack_groups', ack_groups)
  if ack_groups ~= '[]' then
    for _, group in ipairs(names(ack_groups)) do
      -- A consumer may be quicker than this settle: what it acknowledged must not be asked for again.
      if redis.call('HEXISTS', key('acks:' .. seq), group) == 0 then
        redis.call('ZADD', key('unacked:' .. group), seq, seq)
      end
    end
  end
  if message.key and message.holds then
    if message.held then hold.stand(hold_name(message.topic, message.key), seq) end
    hold.lift(message.topic, message.key, tonumber(seq))
  end
  count('publish_success_total', 1)
  waited('write_to_sent', now - message.written_at)
end

local function failed(message, verdict)
  local seq, due = verdict.seq, now + verdict.wait
  redis.call('HSET', message_key(seq), 'status', message.after.status, 'attempts', message.after.attempts,
    'next_attempt_at', due, 'last_error', verdict.error)
  redis.call('ZADD', key('due'), due, seq)
  if message.held then hold.stand(hold_name(message.topic, message.key), seq) end
  if message.key and verdict.hold then hold.place(message.topic, message.key, tonumber(seq)) end
  in_vain(seq, 'failed', verdict.error)
end

local function dead(message, verdict)
  local seq = verdict.seq
  redis.call('HSET', message_key(seq), 'status', message.after.status, 'attempts', message.after.attempts,
    'last_error', verdict.error, 'dead_reason', verdict.reason, 'dead_at', now)
  if message.held then hold.stand(hold_name(message.topic, message.key), seq) end
  if message.key and verdict.hold then
    hold.place(message.topic, message.key, tonumber(seq))
  elseif message.key then
    hold.lift(message.topic, message.key, tonumber(seq))
  end
  in_vain(seq, 'dead', verdict.error)
end

local function postponed(message, verdict)
  local seq, due = verdict.seq, now + verdict.wait
  redis.call('HSET', message_key(seq), 'next_attempt_at', due)
  redis.call('ZADD', key('due'), due, seq)
  if message.held then hold.stand(hold_name(message.topic, message.key), seq) end
  if message.key then hold.lift(message.topic, message.key, tonumber(seq)) end
end

local EVENTS = { sent = 'confirmed', failed = 'failed', tried = 'released', postponed = 'released' }

local function settle_message(verdict, holds, mover)
  local seq = verdict.seq
  local topic, name, slot, written_at, ack_groups, held, status, attempts, crashes, delivery =
    unpack(redis.call('HMGET', message_key(seq), 'topic', 'key', 'slot', 'written_at', 'ack_groups', 'held',
      'status', 'attempts', 'crashes', 'delivery'))
  -- Somebody deleted it by hand: there is nothing to write, and the rest of the batch goes on.
  if not topic then return end
  local state = in_flight(state_of(status, attempts, crashes, delivery))
  local event = EVENTS[verdict.kind] or (verdict.attempted and 'rejected' or 'given up')
  -- The relay has decided by its route's policy that another attempt is left.
  local after = step(state, event, math.huge)
  moved(state.rest, after.status)
  local message = { topic = topic, key = name, ack_groups = ack_groups, held = held, holds = holds,
    written_at = tonumber(written_at), after = after }
  if verdict.kind == 'tried' then
    redis.call('HSET', message_key(seq), 'last_error', verdict.error)
    in_vain(seq, 'released', verdict.error)
    return
  end
  mover.remove(bucket(layout(), tonumber(slot) % layout(), topic), seq)
  if verdict.kind == 'failed' then return failed(message, verdict) end
  if verdict.kind == 'postponed' then return postponed(message, verdict) end
  mover.remove(key('unsent'), seq)
  mover.add(key(after.status), seq)
  if verdict.kind == 'sent' then return sent(message, verdict) end
  dead(message, verdict)
end

-- Writes the settlements that are not too late. Answers the batches of those that are.
local function settle(settlements)
  local fenced, mover, holds = {}, mover(), hold.any()
  open_writes()
  for _, settlement in ipairs(settlements) do
    if settlement.fenced then
      fenced[#fenced + 1] = settlement.id
    else
      redis.call('HDEL', batches_key(settlement.lane), settlement.id)
      for _, verdict in ipairs(settlement.verdicts) do
        if verdict.kind ~= 'released' then
          settle_message(verdict, holds, mover)
          holds = holds or verdict.hold
        end
      end
      for _, message in ipairs(settlement.beside) do
        -- One whose id is taken is there already.
        if not taken(message.id) then write(message) end
      end
    end
  end
  close_writes()
  mover.write()
  return fenced
end

