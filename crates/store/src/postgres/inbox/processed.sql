-- {sign} and {order} are the direction of the page.
SELECT position, id, topic, key, seq, processed_at
FROM inbox_ids
WHERE grp = (SELECT grp FROM inbox_groups WHERE name = $1) AND position {sign} $2
ORDER BY position {order} LIMIT $3
