-- Removes what has been kept long enough, a bounded number at a time: see retain.rs.
begin(KEYS[1])
even_when_full()
local set, from, age, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local limit, removed = now - age, 0

-- Whether nobody has to acknowledge it, and nobody waits for it.
local function may_go(seq, name, topic, ended, ack_groups, held)
  if tonumber(ended) >= limit then return false end
  if set == 'dead' then
    return not held
      and not (name and redis.call('HGET', key('holds'), hold_name(topic, name)) == seq)
  end
  for _, group in ipairs(ack_groups and names(ack_groups) or {}) do
    if redis.call('ZSCORE', key('unacked:' .. group), seq) then return false end
  end
  return true
end

local seqs = redis.call('ZRANGEBYSCORE', key(set), '(' .. from, '+inf', 'LIMIT', 0, most)
for _, seq in ipairs(seqs) do
  local topic, name, written_at, sent_at, dead_at, ack_groups, held =
    unpack(redis.call('HMGET', message_key(seq), 'topic', 'key', 'written_at', 'sent_at', 'dead_at', 'ack_groups', 'held'))
  if not topic then
    redis.call('ZREM', key(set), seq)
  elseif tonumber(written_at) > limit then
    -- They stand in the order of writing: what follows is younger still.
    finish()
    return { removed, 0 }
  elseif may_go(seq, name, topic, (set == 'sent' and sent_at or dead_at) or written_at, ack_groups, held) then
    remove(seq)
    removed = removed + 1
  end
end
finish()
return { removed, #seqs == most and tonumber(seqs[#seqs]) or 0 }
