DELETE h
FROM json_table(?, '$[*]' COLUMNS (
         topic  VARCHAR(249) CHARACTER SET utf8mb4 PATH '$[0]',
         `name` VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$[1]')) j
STRAIGHT_JOIN outbox_holds h FORCE INDEX (PRIMARY)
    ON h.topic = j.topic COLLATE utf8mb4_bin AND h.`key` = cast(j.`name` AS BINARY)
