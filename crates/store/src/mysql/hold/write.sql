INSERT INTO outbox_holds (topic, `key`, slot, seq, released_to, draining)
SELECT j.topic, cast(j.`name` AS BINARY), j.place, j.number, j.passed, j.going
FROM json_table(?, '$[*]' COLUMNS (
         topic       VARCHAR(249) CHARACTER SET utf8mb4 PATH '$[0]',
         `name`      VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$[1]',
         place       INT PATH '$[2]',
         number      BIGINT PATH '$[3]',
         passed      BIGINT PATH '$[4]',
         going       INT PATH '$[5]')) j
ON DUPLICATE KEY UPDATE seq = VALUES(seq), released_to = VALUES(released_to), draining = VALUES(draining)
