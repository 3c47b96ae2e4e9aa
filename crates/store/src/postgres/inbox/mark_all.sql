-- For ids that nobody has marked: with one that somebody has, it fails.
INSERT INTO inbox_ids (grp, id, digest, topic, key, seq)
SELECT $1, unnest($2::uuid[]), unnest($3::bytea[]), unnest($4::text[]), unnest($5::text[]), unnest($6::bigint[])
