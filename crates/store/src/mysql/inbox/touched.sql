-- Whether a parked message has one of these ids, or one of these keys. The ids come as JSON, and so do the keys.
SELECT EXISTS (
           SELECT 1 FROM json_table(?, '$[*]' COLUMNS (id VARCHAR(36) CHARACTER SET utf8mb4 PATH '$')) j
           STRAIGHT_JOIN inbox_parked p FORCE INDEX (inbox_parked_id)
               ON p.grp = ? AND p.id = j.id COLLATE utf8mb4_bin)
    OR EXISTS (
           SELECT 1 FROM json_table(?, '$[*]' COLUMNS (
                      topic  VARCHAR(249) CHARACTER SET utf8mb4 PATH '$[0]',
                      `name` VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$[1]')) j
           STRAIGHT_JOIN inbox_parked p FORCE INDEX (inbox_parked_key)
               ON p.grp = ? AND p.topic = j.topic COLLATE utf8mb4_bin AND p.`key` = cast(j.`name` AS BINARY))
