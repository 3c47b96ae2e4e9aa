-- Messages by the order of writing: looks at a bounded number of those in some sorted sets, and answers what fits.
begin(KEYS[1])
local read = arguments(1)
local from, newest_first, most, limit = read(), read() == '1', tonumber(read()), tonumber(read())
local sets = {}
for place = 1, tonumber(read()) do sets[place] = read() end
local topic, name, group = optional(read()), optional(read()), optional(read())
local statuses = {}
for _ = 1, tonumber(read()) do statuses[read()] = true end
local any = next(statuses) == nil

local seqs, full = {}, false
for _, set in ipairs(sets) do
  local found
  if newest_first then
    found = redis.call('ZREVRANGEBYSCORE', key(set), from == '' and '+inf' or '(' .. from, '-inf', 'LIMIT', 0, most)
  else
    found = redis.call('ZRANGEBYSCORE', key(set), from == '' and '-inf' or '(' .. from, '+inf', 'LIMIT', 0, most)
  end
  full = full or #found == most
  for _, seq in ipairs(found) do seqs[#seqs + 1] = tonumber(seq) end
end
table.sort(seqs, function(a, b)
  if newest_first then return a > b end
  return a < b
end)

local function asks(seq, ack_groups)
  for _, other in ipairs(ack_groups and names(ack_groups) or {}) do
    if other == group then return true end
  end
  return redis.call('HEXISTS', key('acks:' .. seq), group) == 1
end

local items, seen, last = {}, {}, false
for place = 1, math.min(#seqs, most) do
  local seq = seqs[place]
  last = seq
  local is, its_topic, its_key, ack_groups, slot =
    unpack(redis.call('HMGET', message_key(seq), 'status', 'topic', 'key', 'ack_groups', 'slot'))
  if its_topic and (not topic or topic == its_topic) and (not name or name == its_key)
    and (any or statuses[flies(seq, tonumber(slot), seen) and 'in_flight' or is or 'pending'])
    and (not group or asks(seq, ack_groups)) then
    items[#items + 1] = record(seq, seen)
    if #items == limit then return { items, last, 1 } end
  end
end
-- More may follow when a set gave all that was asked of it, or when not all that was found was looked at.
return { items, last, (full or #seqs > most) and 1 or 0 }
