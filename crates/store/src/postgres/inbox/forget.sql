DELETE FROM inbox_ids
WHERE grp = $1 AND processed_at < clock_timestamp() - (SELECT keep_ids FROM inbox_groups WHERE grp = $1)
      AND position IN (SELECT position FROM inbox_ids WHERE grp = $1 ORDER BY position LIMIT $2)
