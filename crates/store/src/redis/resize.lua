-- Asks for another number of lanes, and says how far that has come.
begin(KEYS[1])
even_when_full()
settings[3] = ARGV[1]
redis.call('HSET', key('settings'), 'lanes_wanted', settings[3])
return resize(all_lanes())
