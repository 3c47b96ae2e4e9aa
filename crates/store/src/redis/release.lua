-- Gives lanes back, and closes their batches if those are untouched. Leases that are not held are ignored.
begin(KEYS[1])
even_when_full()
local read = arguments(1)
local untouched = read() == '1'
for _ = 1, tonumber(read()) do
  local number, epoch, lease = read(), tonumber(read()), read()
  local lane = lane_from(redis.call('HGET', key('lanes'), number))
  if lane.epoch == epoch and lane.lease == lease then
    set_free(number, lane)
    if untouched then redis.call('DEL', batches_key(number)) end
  end
end
