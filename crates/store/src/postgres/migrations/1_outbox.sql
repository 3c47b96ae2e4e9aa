-- The outbox. Any program may insert with plain SQL; only topic and payload are required:
--   INSERT INTO outbox_events (topic, key, payload) VALUES ('order-events', '42', convert_to('{"total": 10}', 'UTF8'));
--   SELECT postrider_send('order-events', '42', '{"total": 10}');
-- A payload is bytes. A bare literal is read as PostgreSQL reads bytea, where a backslash starts an escape:
-- convert_to, a parameter of bytes, or postrider_send keep every text as it is.

-- A UUIDv7: time first, so that the index grows at its end.
CREATE FUNCTION postrider_id() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
    SELECT encode(set_bit(set_bit(overlay(
        uuid_send(gen_random_uuid())
        PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
        FROM 1 FOR 6), 52, 1), 53, 1), 'hex')::uuid
$$;

-- One number at a time: a session that kept some back would write low numbers long after others wrote high ones.
CREATE SEQUENCE outbox_seq AS bigint CACHE 1;

CREATE TABLE outbox_events (
    -- The transaction has its id before it draws a number. So whoever drew a number before some moment has a lower
    -- transaction id than whoever starts after it, and once all of those have ended, no lower number can appear: that
    -- is what lets claims skip what they have seen.
    seq             bigint PRIMARY KEY DEFAULT
                        (CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('outbox_seq') END),
    id              uuid NOT NULL DEFAULT postrider_id(),
    -- Checked anew whenever a row changes: a counted repetition in the expression would cost more than all the rest.
    topic           text COLLATE "C" NOT NULL
                    CHECK (topic !~ '[^A-Za-z0-9._-]' AND length(topic) BETWEEN 1 AND 249 AND topic NOT IN ('.', '..')),
    type            text,
    key             text COLLATE "C",
    payload         bytea NOT NULL,
    content_type    text NOT NULL DEFAULT 'application/json',
    headers         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(headers) = 'object'),
    occurred_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    written_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    ack_groups      jsonb CHECK (jsonb_typeof(ack_groups) = 'array'),
    -- Below is Postrider's own bookkeeping: writers leave it alone.
    ready           boolean NOT NULL DEFAULT true,
    held            boolean NOT NULL DEFAULT false,
    status          text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'sent', 'failed', 'dead')),
    attempts        integer NOT NULL DEFAULT 0,
    crashes         integer NOT NULL DEFAULT 0,
    delivery_epoch  integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz,
    last_error      text,
    sent_at         timestamptz,
    dead_reason     text,
    dead_at         timestamptz,
    -- 0 to 1023, from the key (or the id): all of a key share a lane.
    slot            smallint GENERATED ALWAYS AS
                        ((hashtextextended(coalesce(key, id::text), 0) & 1023)::smallint) STORED
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_insert_scale_factor = 0.05,
        autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
ALTER SEQUENCE outbox_seq OWNED BY outbox_events.seq;

CREATE UNIQUE INDEX outbox_id ON outbox_events (id);
-- The claim reads this and nothing else: rows that wait, are sent or are dead are not in it. Topic first, so that one
-- whose destination is down costs nothing; then the number, so that the front is found at once. The slot rides along
-- to tell whose row it is; a relay starts at its own low-water mark and so does not step over what others left behind.
CREATE INDEX outbox_ready ON outbox_events (topic, seq) INCLUDE (slot) WHERE ready;
CREATE INDEX outbox_due ON outbox_events (next_attempt_at) INCLUDE (slot)
    WHERE NOT ready AND next_attempt_at IS NOT NULL;
CREATE INDEX outbox_held ON outbox_events (topic, key, seq) WHERE held;
CREATE INDEX outbox_waiting ON outbox_events (seq) WHERE NOT ready AND status IN ('pending', 'failed');
CREATE INDEX outbox_dead ON outbox_events (seq) WHERE status = 'dead';

