INSERT IGNORE INTO outbox_unacknowledged (grp, seq)
SELECT j.name, j.number
FROM json_table(?, '$[*]' COLUMNS (
         name   VARCHAR(249) CHARACTER SET utf8mb4 PATH '$[0]',
         number BIGINT PATH '$[1]')) j
