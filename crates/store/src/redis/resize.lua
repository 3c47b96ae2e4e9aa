-- Asks for another number of lanes, and says how far that has come.
begin(KEYS[1])
even_when_full()
redis.call('HSET', key('settings'), 'lanes_wanted', ARGV[1])
return resize(all_lanes())
