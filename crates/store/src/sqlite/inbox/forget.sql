DELETE FROM inbox_ids
WHERE position IN (SELECT position FROM inbox_ids WHERE grp = ?1 ORDER BY position LIMIT ?3) AND processed_at < ?2
