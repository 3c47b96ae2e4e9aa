-- For ids that nobody has marked: with one that somebody has, it fails.
INSERT INTO inbox_ids (grp, id, digest, topic, key, seq)
SELECT $1, m.id, m.digest, m.topic, m.key, m.seq
FROM unnest($2::uuid[], $3::bytea[], $4::text[], $5::text[], $6::bigint[]) AS m(id, digest, topic, key, seq)
