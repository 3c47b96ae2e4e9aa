//! Forgetting what no group needs any more: ids past their time, and reservations that have ended.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio_postgres::types::Type;

use super::super::connection::Transaction;
use super::super::error::Trouble;
use crate::column::millis;

/// Rows that are removed in one transaction, and what the last call that is forgotten has beyond that.
const FORGET: i64 = 1_000;

/// How often the rows of counters are added up: after so many that this process wrote.
const FOLD: u64 = 256;

/// Rows of counters that are added up at a time.
const ROWS: i64 = 10_000;

static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// Forgets the ids of `group` that are older than `keep`, and those of other groups by what they said last.
pub(super) async fn ids(tx: &Transaction, group: &str, keep: Duration) -> Result<u64, Trouble> {
    tx.begin().await?;
    tx.execute(
        "DELETE FROM inbox_reserved WHERE (grp, until, token) IN
         (SELECT grp, until, token FROM inbox_reserved WHERE until <= clock_timestamp() LIMIT $1 FOR UPDATE SKIP LOCKED)",
        &[(&FORGET, Type::INT8)],
    )
    .await?;
    // The group may have no consumer tomorrow; whoever calls then knows how long its ids were to be kept.
    tx.execute(
        "UPDATE inbox_groups SET keep_ids = $2::bigint * interval '1 ms'
         WHERE name = $1 AND keep_ids IS DISTINCT FROM $2::bigint * interval '1 ms'",
        &[(&group, Type::TEXT), (&millis(keep), Type::INT8)],
    )
    .await?;
    // Its own ids first.
    let groups = tx
        .query(
            "SELECT grp FROM inbox_groups WHERE keep_ids IS NOT NULL ORDER BY name <> $1, grp",
            &[(&group, Type::TEXT)],
        )
        .await?;
    let mut left = FORGET;
    for row in groups {
        let group: i64 = row.try_get(0)?;
        let parameters = [(&group as _, Type::INT8), (&left as _, Type::INT8)];
        let forgotten: i64 = tx.one(include_str!("forget.sql"), &parameters).await?.try_get(0)?;
        if forgotten > 0 {
            tx.execute(
                "INSERT INTO inbox_forgotten AS f (grp, ids) VALUES ($1, $2)
                 ON CONFLICT (grp) DO UPDATE SET ids = f.ids + EXCLUDED.ids",
                &[(&group, Type::INT8), (&forgotten, Type::INT8)],
            )
            .await?;
        }
        left -= forgotten;
        if left <= 0 {
            break;
        }
    }
    fold(tx).await?;
    Ok(u64::try_from(FORGET - left).unwrap_or(0))
}

pub(super) async fn fold_sometimes(tx: &Transaction) -> Result<(), Trouble> {
    if WRITTEN.fetch_add(1, Ordering::Relaxed) % FOLD == FOLD - 1 {
        fold(tx).await?;
    }
    Ok(())
}

/// Adds the rows of each group up into one. Those that another transaction is adding up are left to it.
async fn fold(tx: &Transaction) -> Result<(), Trouble> {
    tx.execute(
        "WITH gone AS (
             DELETE FROM inbox_counters WHERE position IN
             (SELECT position FROM inbox_counters ORDER BY position LIMIT $1 FOR UPDATE SKIP LOCKED) RETURNING *)
         INSERT INTO inbox_counters (grp, processed, duplicates, parked, dead)
         SELECT grp, sum(processed), sum(duplicates), sum(parked), sum(dead) FROM gone GROUP BY grp",
        &[(&ROWS, Type::INT8)],
    )
    .await?;
    Ok(())
}
