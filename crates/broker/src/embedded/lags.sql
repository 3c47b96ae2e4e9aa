SELECT s.topic, g.name,
       coalesce(sum(p.next - max(coalesce(o.committed, p.first), p.first)), 0),
       (SELECT count(*)
        FROM broker_interests i
        JOIN broker_members m ON m.id = i.member
        WHERE m.group_id = g.id AND i.topic = s.topic
          AND m.locked_until > CAST(unixepoch('subsec') * 1000 AS INTEGER))
FROM broker_subscriptions s
JOIN broker_groups g ON g.id = s.group_id
JOIN broker_topics t ON t.name = s.topic
JOIN broker_partitions p ON p.topic = t.id
LEFT JOIN broker_offsets o ON o.group_id = g.id AND o.partition = p.id
GROUP BY s.topic, g.id
ORDER BY s.topic, g.name
