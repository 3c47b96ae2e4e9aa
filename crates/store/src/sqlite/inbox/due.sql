-- The positions come from the index alone, the longest due first; only those rows are read.
SELECT id, topic, type, key, payload, content_type, headers, occurred_at, seq, delivery
FROM inbox_parked
WHERE position IN (SELECT position FROM inbox_parked
                   WHERE grp = (SELECT grp FROM inbox_groups WHERE name = ?1) AND next_attempt_at <= ?2
                   ORDER BY next_attempt_at LIMIT ?3)
ORDER BY position
