UPDATE json_table(?, '$[*]' COLUMNS (
           number BIGINT PATH '$[0]',
           told   TEXT CHARACTER SET utf8mb4 PATH '$[1]')) j
STRAIGHT_JOIN outbox_events e FORCE INDEX (PRIMARY) ON e.seq = j.number
SET e.last_error = j.told
