-- Gives back the attempts that are over, then locks the wanted ones.
-- KEYS: lock and counter of each message, those that are over first.
-- ARGV: lock TTL and counter TTL in milliseconds, how many are over; for each of those: owner, end;
--       for each wanted: owner, delivery, attempts.
-- Answers two lists: the wait (-1: locked), and the owner of the attempt that is waited for.
local ttl, keep, over = ARGV[1], ARGV[2], tonumber(ARGV[3])
local key, arg = 0, 3

for _ = 1, over do
  local lock, counter = KEYS[key + 1], KEYS[key + 2]
  local owner, ending = ARGV[arg + 1], ARGV[arg + 2]
  key, arg = key + 2, arg + 2
  if redis.pcall('HGET', counter, 'owner') == owner then
    redis.call('DEL', lock)
    if ending == 'finished' then
      redis.call('DEL', counter)
    else
      redis.call('HDEL', counter, 'owner')
      if ending == 'released' and redis.call('HINCRBY', counter, 'attempts', -1) <= 0 then
        redis.call('DEL', counter)
      end
    end
  end
end

local waits, owners = {}, {}
while key < #KEYS do
  local lock, counter = KEYS[key + 1], KEYS[key + 2]
  local owner, delivery, attempts = ARGV[arg + 1], tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3])
  key, arg = key + 2, arg + 3

  local known = redis.pcall('HMGET', counter, 'delivery', 'attempts', 'owner')
  if known.err then
    -- Somebody else's key has this name: it cannot say anything about the message.
    redis.call('DEL', counter)
    known = {false, false, false}
  end
  local rest = redis.call('PTTL', lock)
  if rest == -1 then
    -- A lock that somebody set without an end would hold its message for ever.
    redis.call('PEXPIRE', lock, ttl)
    rest = tonumber(ttl)
  end

  local held
  if known[1] and tonumber(known[1]) == delivery then
    held = tonumber(known[2]) > attempts
  elseif known[1] and tonumber(known[1]) < delivery then
    held = false
  else
    -- Nothing is known of whoever has the lock: it may be at work.
    held = rest >= 0
  end

  if held then
    waits[#waits + 1] = math.max(rest, 0)
    owners[#owners + 1] = known[3] or ''
  else
    redis.call('SET', lock, attempts + 1, 'PX', ttl)
    redis.call('HSET', counter, 'attempts', attempts + 1, 'delivery', delivery, 'owner', owner)
    redis.call('PEXPIRE', counter, keep)
    waits[#waits + 1] = -1
    owners[#owners + 1] = owner
  end
end
return {waits, owners}
