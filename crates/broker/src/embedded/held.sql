-- The partitions that member ?2 of group ?1 holds, what is in them, and whether its lease lasts.
SELECT o.partition, o.epoch, p.first, p.next,
       m.locked_until > CAST(unixepoch('subsec') * 1000 AS INTEGER)
FROM broker_members m
JOIN broker_offsets o ON o.group_id = m.group_id AND o.member = m.id
JOIN broker_partitions p ON p.id = o.partition
WHERE m.id = ?2 AND m.group_id = ?1
