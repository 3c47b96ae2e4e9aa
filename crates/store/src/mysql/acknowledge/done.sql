DELETE u
FROM json_table(?, '$[*]' COLUMNS (
         number BIGINT PATH '$[0]',
         name   VARCHAR(249) CHARACTER SET utf8mb4 PATH '$[1]')) j
STRAIGHT_JOIN outbox_unacknowledged u FORCE INDEX (PRIMARY) ON u.grp = j.name COLLATE utf8mb4_bin AND u.seq = j.number
