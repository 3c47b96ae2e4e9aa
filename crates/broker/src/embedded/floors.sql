-- Per partition from ?1 to ?2, what may go: everything before the slowest group that has ever asked for the topic. A group
-- that has not looked into the partition yet has read nothing. No group at all: nobody waits for anything.
SELECT p.id, p.first,
       coalesce(
           (SELECT min(coalesce(o.committed, p.first))
            FROM broker_subscriptions s
            LEFT JOIN broker_offsets o ON o.group_id = s.group_id AND o.partition = p.id
            WHERE s.topic = t.name),
           p.next) AS floor
FROM broker_partitions p
JOIN broker_topics t ON t.id = p.topic
WHERE p.id BETWEEN ?1 AND ?2 AND floor > p.first
ORDER BY p.id
