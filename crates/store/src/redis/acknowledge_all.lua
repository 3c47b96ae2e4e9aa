-- Records that groups are done with messages. One answer each, in order.
begin(KEYS[1])
even_when_full()
local read, answers, seen = arguments(1), {}, {}
for place = 1, tonumber(read()) do
  local id, group = read(), read()
  answers[place] = acknowledge(id, nil, group, seen)
end
finish()
return answers
