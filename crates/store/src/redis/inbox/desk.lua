-- The inbox of one group: see inbox.rs.
local inbox

-- `rules`: ordered, hold_dead, acknowledge, max_attempts, first, cap, jitter.
local function open_inbox(group, rules)
  inbox = { group = group, name = P .. ':in:' .. group .. ':', rules = rules, counts = {}, seen = {} }
  -- Nearly always nothing is parked, and then nobody needs to look.
  inbox.parked = redis.call('EXISTS', inbox.name .. 'parked') == 1
end

local function in_key(name)
  return inbox.name .. name
end

local function tell(name, by)
  inbox.counts[name] = (inbox.counts[name] or 0) + by
end

-- All reservations of a group are in one hash, so that a batch of them is read, written and removed at once: a token, a
-- colon and when it ends.
local function reservation(token, lease)
  return token .. ':' .. now + lease
end

-- The token of a reservation, nil if it has ended.
local function token_of(reservation)
  if tonumber(string.sub(reservation, 38)) > now then return string.sub(reservation, 1, 36) end
end

local function end_reservations(ids)
  if #ids > 0 then redis.call('HDEL', in_key('reserved'), unpack(ids)) end
end

-- Who has these ids reserved: the tokens, by id. What has ended is removed: a clock that is set back must not revive it.
local function reserved(ids)
  local held, ended = {}, {}
  if #ids == 0 then return held end
  for place, reservation in ipairs(redis.call('HMGET', in_key('reserved'), unpack(ids))) do
    if reservation then
      held[ids[place]] = token_of(reservation)
      if not held[ids[place]] then ended[#ended + 1] = ids[place] end
    end
  end
  end_reservations(ended)
  return held
end

local write_marks

local function close_inbox()
  if inbox.fresh then write_marks(inbox.fresh) end
  redis.call('HSETNX', key('groups'), inbox.group, '')
  for name, by in pairs(inbox.counts) do
    if by ~= 0 then redis.call('HINCRBY', in_key('counts'), name, by) end
  end
  finish()
end

local function read_rules(read)
  return { ordered = read() == '1', hold_dead = read() == '1', acknowledge = read() == '1',
    max_attempts = tonumber(read()), first = tonumber(read()), cap = tonumber(read()), jitter = tonumber(read()),
    other_content = read(), behind = read() }
end

local ARRIVAL = { 'topic', 'payload', 'content_type', 'headers', 'occurred_at', 'type', 'key', 'seq', 'delivery' }

-- Arrivals come in columns: of nearly all a script needs no more than the id and what Redis knows of it. These are what
-- tells one from others (a key as '=text'), and where its row is if more of it is told; `more` columns of the script's own
-- follow, and the rows. Every byte of an argument costs a script its time.
local ID, DIGEST, TOPIC, KEY, SEQ, ROW, OWN = 0, 1, 2, 3, 4, 5, 6
local ROW_LENGTH = 7

local function read_arrivals(read, where, more)
  local count = tonumber(read())
  inbox.columns, inbox.count = where(), count
  inbox.rows = inbox.columns + (OWN + more) * count
  local ids = {}
  for place = 1, count do
    ids[place] = ARGV[inbox.columns + place - 1]
  end
  return ids
end

local function column(name, place)
  return ARGV[inbox.columns + name * inbox.count + place - 1]
end

local function arrival_at(place)
  local arrival = { id = column(ID, place), digest = column(DIGEST, place), topic = column(TOPIC, place),
    key = optional(column(KEY, place)) }
  if column(SEQ, place) ~= '' then arrival.seq = column(SEQ, place) end
  local row = tonumber(column(ROW, place))
  if row then
    local read = arguments(inbox.rows + ROW_LENGTH * (row - 1))
    arrival.whole = true
    arrival.chance, arrival.payload, arrival.content_type, arrival.headers = tonumber(read()), read(), read(), read()
    arrival.occurred_at, arrival.type, arrival.delivery = read(), optional(read()), read()
  end
  return arrival
end

-- Those of a key that wait, and those that are Dead, by their position.
local function line(kind, topic, name)
  return in_key(kind .. ':' .. topic .. ':' .. name)
end

local function first_of(set)
  local found = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  return found[1], tonumber(found[2])
end

-- A parked message's place.
local function place_of(id)
  if not inbox.parked then return nil end
  local position, digest, attempts, due, dead, text, topic, name =
    unpack(redis.call('HMGET', in_key('p:' .. id), 'position', 'digest', 'attempts', 'next_attempt_at', 'dead', 'error',
      'topic', 'key'))
  if not position then return nil end
  return { position = tonumber(position), digest = digest, attempts = tonumber(attempts), due = tonumber(due or nil),
    dead = dead == '1', error = text, topic = topic, key = name }
end

-- When it is tried again: a time, or nil when it waits behind another or for a person.
local function set_due(id, due)
  if due then
    redis.call('HSET', in_key('p:' .. id), 'next_attempt_at', due)
    redis.call('ZADD', in_key('due'), due, id)
  else
    redis.call('HDEL', in_key('p:' .. id), 'next_attempt_at')
    redis.call('ZREM', in_key('due'), id)
  end
end

local function stand_in_line(id, topic, name, position, dead)
  if not name then return end
  redis.call('ZREM', line(dead and 'wait' or 'dead', topic, name), id)
  redis.call('ZADD', line(dead and 'dead' or 'wait', topic, name), position, id)
end

-- The first message of a key that waits behind nobody any more is due at once.
local function wake_next(topic, name)
  if not name then return end
  local id = first_of(line('wait', topic, name))
  if id and redis.call('HEXISTS', in_key('p:' .. id), 'next_attempt_at') == 0 then set_due(id, now) end
end

-- Whether another of its key holds it back: one before `position`, or any.
local function blocked(arrival, position)
  if not arrival.key or not inbox.rules.ordered then return false end
  position = position or math.huge
  local _, waits = first_of(line('wait', arrival.topic, arrival.key))
  if waits and waits < position then return true end
  local _, died = first_of(line('dead', arrival.topic, arrival.key))
  return inbox.rules.hold_dead and died ~= nil and died < position
end

-- Writes the parked message. True when it was not parked before.
local function park(arrival, attempts, due, dead, text)
  local place = place_of(arrival.id)
  local position = place and place.position
  if not place then
    if not arrival.whole then refuse('only what is known as a whole can be kept') end
    position = redis.call('INCR', in_key('position'))
    local fields = { 'id', arrival.id, 'digest', arrival.digest, 'position', position }
    for _, name in ipairs(ARRIVAL) do
      if arrival[name] then
        fields[#fields + 1] = name
        fields[#fields + 1] = arrival[name]
      end
    end
    redis.call('HSET', in_key('p:' .. arrival.id), unpack(fields))
    redis.call('ZADD', in_key('parked'), position, arrival.id)
    inbox.parked = true
  end
  redis.call('HSET', in_key('p:' .. arrival.id), 'attempts', attempts, 'dead', dead and 1 or 0, 'error',
    string.sub(text, 1, 2000))
  set_due(arrival.id, due)
  stand_in_line(arrival.id, arrival.topic, arrival.key, position, dead)
  return not place
end

local function take_out(id, place)
  redis.call('DEL', in_key('p:' .. id))
  redis.call('ZREM', in_key('parked'), id)
  redis.call('ZREM', in_key('due'), id)
  if place.key then
    redis.call('ZREM', line('wait', place.topic, place.key), id)
    redis.call('ZREM', line('dead', place.topic, place.key), id)
  end
  tell(place.dead and 'dead' or 'parked', -1)
end

-- A message is done: if it was parked, it is no more, and the next of its key may go. Another message under its id
-- stays; so does what waits for a person, unless `dead` says that this very work was done after all.
local function unpark(arrival, dead)
  local place = place_of(arrival.id)
  if not place or place.digest ~= arrival.digest or (place.dead and not dead) then return end
  take_out(arrival.id, place)
  wake_next(arrival.topic, arrival.key)
end

-- Keeps a message for a person.
local function bury_in_inbox(arrival, attempts, text)
  if not park(arrival, attempts, nil, true, text) then tell('parked', -1) end
  tell('dead', 1)
  if not inbox.rules.hold_dead then wake_next(arrival.topic, arrival.key) end
  return { 'dead', text }
end

-- Keeps a message that failed for its next try, or for a person at its limit. The wait is `RetryPolicy::delay`.
local function retry(arrival, attempts, text, after)
  attempts = attempts + 1
  local rules = inbox.rules
  if attempts >= rules.max_attempts then
    return bury_in_inbox(arrival, attempts, 'MaxAttempts(' .. rules.max_attempts .. ') exceeded: ' .. text)
  end
  local least = math.min(rules.first * 2 ^ math.min(attempts - 1, 31), rules.cap)
  local wait = math.floor(least + math.max(least / 4, rules.jitter) * arrival.chance)
  if park(arrival, attempts, now + math.max(wait, after), false, text) then tell('parked', 1) end
  return { 'parked', text }
end

local function acknowledge_arrival(arrival)
  if inbox.rules.acknowledge then acknowledge(arrival.id, arrival.seq, inbox.group, inbox.seen) end
end

-- Asks for the marks of all these at once. From here on marks are written together, at the end: where work runs in
-- between, they must not wait.
local function read_marks(ids)
  inbox.marks, inbox.fresh = {}, {}
  if #ids == 0 then return end
  for place, mark in ipairs(redis.call('HMGET', in_key('done'), unpack(ids))) do
    inbox.marks[ids[place]] = mark
  end
end

-- Whether nothing is known of an id, and nothing can hold it back: then nobody needs to look at the rest of it.
local function is_plain(id)
  return not inbox.parked and not inbox.marks[id]
end

-- An id that was marked without its content (`postrider_once`) is taken for any.
local function mark_of(arrival)
  local mark
  if inbox.marks then
    mark = inbox.marks[arrival.id]
  else
    mark = redis.call('HGET', in_key('done'), arrival.id)
  end
  return mark, mark and (mark == '' or mark == arrival.digest)
end

function write_marks(marks)
  if #marks == 0 then return end
  local fields, position = {}, redis.call('INCRBY', in_key('position'), #marks) - #marks
  for place, mark in ipairs(marks) do
    fields[2 * place - 1], fields[2 * place] = mark.id, mark.digest
  end
  redis.call('HSET', in_key('done'), unpack(fields))
  local log, at = in_key('log'), string.format('%d', now)
  for place, mark in ipairs(marks) do
    redis.call('XADD', log, string.format('%d-0', position + place), 'at', at, 'id', mark.id, 'topic', mark.topic,
      'key', mark.key, 'seq', mark.seq)
  end
  tell('processed', #marks)
end

-- `name` is a key as '=text', and like `seq` '' where there is none.
local function mark(id, digest, topic, name, seq)
  local mark = { id = id, digest = digest, topic = topic, key = name, seq = seq }
  if not inbox.marks then return write_marks({ mark }) end
  inbox.marks[id] = digest
  inbox.fresh[#inbox.fresh + 1] = mark
end

-- The receipt of a message that was done before, if it was.
local function done_before(arrival)
  local known, same = mark_of(arrival)
  if not known then return nil end
  if same then
    tell('duplicates', 1)
    -- A crash between a handler's own commit and its conclusion leaves it parked.
    unpark(arrival, false)
    acknowledge_arrival(arrival)
    return 'duplicate'
  end
  -- It may come often; it is kept, and counted, once, and never in the place of another.
  local place = place_of(arrival.id)
  if place and (place.dead or place.digest ~= arrival.digest) then return { 'dead', inbox.rules.other_content } end
  return bury_in_inbox(arrival, 0, inbox.rules.other_content)
end

-- Whether an arrival that is known in brief may have to be kept. Whoever asked is answered up to the first such one, and
-- tells all of the others: no later one of its key may pass it.
local function is_lacking(arrival)
  if arrival.whole then return false end
  local known, same = mark_of(arrival)
  if known then return not same end
  return inbox.parked and not place_of(arrival.id) and blocked(arrival)
end

-- The receipt of an arrival that may not be worked on now, or nil and how often it has failed.
local function standing(arrival)
  local receipt = done_before(arrival)
  if receipt then return receipt end
  local place = place_of(arrival.id)
  if not place then
    if not inbox.parked or not blocked(arrival) then return nil, 0 end
    park(arrival, 0, nil, false, inbox.rules.behind)
    tell('parked', 1)
    return { 'parked', inbox.rules.behind }
  end
  if place.digest ~= arrival.digest then return { 'dead', inbox.rules.other_content } end
  if place.dead then return { 'dead', place.error } end
  if not place.due or place.due > now then return { 'parked', place.error } end
  -- It was given a fresh start, or those before it were: it goes back into the queue.
  if blocked(arrival, place.position) then
    set_due(arrival.id, nil)
    redis.call('HSET', in_key('p:' .. arrival.id), 'error', inbox.rules.behind)
    return { 'parked', inbox.rules.behind }
  end
  return nil, place.attempts
end

local function finished(arrival)
  unpark(arrival, true)
  acknowledge_arrival(arrival)
  return 'done'
end

-- Writes what the handler said, for an arrival that is free.
local function conclude(arrival, attempts, handled)
  if handled.kind == 'done' then
    mark(arrival.id, arrival.digest, arrival.topic, arrival.key and '=' .. arrival.key or '', arrival.seq or '')
    return finished(arrival)
  end
  if handled.kind == 'retry' then return retry(arrival, attempts, handled.error, handled.after) end
  if handled.kind == 'dead' then return bury_in_inbox(arrival, attempts + 1, handled.error) end
  return { 'unavailable', handled.error }
end

