-- {sign} and {order} are the direction of the page.
SELECT position, id, topic, `key`, seq, processed_at
FROM inbox_ids FORCE INDEX (inbox_ids_group)
WHERE grp = (SELECT grp FROM inbox_groups WHERE name = ?) AND position {sign} ?
ORDER BY position {order} LIMIT ?
