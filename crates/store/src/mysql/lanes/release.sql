UPDATE json_table(?, '$[*]' COLUMNS (
           number INT PATH '$[0]',
           life   BIGINT PATH '$[1]',
           token  VARCHAR(36) CHARACTER SET utf8mb4 PATH '$[2]')) j
STRAIGHT_JOIN outbox_lanes l FORCE INDEX (PRIMARY)
    ON l.lane = j.number AND l.epoch = j.life AND l.lease_id = j.token COLLATE utf8mb4_bin
SET l.owner = NULL, l.lease_id = NULL, l.locked_until = '1970-01-01'
