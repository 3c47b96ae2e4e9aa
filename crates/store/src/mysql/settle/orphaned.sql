UPDATE json_table(?, '$[*]' COLUMNS (
           number BIGINT PATH '$[0]',
           deaths INT PATH '$[1]',
           is_now VARCHAR(16) CHARACTER SET utf8mb4 PATH '$[2]',
           reason TEXT CHARACTER SET utf8mb4 PATH '$[3]',
           died   VARCHAR(32) CHARACTER SET utf8mb4 PATH '$[4]')) j
STRAIGHT_JOIN outbox_events e FORCE INDEX (PRIMARY) ON e.seq = j.number
SET e.crashes = j.deaths, e.status = j.is_now, e.ready = (j.reason IS NULL), e.dead_reason = j.reason,
    e.dead_at = j.died
