//! Removing what has been kept long enough, a bounded number at a time.
//!
//! Everything here stands in the order in which it was written, so old rows are at the front and nothing needs an
//! index of its own: the first row that is too young ends the round.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rusqlite::{Connection, params};

use super::amend::forget;
use super::row::now;
use super::{SqliteStore, tally};
use crate::column::millis;
use crate::{Error, Retention};

/// Rows removed in one transaction.
const REMOVE: usize = 500;

/// Records looked at in one call.
const LOOK: usize = 5_000;

/// Whether the record `e` may go: nobody has to acknowledge it, and nobody waits for it. `?1` and `?2` are the
/// times before which Sent and Dead records are too old.
macro_rules! may_go {
    () => {
        "((status = 'sent' AND sent_at < ?1 AND NOT EXISTS (
              SELECT 1 FROM json_each(e.ack_groups) g JOIN outbox_unacknowledged u ON u.grp = g.value AND u.seq = e.seq))
          OR (status = 'dead' AND coalesce(dead_at, written_at) < ?2 AND held = 0
              AND NOT EXISTS (SELECT 1 FROM outbox_holds h WHERE h.seq = e.seq)))"
    };
}

pub(super) async fn clean(store: &SqliteStore, retention: &Retention) -> Result<u64, Error> {
    let keys = forget_old(store, "outbox_idempotency_keys", "created_at", retention.keys).await?;
    let audit = forget_old(store, "outbox_audit", "at", retention.audit).await?;
    let retention = *retention;
    let from = store.cleaned.load(Ordering::Relaxed);
    let (old, next) = store.file.read(move |connection| outdated(connection, from, &retention)).await?;
    store.cleaned.store(next, Ordering::Relaxed);
    let mut removed = 0;
    for chunk in old.chunks(REMOVE) {
        let chunk = chunk.to_vec();
        removed += store.file.write(move |connection| remove(connection, &chunk, &retention)).await?;
    }
    store.file.write(|connection| Ok::<_, Error>(tally::mend(connection)?)).await?;
    Ok(keys + audit + removed)
}

/// The records past retention among the next rows after `from`, and where to look next time.
fn outdated(connection: &Connection, from: i64, retention: &Retention) -> Result<(Vec<i64>, i64), Error> {
    let (sent, dead) = limits(connection, retention)?;
    let mut statement = connection.prepare_cached(concat!(
        "SELECT seq, written_at, ",
        may_go!(),
        " FROM outbox_events e WHERE seq > ?3 ORDER BY seq LIMIT ?4"
    ))?;
    let mut rows = statement.query(params![sent, dead, from, LOOK])?;
    let mut old = Vec::new();
    let (mut next, mut looked) = (from, 0);
    while let Some(row) = rows.next()? {
        let written_at: i64 = row.get(1)?;
        if written_at > sent.max(dead) {
            return Ok((old, 0));
        }
        next = row.get(0)?;
        looked += 1;
        if row.get(2)? {
            old.push(next);
        }
    }
    Ok((old, if looked == LOOK { next } else { 0 }))
}

fn limits(connection: &Connection, retention: &Retention) -> Result<(i64, i64), Error> {
    let now = now(connection)?;
    Ok((now - millis(retention.sent), now - millis(retention.dead)))
}

/// Removes those that may still go: since they were found, somebody may have requeued one.
fn remove(connection: &Connection, seqs: &[i64], retention: &Retention) -> Result<u64, Error> {
    let (sent, dead) = limits(connection, retention)?;
    let mut removed = 0;
    for seq in seqs {
        let may_go: bool = connection
            .prepare_cached(concat!(
                "SELECT EXISTS (SELECT 1 FROM outbox_events e WHERE seq = ?3 AND ",
                may_go!(),
                ")"
            ))?
            .query_row(params![sent, dead, seq], |row| row.get(0))?;
        if may_go {
            removed += forget(connection, *seq)?;
        }
    }
    Ok(removed)
}

/// Forgets the oldest rows of a table with a `position` and a time.
async fn forget_old(
    store: &SqliteStore,
    table: &'static str,
    time: &'static str,
    keep: Duration,
) -> Result<u64, Error> {
    let due = move |connection: &Connection| -> Result<Option<i64>, Error> {
        let oldest = now(connection)? - millis(keep);
        let sql = format!(
            "SELECT max(position) FROM (SELECT position, {time} AS at FROM {table} ORDER BY position LIMIT {REMOVE})
             WHERE at < ?1"
        );
        Ok(connection.prepare_cached(&sql)?.query_row([oldest], |row| row.get(0))?)
    };
    let Some(last) = store.file.read(due).await? else { return Ok(0) };
    store
        .file
        .write(move |connection| {
            let sql = format!("DELETE FROM {table} WHERE position <= ?1");
            Ok::<_, Error>(connection.prepare_cached(&sql)?.execute([last])? as u64)
        })
        .await
}
