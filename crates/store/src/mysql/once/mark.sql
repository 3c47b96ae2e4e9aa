INSERT IGNORE INTO inbox_ids (grp, id, digest, topic, `key`, seq, processed_at)
VALUES (?, ?, ?, ?, ?, ?, utc_timestamp(3))
