-- Makes a new store ready. Answers the version of the store.
P = KEYS[1]
local read = arguments(1)
local version, store_id, lanes = read(), read(), read()
for name, value in pairs({ version = version, store_id = store_id, lanes = lanes, lanes_wanted = lanes, layout = lanes }) do
  redis.call('HSETNX', key('settings'), name, value)
end
return tonumber(redis.call('HGET', key('settings'), 'version'))
