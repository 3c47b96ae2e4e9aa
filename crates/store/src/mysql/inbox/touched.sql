-- Whether a parked message has one of these ids, or stands in one of these lines. The ids come as JSON, and so do the lines.
SELECT EXISTS (
           SELECT 1 FROM json_table(?, '$[*]' COLUMNS (id VARCHAR(36) CHARACTER SET utf8mb4 PATH '$')) j
           STRAIGHT_JOIN inbox_parked p FORCE INDEX (inbox_parked_id)
               ON p.grp = ? AND p.id = j.id COLLATE utf8mb4_bin)
    OR EXISTS (
           SELECT 1 FROM json_table(?, '$[*]' COLUMNS (line VARCHAR(64) CHARACTER SET utf8mb4 PATH '$')) j
           STRAIGHT_JOIN inbox_parked p FORCE INDEX (inbox_parked_key) ON p.grp = ? AND p.line = unhex(j.line))
