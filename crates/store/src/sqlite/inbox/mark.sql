INSERT INTO inbox_ids (grp, id, digest, topic, key, seq, processed_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
ON CONFLICT (grp, id) DO NOTHING
