INSERT IGNORE INTO outbox_acknowledgements (seq, grp, acknowledged_at)
SELECT j.number, j.name, ?
FROM json_table(?, '$[*]' COLUMNS (
         number BIGINT PATH '$[0]',
         name   VARCHAR(249) CHARACTER SET utf8mb4 PATH '$[1]')) j
