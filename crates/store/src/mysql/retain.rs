//! Removing what has been kept long enough, a bounded number at a time.
//!
//! Everything here stands in the order in which it was written, so old rows are at the front and nothing needs an
//! index of its own: the first row that is too young ends the round.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Params, Row};

use super::error::Trouble;
use super::row::{Read, at, list};
use super::session::commit;
use super::{MysqlStore, lane, partition, settle, tally};
use crate::column::millis;
use crate::tally::Tally;
use crate::{Error, Retention, Sent};

/// Rows removed in one transaction.
const REMOVE: usize = 500;

/// Records looked at in one call.
const LOOK: usize = 5_000;

/// How far each kind of leftover has been looked for.
#[derive(Debug, Default)]
pub(super) struct Cleaned {
    records: AtomicI64,
    attempts: AtomicI64,
    acknowledgements: AtomicI64,
}

/// The times before which records are too old.
#[derive(Clone, Copy, Debug)]
struct Limits {
    sent: i64,
    dead: i64,
}

impl Limits {
    fn new(store: &MysqlStore, retention: &Retention, now: i64) -> Self {
        let sent = match store.sent {
            Sent::Keep => millis(retention.sent),
            // Only those are left that somebody acknowledged at an odd moment.
            Sent::Delete => 0,
            // They go with their partition, unless something in it keeps it for too long.
            Sent::Partition => millis(retention.sent).saturating_mul(2),
        };
        Self { sent: now.saturating_sub(sent), dead: now.saturating_sub(millis(retention.dead)) }
    }

    fn params(self) -> Params {
        Params::Positional(vec![at(self.sent), at(self.dead)])
    }
}

/// Whether the record `e` may go: nobody has to acknowledge it, and nobody waits for it. The parameters are the
/// times before which Sent and Dead records are too old.
const MAY_GO: &str = "((e.status = 'sent' AND e.sent_at < ? AND NOT EXISTS (
         SELECT 1 FROM json_table(coalesce(e.ack_groups, '[]'), '$[*]' COLUMNS (
                           name VARCHAR(249) CHARACTER SET utf8mb4 PATH '$')) g
         JOIN outbox_unacknowledged u ON u.grp = g.name COLLATE utf8mb4_bin AND u.seq = e.seq
         LEFT JOIN outbox_acknowledgements a ON a.seq = u.seq AND a.grp = u.grp WHERE a.seq IS NULL))
     OR (e.status = 'dead' AND coalesce(e.dead_at, e.written_at) < ? AND e.held = 0
         AND NOT EXISTS (SELECT 1 FROM outbox_holds h WHERE h.seq = e.seq)))";

pub(super) async fn clean(store: &MysqlStore, retention: Retention) -> Result<u64, Error> {
    store
        .run(move |store| async move {
            let mut removed =
                forget_old(&store, "outbox_idempotency_keys", "created_at", retention.keys).await?;
            removed += forget_old(&store, "outbox_audit", "at", retention.audit).await?;
            for chunk in outdated(&store, &retention).await?.chunks(REMOVE) {
                removed += remove(&store, chunk, &retention).await?;
            }
            sweep(&store).await?;
            if store.sent == Sent::Partition {
                removed += partition::rotate(&store, &retention).await?;
            }
            Ok(removed)
        })
        .await
}

/// The records past retention among the next rows, and their slots.
async fn outdated(store: &MysqlStore, retention: &Retention) -> Result<Vec<(i64, u16)>, Trouble> {
    let mut connection = store.connection().await?;
    let now = lane::look(&mut connection, BTreeSet::new()).await?.now;
    let limits = Limits::new(store, retention, now);
    let from = store.cleaned.records.load(Ordering::Relaxed);
    let sql = format!(
        "SELECT e.seq, e.slot, e.written_at, {MAY_GO} FROM outbox_events e FORCE INDEX (PRIMARY)
         WHERE e.seq > {from} ORDER BY e.seq LIMIT {LOOK}"
    );
    let rows: Vec<Row> = connection.exec(sql, limits.params()).await?;
    let full = rows.len() == LOOK;
    let (mut old, mut next) = (Vec::new(), from);
    for mut row in rows {
        if row.millis(2)? > limits.sent.max(limits.dead) {
            store.cleaned.records.store(0, Ordering::Relaxed);
            return Ok(old);
        }
        next = row.number(0)?;
        if row.flag(3)? {
            old.push((next, row.small(1)?));
        }
    }
    store.cleaned.records.store(if full { next } else { 0 }, Ordering::Relaxed);
    Ok(old)
}

