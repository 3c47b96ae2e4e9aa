-- Whether a handler's script compiles: '' or what is wrong with it.
begin(KEYS[1])
local chunk, wrong = loadstring('local message, postrider = ...; ' .. ARGV[1], '@handler')
return chunk and '' or wrong
