-- A group starts at the oldest message that is kept.
INSERT INTO broker_offsets (group_id, partition, committed)
SELECT s.group_id, p.id, p.first
FROM broker_subscriptions s
JOIN broker_topics t ON t.name = s.topic
JOIN broker_partitions p ON p.topic = t.id
WHERE s.group_id = ?1
ON CONFLICT DO NOTHING
