UPDATE json_table(?, '$[*]' COLUMNS (
           number INT PATH '$[0]',
           life   BIGINT PATH '$[1]',
           token  VARCHAR(36) CHARACTER SET utf8mb4 PATH '$[2]')) j
STRAIGHT_JOIN outbox_lanes l FORCE INDEX (PRIMARY) ON l.lane = j.number
SET l.epoch = j.life, l.lease_id = j.token, l.owner = ?, l.locked_until = ?
