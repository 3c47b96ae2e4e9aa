INSERT INTO inbox_counters (grp, part, processed, duplicates) VALUES (?, connection_id() & 63, ?, ?)
ON DUPLICATE KEY UPDATE processed = processed + VALUES(processed), duplicates = duplicates + VALUES(duplicates)
