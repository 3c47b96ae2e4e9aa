-- The blocks that hold positions from ?1 up to, but not including, ?2. ?1 may lie within one.
SELECT position, messages, data
FROM broker_blocks
WHERE position >= (SELECT max(position) FROM broker_blocks WHERE position <= ?1) AND position < ?2
ORDER BY position
