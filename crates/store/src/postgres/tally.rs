//! Writing the counters: one row for each transaction, added up now and then.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio_postgres::types::Type;

use super::connection::Transaction;
use super::error::Trouble;
use crate::tally::Tally;

/// How often the rows are added up: after so many that this process wrote.
const FOLD: u64 = 256;

/// Rows that are added up at a time.
const ROWS: i64 = 10_000;

static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// Writes what was added up over a transaction.
pub(super) async fn write(tx: &Transaction, tally: Tally) -> Result<(), Trouble> {
    let counters = [
        tally.failed,
        tally.sent,
        tally.dead,
        tally.successes,
        tally.failures,
        tally.died,
        tally.acknowledged,
    ];
    if counters == [0; 7] && tally.waits.is_empty() {
        return Ok(());
    }
    let [failed, sent, dead, successes, failures, died, acknowledged] = counters;
    let names: Vec<&str> = tally.waits.keys().map(|(wait, _)| wait.name()).collect();
    let buckets: Vec<i16> =
        tally.waits.keys().map(|(_, bucket)| i16::try_from(*bucket).unwrap_or(0)).collect();
    let (numbers, totals): (Vec<i64>, Vec<i64>) = tally.waits.values().copied().unzip();
    tx.execute(
        "WITH counted AS (
             INSERT INTO outbox_counters (failed, sent, dead, publish_success_total, publish_failure_total, dead_total,
                                   acknowledged_total)
             VALUES ($1, $2, $3, $4, $5, $6, $7))
         INSERT INTO outbox_latencies (name, bucket, n, millis) SELECT * FROM unnest($8::text[], $9::smallint[], $10::bigint[], $11::bigint[])",
        &[
            (&failed, Type::INT8),
            (&sent, Type::INT8),
            (&dead, Type::INT8),
            (&successes, Type::INT8),
            (&failures, Type::INT8),
            (&died, Type::INT8),
            (&acknowledged, Type::INT8),
            (&names, Type::TEXT_ARRAY),
            (&buckets, Type::INT2_ARRAY),
            (&numbers, Type::INT8_ARRAY),
            (&totals, Type::INT8_ARRAY),
        ],
    )
    .await?;
    if WRITTEN.fetch_add(1, Ordering::Relaxed) % FOLD == FOLD - 1 {
        fold(tx).await?;
    }
    Ok(())
}

/// Adds rows up into one. Those that another transaction is adding up are left to it.
pub(super) async fn fold(tx: &Transaction) -> Result<(), Trouble> {
    tx.execute(
        "WITH gone AS (
             DELETE FROM outbox_counters WHERE position IN
             (SELECT position FROM outbox_counters ORDER BY position LIMIT $1 FOR UPDATE SKIP LOCKED) RETURNING *)
         INSERT INTO outbox_counters (failed, sent, dead, publish_success_total, publish_failure_total, dead_total,
                               acknowledged_total)
         SELECT sum(failed), sum(sent), sum(dead), sum(publish_success_total), sum(publish_failure_total),
                sum(dead_total), sum(acknowledged_total)
         FROM gone HAVING count(*) > 0",
        &[(&ROWS, Type::INT8)],
    )
    .await?;
    tx.execute(
        "WITH gone AS (
             DELETE FROM outbox_latencies WHERE position IN
             (SELECT position FROM outbox_latencies ORDER BY position LIMIT $1 FOR UPDATE SKIP LOCKED) RETURNING *)
         INSERT INTO outbox_latencies (name, bucket, n, millis)
         SELECT name, bucket, sum(n), sum(millis) FROM gone GROUP BY name, bucket",
        &[(&ROWS, Type::INT8)],
    )
    .await?;
    Ok(())
}
