-- A row, its id once more in the unique index, and what SQLite writes around them in the table and its two indexes.
SELECT max(g.processed - coalesce(f.ids, 0), 0),
       (SELECT avg(2 * length(id) + length(digest) + octet_length(topic) + coalesce(octet_length(key), 0) + 48)
        FROM (SELECT id, digest, topic, key FROM inbox_ids WHERE grp = g.grp ORDER BY position DESC LIMIT 100))
FROM inbox_groups g LEFT JOIN inbox_forgotten f ON f.grp = g.grp
WHERE g.name = ?1
