-- The order in which a group did its work, by the transactions that did it instead of by message: one row for thousands of
-- marks, where an index on them had to be written for each.

-- Marks that somebody makes meanwhile would be in no list.
LOCK TABLE inbox_ids IN ACCESS EXCLUSIVE MODE;

CREATE TABLE inbox_done (
    grp          bigint NOT NULL,
    call         bigint GENERATED ALWAYS AS IDENTITY,
    processed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- How many, known without reading them.
    n            integer NOT NULL GENERATED ALWAYS AS (cardinality(ids)) STORED,
    ids          uuid[] NOT NULL,
    PRIMARY KEY (grp, call)
);
-- Ids are random: there is nothing to compress.
ALTER TABLE inbox_done ALTER COLUMN ids SET STORAGE EXTERNAL;

-- A thousand marks each, as old as the youngest of them: none is forgotten too soon.
INSERT INTO inbox_done (grp, processed_at, ids)
SELECT grp, max(processed_at), array_agg(id ORDER BY position)
FROM (SELECT grp, id, position, processed_at,
             (row_number() OVER (PARTITION BY grp ORDER BY position) - 1) / 1000 AS part
      FROM inbox_ids) i
GROUP BY grp, part
ORDER BY min(position);
DROP INDEX inbox_ids_group;
ALTER TABLE inbox_ids DROP COLUMN position, DROP COLUMN processed_at;

CREATE OR REPLACE FUNCTION postrider_once("group" text, message_id uuid, digest bytea DEFAULT NULL, topic text DEFAULT '',
                                          key text DEFAULT NULL, seq bigint DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    number bigint;
    new    boolean;
BEGIN
    SELECT grp INTO number FROM inbox_groups WHERE name = "group";
    IF number IS NULL THEN
        INSERT INTO inbox_groups (name) VALUES ("group") ON CONFLICT DO NOTHING;
        SELECT grp INTO number FROM inbox_groups WHERE name = "group";
    END IF;
    INSERT INTO inbox_ids (grp, id, digest, topic, key, seq) VALUES (number, message_id, digest, topic, key, seq)
    ON CONFLICT DO NOTHING;
    new := FOUND;
    IF new THEN
        INSERT INTO inbox_done (grp, ids) VALUES (number, ARRAY[message_id]);
    END IF;
    INSERT INTO inbox_counters (grp, processed, duplicates) VALUES (number, new::int, (NOT new)::int);
    RETURN new;
END
$$;
