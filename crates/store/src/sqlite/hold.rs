//! Keys whose later messages wait for an earlier one.
//!
//! A hold names the message that the others wait for. Followers are parked (`held`, not `ready`) when a claim
//! meets them, so that they cost nothing while they wait. When the message is sent or given up, they are let
//! go in order, a bounded number at a time; `released_to` is how far that has come, and whatever is newer goes
//! on being parked until all older ones are out.
//!
//! Of several messages of a key in trouble the earliest holds it; the others are parked like followers, and
//! each becomes the holder when its turn comes.

use rusqlite::{Connection, OptionalExtension, params};

/// Followers let go in one step.
const STEP: usize = 1_000;

/// Whether any key is held at all: nearly always not, and then claims need not look further.
pub(super) fn any(connection: &Connection) -> rusqlite::Result<bool> {
    connection.prepare_cached("SELECT EXISTS (SELECT 1 FROM outbox_holds)")?.query_row([], |row| row.get(0))
}

/// Whether the message `seq` of this key must wait.
pub(super) fn blocks(connection: &Connection, topic: &str, key: &str, seq: i64) -> rusqlite::Result<bool> {
    connection
        .prepare_cached(
            "SELECT EXISTS (SELECT 1 FROM outbox_holds
                            WHERE topic = ?1 AND key = ?2 AND seq < ?3 AND released_to < ?3)",
        )?
        .query_row(params![topic, key, seq], |row| row.get(0))
}

/// Makes the later messages of the key wait for `seq`, which is in trouble.
pub(super) fn place(connection: &Connection, topic: &str, key: &str, seq: i64) -> rusqlite::Result<()> {
    let holder: Option<i64> = connection
        .prepare_cached("SELECT seq FROM outbox_holds WHERE topic = ?1 AND key = ?2 AND draining = 0")?
        .query_row([topic, key], |row| row.get(0))
        .optional()?;
    let waits = match holder {
        // Both are in trouble: the later one waits for the earlier one as any follower does.
        Some(holder) if holder != seq => Some(holder.max(seq)),
        _ => None,
    };
    if let Some(waits) = waits {
        connection.prepare_cached("UPDATE outbox_events SET held = 1 WHERE seq = ?1")?.execute([waits])?;
    }
    if waits != Some(seq) {
        hold(connection, topic, key, seq)?;
    }
    Ok(())
}

fn hold(connection: &Connection, topic: &str, key: &str, seq: i64) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "INSERT INTO outbox_holds (topic, key, seq) VALUES (?1, ?2, ?3)
             ON CONFLICT DO UPDATE SET seq = excluded.seq, released_to = 0, draining = 0",
        )?
        .execute(params![topic, key, seq])?;
    Ok(())
}

/// The message `seq` waits behind nobody any more.
pub(super) fn stand(connection: &Connection, seq: i64) -> rusqlite::Result<()> {
    connection
        .prepare_cached("UPDATE outbox_events SET held = 0 WHERE seq = ?1 AND held = 1")?
        .execute([seq])?;
    Ok(())
}

/// A follower that a claim met.
pub(super) fn park(connection: &Connection, seq: i64) -> rusqlite::Result<()> {
    connection
        .prepare_cached("UPDATE outbox_events SET ready = 0, held = 1 WHERE seq = ?1")?
        .execute([seq])?;
    Ok(())
}

/// The message `seq` no longer holds its key, if it did: its followers may go.
pub(super) fn lift(connection: &Connection, seq: i64) -> rusqlite::Result<()> {
    let key: Option<(String, String)> = connection
        .prepare_cached("SELECT topic, key FROM outbox_holds WHERE seq = ?1 AND draining = 0")?
        .query_row([seq], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    if let Some((topic, key)) = key {
        connection
            .prepare_cached("UPDATE outbox_holds SET draining = 1, seq = 0 WHERE topic = ?1 AND key = ?2")?
            .execute([&topic, &key])?;
        drain(connection, &topic, &key)?;
    }
    Ok(())
}

/// Lets go some more followers of keys that are being drained. Answers whether any are left.
pub(super) fn drain_some(connection: &Connection) -> rusqlite::Result<bool> {
    let mut left = false;
    let keys: Vec<(String, String)> = connection
        .prepare_cached("SELECT topic, key FROM outbox_holds WHERE draining = 1 LIMIT 16")?
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_, _>>()?;
    for (topic, key) in keys {
        left |= drain(connection, &topic, &key)?;
    }
    Ok(left)
}

fn drain(connection: &Connection, topic: &str, key: &str) -> rusqlite::Result<bool> {
    let followers: Vec<(i64, bool)> = connection
        .prepare_cached(
            "SELECT seq, status = 'dead' OR (ready = 0 AND next_attempt_at IS NOT NULL) FROM outbox_events
             WHERE held = 1 AND topic = ?1 AND key = ?2 ORDER BY seq LIMIT ?3",
        )?
        .query_map(params![topic, key, STEP], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_, _>>()?;
    for (seq, trouble) in &followers {
        if *trouble {
            stand(connection, *seq)?;
            hold(connection, topic, key, *seq)?;
            return Ok(false);
        }
        connection
            .prepare_cached("UPDATE outbox_events SET ready = 1, held = 0 WHERE seq = ?1")?
            .execute([seq])?;
    }
    let left = followers.len() == STEP;
    if left {
        connection
            .prepare_cached("UPDATE outbox_holds SET released_to = ?3 WHERE topic = ?1 AND key = ?2")?
            .execute(params![topic, key, followers.last().map(|(seq, _)| *seq)])?;
    } else {
        connection
            .prepare_cached("DELETE FROM outbox_holds WHERE topic = ?1 AND key = ?2")?
            .execute(params![topic, key])?;
    }
    Ok(left)
}