-- A key whose later messages wait for one of them.
CREATE TABLE outbox_holds (
    topic       text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    seq         bigint NOT NULL,
    -- Followers up to here may pass: the hold is being drained, in order, a bounded number at a time.
    released_to bigint NOT NULL DEFAULT 0,
    draining    boolean NOT NULL DEFAULT false,
    slot        smallint GENERATED ALWAYS AS ((hashtextextended(key, 0) & 1023)::smallint) STORED,
    PRIMARY KEY (topic, key)
);
CREATE INDEX outbox_holds_seq ON outbox_holds (seq);
CREATE INDEX outbox_holds_draining ON outbox_holds (slot) WHERE draining;

CREATE TABLE outbox_settings (name text PRIMARY KEY, value text NOT NULL);
INSERT INTO outbox_settings VALUES ('lanes', '16'), ('lanes_wanted', '16'), ('store_id', replace(gen_random_uuid()::text, '-', ''));

CREATE TABLE outbox_lanes (
    lane         smallint PRIMARY KEY,
    epoch        bigint NOT NULL DEFAULT 0,
    lease_id     uuid,
    owner        uuid,
    locked_until timestamptz NOT NULL DEFAULT 'epoch',
    -- Batches up to here are settled. Written when the lease is renewed; the owner knows better in between.
    settled_to   bigint NOT NULL DEFAULT 0,
    -- Rises when a person makes an old message of the lane sendable again: the owner's marks no longer hold.
    amended      bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
INSERT INTO outbox_lanes (lane) SELECT generate_series(0, 1023);

CREATE TABLE outbox_instances (
    id          uuid PRIMARY KEY,
    name        text NOT NULL,
    alive_until timestamptz NOT NULL
);

-- Messages in flight: the exact ones, for as long as the batch is open. A lane has several when they go to several
-- brokers; while one is open, no other message of its topics is claimed on the lane, by the lane's lock. An index that
-- said so would have to look at every dead entry of the lane while somebody holds an old snapshot.
CREATE TABLE outbox_batches (
    lane       smallint NOT NULL,
    position   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id         uuid NOT NULL,
    epoch      bigint NOT NULL,
    lease_id   uuid NOT NULL,
    topics     text[] NOT NULL,
    seqs       bigint[] NOT NULL,
    size       integer NOT NULL,
    failed     integer NOT NULL,
    claimed_at timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX outbox_batches_lane ON outbox_batches (lane, position);

-- The batches that are open: one look for each lane, past those that were settled. OFFSET 0 keeps it so, whatever the
-- statistics say of a table that is nearly always empty.
CREATE VIEW outbox_open_batches AS
SELECT b.*, l.locked_until
FROM outbox_settings s JOIN outbox_lanes l ON s.name = 'lanes' AND l.lane < s.value::smallint
CROSS JOIN LATERAL (SELECT * FROM outbox_batches b WHERE b.lane = l.lane AND b.position > l.settled_to OFFSET 0) b;

-- What SQL users look at: in flight is a fact about batches, not a column of the message.
CREATE VIEW outbox_status AS
SELECT e.seq, e.id, e.topic, e.type, e.key,
       CASE WHEN f.seq IS NULL THEN e.status ELSE 'in_flight' END AS status,
       e.attempts, e.held, e.last_error, e.dead_reason, e.written_at, e.next_attempt_at, e.sent_at, f.locked_until
FROM outbox_events e
LEFT JOIN (SELECT unnest(b.seqs) AS seq, b.locked_until FROM outbox_open_batches b) f ON f.seq = e.seq;

CREATE TABLE outbox_acknowledgements (
    seq             bigint NOT NULL,
    grp             text COLLATE "C" NOT NULL,
    acknowledged_at timestamptz NOT NULL,
    PRIMARY KEY (seq, grp)
);

-- Sent, and this group has not said that it is done.
CREATE TABLE outbox_unacknowledged (
    grp text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    PRIMARY KEY (grp, seq)
);
CREATE INDEX outbox_unacknowledged_seq ON outbox_unacknowledged (seq);

-- Tries in vain.
CREATE TABLE outbox_attempts (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    seq      bigint NOT NULL,
    at       timestamptz NOT NULL,
    outcome  text NOT NULL,
    error    text NOT NULL
);
CREATE INDEX outbox_attempts_seq ON outbox_attempts (seq, position);

CREATE TABLE outbox_audit (
    position   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL,
    actor      text NOT NULL,
    action     text NOT NULL,
    message_id uuid,
    detail     text NOT NULL
);

-- Names under which a write happens once. They outlive the messages.
CREATE TABLE outbox_idempotency_keys (
    position    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key         text COLLATE "C" NOT NULL UNIQUE,
    fingerprint bytea NOT NULL,
    message_id  uuid NOT NULL,
    created_at  timestamptz NOT NULL
);

-- What has changed, one row for each transaction that changed something: the sum is the count. One row for all would
-- let only one transaction commit at a time, and would grow a tail of old versions under a held snapshot. Rows are
-- added up into one now and then. Pending ones are not counted here: the index of sendable rows has them.
CREATE TABLE outbox_counters (
    position              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    failed                bigint NOT NULL DEFAULT 0,
    sent                  bigint NOT NULL DEFAULT 0,
    dead                  bigint NOT NULL DEFAULT 0,
    publish_success_total bigint NOT NULL DEFAULT 0,
    publish_failure_total bigint NOT NULL DEFAULT 0,
    dead_total            bigint NOT NULL DEFAULT 0,
    acknowledged_total    bigint NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE outbox_latencies (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name     text NOT NULL,
    bucket   smallint NOT NULL,
    n        bigint NOT NULL,
    millis   bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- All that hangs on a record goes with it, also when somebody deletes it by hand: nothing may wait for it.
CREATE FUNCTION postrider_removed() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE outbox_holds SET draining = true, seq = 0 WHERE seq IN (SELECT seq FROM gone WHERE key IS NOT NULL);
    DELETE FROM outbox_attempts WHERE seq IN (SELECT seq FROM gone WHERE last_error IS NOT NULL);
    DELETE FROM outbox_acknowledgements WHERE seq IN (SELECT seq FROM gone);
    DELETE FROM outbox_unacknowledged WHERE seq IN (SELECT seq FROM gone WHERE status = 'sent');
    INSERT INTO outbox_counters (failed, sent, dead)
    SELECT -count(*) FILTER (WHERE status = 'failed'), -count(*) FILTER (WHERE status = 'sent'),
           -count(*) FILTER (WHERE status = 'dead')
    FROM gone WHERE status <> 'pending' HAVING count(*) > 0;
    RETURN NULL;
END
$$;
CREATE TRIGGER outbox_removed AFTER DELETE ON outbox_events
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION postrider_removed();

-- Rings for a relay that sleeps: see the trigger `outbox_doorbell`, made for stores that ask. Commits that notify wait
-- for each other, so one of all that come within 50 ms rings; the others commit when the relay is up and looks.
CREATE FUNCTION postrider_doorbell() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF pg_try_advisory_xact_lock(
           hashtextextended('postrider ring', (extract(epoch FROM clock_timestamp()) * 20)::bigint)) THEN
        PERFORM pg_notify('postrider', '');
    END IF;
    RETURN NULL;
END
$$;

-- For programs without an adapter: writes a message in the caller's transaction and answers its id.
CREATE FUNCTION postrider_send(topic text, key text, payload bytea) RETURNS uuid
LANGUAGE sql SET search_path FROM CURRENT AS $$
    INSERT INTO outbox_events (topic, key, payload) VALUES (topic, key, payload) RETURNING id
$$;
CREATE FUNCTION postrider_send(topic text, key text, payload jsonb) RETURNS uuid LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT postrider_send(topic, key, convert_to(payload::text, 'UTF8'))
$$;
CREATE FUNCTION postrider_send(topic text, key text, payload json) RETURNS uuid LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT postrider_send(topic, key, convert_to(payload::text, 'UTF8'))
$$;
-- Text must be JSON: a payload that is none is refused here, where its writer can see it.
CREATE FUNCTION postrider_send(topic text, key text, payload text) RETURNS uuid LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT postrider_send(topic, key, payload::json)
$$;
