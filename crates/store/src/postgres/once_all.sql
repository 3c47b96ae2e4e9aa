-- Answers how many are marked now. In the order of ids: two transactions with the same ones must not wait for each other.
WITH own AS (SELECT grp FROM inbox_groups WHERE name = $1),
marked AS (
    INSERT INTO inbox_ids (grp, id, digest, topic, key, seq)
    SELECT (SELECT grp FROM own), unnest($2::text[])::uuid, unnest($3::bytea[]), unnest($4::text[]), unnest($5::text[]),
           unnest($6::bigint[])
    WHERE EXISTS (SELECT 1 FROM own)
    ON CONFLICT (grp, id) DO NOTHING
    RETURNING id
),
done AS (INSERT INTO inbox_done (grp, ids) SELECT grp, $7::text[]::uuid[] FROM own),
counted AS (INSERT INTO inbox_counters (grp, processed) SELECT grp, cardinality($7::text[]) FROM own)
SELECT count(*) FROM marked
