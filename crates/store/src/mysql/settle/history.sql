INSERT INTO outbox_attempts (seq, at, outcome, error)
SELECT j.number, ?, j.outcome, j.told
FROM json_table(?, '$[*]' COLUMNS (
         number  BIGINT PATH '$[0]',
         outcome VARCHAR(16) CHARACTER SET utf8mb4 PATH '$[1]',
         told    TEXT CHARACTER SET utf8mb4 PATH '$[2]')) j
