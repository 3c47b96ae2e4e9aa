-- Reservations by the call that made them instead of by message: one row is written and removed for hundreds of ids.
CREATE TABLE inbox_held (
    grp   bigint NOT NULL,
    token uuid NOT NULL,
    until timestamptz NOT NULL,
    -- Those that are still in the hands of a handler.
    ids   uuid[] NOT NULL,
    -- By their end: what a long transaction keeps of those that are gone is not read again and again.
    PRIMARY KEY (grp, until, token)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0,
        toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 1000,
        toast.autovacuum_vacuum_cost_delay = 0);
-- Ids are random: there is nothing to compress.
ALTER TABLE inbox_held ALTER COLUMN ids SET STORAGE EXTERNAL;

INSERT INTO inbox_held (grp, token, until, ids) SELECT grp, token, until, ARRAY[id] FROM inbox_reserved;
DROP TABLE inbox_reserved;
ALTER TABLE inbox_held RENAME TO inbox_reserved;
ALTER INDEX inbox_held_pkey RENAME TO inbox_reserved_pkey;
