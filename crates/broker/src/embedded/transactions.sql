-- Who sends in transactions, of which lanes, and the note of its last one.

CREATE TABLE broker_senders (
    -- AUTOINCREMENT: the number of a sender that is gone never comes back, so it fences.
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    -- Another took a lane of it: it stores nothing any more.
    fenced INTEGER NOT NULL DEFAULT FALSE,
    note   BLOB
) STRICT;

CREATE TABLE broker_claims (
    line   TEXT    NOT NULL,
    lane   INTEGER NOT NULL,
    sender INTEGER NOT NULL REFERENCES broker_senders (id) ON DELETE CASCADE,
    PRIMARY KEY (line, lane, sender)
) STRICT, WITHOUT ROWID;
CREATE INDEX broker_claims_by_sender ON broker_claims (sender);
