-- The inbox: what each consumer group has done, is doing, and will try again.
CREATE TABLE inbox_groups (
    grp      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name     text COLLATE "C" NOT NULL UNIQUE,
    -- How long its ids are kept, as its consumer last said: others may clean up after it.
    keep_ids interval
);

-- What changed for a group, one row for each transaction that changed something: the sum is the count. One row for all
-- would let only one of its workers commit at a time.
CREATE TABLE inbox_counters (
    position   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    grp        bigint NOT NULL,
    processed  bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0,
    parked     bigint NOT NULL DEFAULT 0,
    dead       bigint NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- Done. The unique index is what lets only one of two equal arrivals win.
CREATE TABLE inbox_ids (
    position     bigint GENERATED ALWAYS AS IDENTITY,
    grp          bigint NOT NULL,
    id           uuid NOT NULL,
    -- What the message said; unknown when another program made the mark.
    digest       bytea,
    topic        text COLLATE "C" NOT NULL DEFAULT '',
    key          text COLLATE "C",
    seq          bigint,
    processed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (grp, id)
);
-- One group's marks in the order in which they were made.
CREATE INDEX inbox_ids_group ON inbox_ids (grp, position);

-- In the hands of a handler that works outside the transaction.
CREATE TABLE inbox_reserved (
    grp   bigint NOT NULL,
    id    uuid NOT NULL,
    token uuid NOT NULL,
    until timestamptz NOT NULL,
    PRIMARY KEY (grp, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX inbox_reserved_until ON inbox_reserved (until);

-- Kept for a later try (next_attempt_at), behind another of its key (none), or for a person (dead).
CREATE TABLE inbox_parked (
    position        bigint GENERATED ALWAYS AS IDENTITY,
    grp             bigint NOT NULL,
    id              uuid NOT NULL,
    digest          bytea NOT NULL,
    topic           text COLLATE "C" NOT NULL,
    type            text,
    key             text COLLATE "C",
    payload         bytea NOT NULL,
    content_type    text NOT NULL,
    headers         jsonb NOT NULL,
    occurred_at     timestamptz NOT NULL,
    seq             bigint,
    delivery        integer NOT NULL,
    attempts        integer NOT NULL,
    next_attempt_at timestamptz,
    dead            boolean NOT NULL,
    error           text NOT NULL,
    PRIMARY KEY (grp, id)
);
CREATE INDEX inbox_parked_group ON inbox_parked (grp, position);
CREATE INDEX inbox_parked_key ON inbox_parked (grp, topic, key, position);
CREATE INDEX inbox_parked_due ON inbox_parked (grp, next_attempt_at) WHERE next_attempt_at IS NOT NULL;

-- For programs without an adapter: whether this message is new for the group, and if so marks it as done, in the
-- caller's transaction. Of two that ask at the same time one waits for the other. What the message said may be left out.
CREATE FUNCTION postrider_once("group" text, message_id uuid, digest bytea DEFAULT NULL, topic text DEFAULT '',
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
    INSERT INTO inbox_counters (grp, processed, duplicates) VALUES (number, new::int, (NOT new)::int);
    RETURN new;
END
$$;

-- Says to a message's producer, in the caller's transaction, that the group is done with it: for consumers that share
-- this database. What was never sent, or asks other groups only, is left as it is. Answers whether that is news.
CREATE FUNCTION postrider_acknowledge("group" text, message_id uuid) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    message outbox_events;
    waited  bigint;
BEGIN
    -- Its settle may be on its way, and must see this acknowledgement or be seen here.
    PERFORM 1 FROM outbox_events e WHERE e.id = message_id AND e.status <> 'sent' FOR NO KEY UPDATE;
    SELECT * INTO message FROM outbox_events e
    WHERE e.id = message_id AND (e.ack_groups IS NULL OR e.ack_groups ? "group")
          AND (e.status = 'sent'
               OR e.status IN ('pending', 'failed') AND (e.attempts > 0 OR e.crashes > 0 OR e.last_error IS NOT NULL)
               OR EXISTS (SELECT 1 FROM outbox_open_batches b WHERE e.seq = ANY (b.seqs)));
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO outbox_acknowledgements (seq, grp, acknowledged_at) VALUES (message.seq, "group", clock_timestamp())
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM outbox_unacknowledged u WHERE u.grp = "group" AND u.seq = message.seq;
    waited := coalesce(greatest(ceil(extract(epoch FROM clock_timestamp() - message.sent_at) * 1000), 0), 0);
    INSERT INTO outbox_counters (acknowledged_total) VALUES (1);
    INSERT INTO outbox_latencies (name, bucket, n, millis)
    SELECT 'sent_to_acknowledged',
           width_bucket(waited - 1, ARRAY[1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 5000, 30000, 300000, 3600000]::bigint[]),
           1, waited;
    RETURN true;
END
$$;