/// Removes those that may still go: since they were found, somebody may have requeued one.
async fn remove(store: &MysqlStore, found: &[(i64, u16)], retention: &Retention) -> Result<u64, Trouble> {
    let mut tx = store.begin().await?;
    let slots: BTreeSet<u16> = found.iter().map(|(_, slot)| *slot).collect();
    let place = lane::lock_slots(&mut tx, &slots).await?;
    let limits = Limits::new(store, retention, place.now);
    let sql = format!(
        "SELECT e.seq, e.status = 'sent' FROM outbox_events e FORCE INDEX (PRIMARY)
         WHERE e.seq IN ({}) AND {MAY_GO}",
        list(found.iter().map(|(seq, _)| seq))
    );
    let (mut gone, mut sent) = (Vec::new(), 0);
    for mut row in tx.exec::<Row, _, _>(sql, limits.params()).await? {
        gone.push(row.number(0)?);
        sent += u64::from(row.flag(1)?);
    }
    if gone.is_empty() {
        return Ok(0);
    }
    let dead = gone.len() as u64 - sent;
    let removed = settle::remove(&mut tx, &gone).await?;
    let mut moved = Tally::default();
    // The last who acknowledges a message may have removed it first.
    store.uncount(&mut moved, removed.saturating_sub(dead));
    tally::write(moved, &mut tx, place.part()).await?;
    commit(tx).await?;
    Ok(removed)
}

/// Forgets the oldest rows of a table with a `position` and a time.
async fn forget_old(store: &MysqlStore, table: &str, time: &str, keep: Duration) -> Result<u64, Trouble> {
    let mut connection = store.connection().await?;
    let now = lane::look(&mut connection, BTreeSet::new()).await?.now;
    let sql = format!(
        "SELECT max(position) FROM (SELECT position, {time} AS at FROM {table} ORDER BY position LIMIT {REMOVE}) old
         WHERE at < ?"
    );
    let oldest = at(now.saturating_sub(millis(keep)));
    let last: Option<Option<i64>> = connection.exec_first(sql, (oldest,)).await?;
    let Some(last) = last.flatten() else { return Ok(0) };
    connection.query_drop(format!("DELETE FROM {table} WHERE position <= {last}")).await?;
    Ok(connection.affected_rows())
}

/// Removes what rows that were deleted by hand left behind, some of it at a time. Found first and written by number:
/// a statement that looks for rows itself would wait for those that others are at.
async fn sweep(store: &MysqlStore) -> Result<(), Trouble> {
    let mut tx = store.begin().await?;
    // Where the trigger could not be made, nobody said that a holder is gone.
    let sql = format!(
        "SELECT h.seq FROM outbox_holds h LEFT JOIN outbox_events e ON e.seq = h.seq
         WHERE h.draining = 0 AND e.seq IS NULL LIMIT {REMOVE}"
    );
    let gone: Vec<i64> = tx.query(sql).await?;
    if !gone.is_empty() {
        let sql = "UPDATE outbox_holds FORCE INDEX (outbox_holds_seq) SET draining = 1, seq = 0 WHERE seq IN";
        tx.query_drop(format!("{sql} ({})", list(gone))).await?;
    }
    let cleaned = &store.cleaned;
    for (table, column, index, cursor) in [
        ("outbox_attempts", "position", "outbox_attempts_seq", &cleaned.attempts),
        ("outbox_acknowledgements", "seq", "PRIMARY", &cleaned.acknowledgements),
    ] {
        let from = cursor.load(Ordering::Relaxed);
        let sql = format!(
            "SELECT t.place, t.seq, e.seq IS NULL FROM (
                 SELECT {column} AS place, seq FROM {table} WHERE {column} > {from} ORDER BY {column} LIMIT {LOOK}) t
             LEFT JOIN outbox_events e ON e.seq = t.seq"
        );
        let rows: Vec<Row> = tx.query(sql).await?;
        let full = rows.len() == LOOK;
        let (mut last, mut orphans) = (from, BTreeSet::new());
        for mut row in rows {
            let (position, seq) = (row.number(0)?, row.number(1)?);
            last = last.max(position);
            if row.flag(2)? {
                orphans.insert(seq);
            }
        }
        if !orphans.is_empty() {
            let sql =
                format!("DELETE t FROM {table} t FORCE INDEX ({index}) WHERE t.seq IN ({})", list(orphans));
            tx.query_drop(sql).await?;
        }
        cursor.store(if full { last } else { 0 }, Ordering::Relaxed);
    }
    commit(tx).await
}
