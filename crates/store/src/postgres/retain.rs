//! Removing what has been kept long enough, a bounded number at a time.
//!
//! Everything here stands in the order in which it was written, so old rows are at the front and nothing needs an
//! index of its own: the first row that is too young ends the round.

use std::sync::atomic::Ordering;
use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio_postgres::types::Type;

use super::connection::{Transaction, repeat};
use super::error::Trouble;
use super::row::before;
use super::{PostgresStore, claim, partition, tally};
use crate::{Error, Retention};

/// Rows removed in one transaction.
const REMOVE: usize = 500;

/// Records looked at in one call.
const LOOK: i64 = 5_000;

/// Whether the Sent record `e` may go: it was sent before `$1` and nobody has to acknowledge it.
macro_rules! sent_may_go {
    () => {
        "(e.status = 'sent' AND e.sent_at < $1 AND NOT EXISTS (SELECT 1 FROM outbox_unacknowledged u WHERE u.seq = e.seq))"
    };
}

/// Whether the Dead record `e` may go: it died before `$2` and nobody waits for it.
macro_rules! dead_may_go {
    () => {
        "(e.status = 'dead' AND coalesce(e.dead_at, e.written_at) < $2 AND NOT e.held
          AND NOT EXISTS (SELECT 1 FROM outbox_holds h WHERE h.seq = e.seq))"
    };
}

pub(super) async fn clean(store: &PostgresStore, retention: &Retention) -> Result<u64, Error> {
    let keys = forget_old(store, "outbox_idempotency_keys", "created_at", retention.keys).await?;
    let audit = forget_old(store, "outbox_audit", "at", retention.audit).await?;
    let from = store.cleaned.load(Ordering::Relaxed);
    let (old, next) = repeat(|| outdated(store, from, retention)).await?;
    store.cleaned.store(next, Ordering::Relaxed);
    let mut removed = 0;
    for chunk in old.chunks(REMOVE) {
        removed += repeat(|| remove(store, chunk, retention)).await?;
    }
    repeat(|| async {
        let tx = store.connections.transaction().await?;
        let (begun, folded) = tokio::join!(biased; tx.begin(), tally::fold(&tx));
        tx.end(begun.and(folded)).await
    })
    .await?;
    if store.parted {
        removed += partition::rotate(store, retention).await?;
    }
    Ok(keys + audit + removed)
}

/// The times before which Sent and Dead records are too old.
async fn limits(
    store: &PostgresStore,
    tx: &Transaction,
    retention: &Retention,
) -> Result<(DateTime<Utc>, DateTime<Utc>), Trouble> {
    let now = tx.one("SELECT clock_timestamp()", &[]).await?.try_get(0)?;
    // Those in a partition go with it, unless something in it keeps it for too long.
    let sent = if store.parted { retention.sent.saturating_mul(2) } else { retention.sent };
    Ok((before(now, sent), before(now, retention.dead)))
}

/// The records past retention among the next rows after `from`, and where to look next time.
async fn outdated(
    store: &PostgresStore,
    from: i64,
    retention: &Retention,
) -> Result<(Vec<i64>, i64), Trouble> {
    let tx = store.connections.transaction().await?;
    let result = async {
        tx.begin_reading().await?;
        let (sent, dead) = limits(store, &tx, retention).await?;
        let rows = tx
            .query(
                concat!(
                    "SELECT seq, written_at, ",
                    sent_may_go!(),
                    " OR ",
                    dead_may_go!(),
                    " FROM outbox_events e WHERE seq > $3 ORDER BY seq LIMIT $4"
                ),
                &[
                    (&sent, Type::TIMESTAMPTZ),
                    (&dead, Type::TIMESTAMPTZ),
                    (&from, Type::INT8),
                    (&LOOK, Type::INT8),
                ],
            )
            .await?;
        let mut old = Vec::new();
        let mut next = from;
        for row in &rows {
            let written_at: DateTime<Utc> = row.try_get(1)?;
            if written_at > sent.max(dead) {
                return Ok((old, 0));
            }
            next = row.try_get(0)?;
            if row.try_get(2)? {
                old.push(next);
            }
        }
        Ok((old, if super::row::limit(rows.len()) == LOOK { next } else { 0 }))
    }
    .await;
    tx.end(result).await
}

/// Removes those that may still go: since they were found, somebody may have requeued one. Nobody touches what is sent;
/// the others go under the locks of their lanes.
async fn remove(store: &PostgresStore, seqs: &[i64], retention: &Retention) -> Result<u64, Trouble> {
    let tx = store.connections.transaction().await?;
    let result = async {
        tx.begin().await?;
        let (sent, dead) = limits(store, &tx, retention).await?;
        let rows = tx
            .query(
                "SELECT DISTINCT e.slot & (s.value::smallint - 1::smallint)
                 FROM outbox_events e, outbox_settings s WHERE e.seq = ANY ($1) AND e.status <> 'sent' AND s.name = 'lanes'",
                &[(&seqs, Type::INT8_ARRAY)],
            )
            .await?;
        if !rows.is_empty() {
            let lanes: Vec<i16> = rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
            claim::lock(&tx, &lanes).await?;
        }
        tx.execute(
            concat!(
                "DELETE FROM outbox_events e WHERE e.seq = ANY ($3) AND (",
                sent_may_go!(),
                " OR ",
                dead_may_go!(),
                ")"
            ),
            &[(&sent, Type::TIMESTAMPTZ), (&dead, Type::TIMESTAMPTZ), (&seqs, Type::INT8_ARRAY)],
        )
        .await
    }
    .await;
    tx.end(result).await
}

/// Forgets the oldest rows of a table with a `position` and a time.
async fn forget_old(
    store: &PostgresStore,
    table: &'static str,
    time: &'static str,
    keep: Duration,
) -> Result<u64, Error> {
    let sql = format!(
        "DELETE FROM {table} WHERE {time} < clock_timestamp() - $2::bigint * interval '1 ms'
         AND position IN (SELECT position FROM {table} ORDER BY position LIMIT $1)"
    );
    let keep = crate::column::millis(keep);
    store.execute(&sql, &[(&super::row::limit(REMOVE), Type::INT8), (&keep, Type::INT8)]).await
}
