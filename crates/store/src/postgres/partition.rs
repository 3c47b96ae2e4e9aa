//! Sent records in partitions of the table, each dropped as a whole: no row of them is ever deleted.
//!
//! Partitions are ranges of `seq`, made ahead of the writers; what is beyond them, because nobody made the next one in
//! time, waits in a partition of its own and loses nothing. About eight cover the retention, so that looking into all of
//! them stays cheap. Changing them needs the table for a moment; who does not get it within a second tries again at the
//! next cleaning, because everybody else waits behind.

use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::PostgresStore;
use super::error::Trouble;
use super::row::before;
use crate::{Error, Retention};

/// Partitions that cover the retention, more or less.
const PARTS: i64 = 8;

/// Rows in a partition, at least and at most, and in the first ones.
const LEAST: i64 = 100_000;
const MOST: i64 = 1_000_000_000;
const FIRST: i64 = 1_000_000;

/// As the whole table has them: a partitioned one has none of its own.
const PARAMETERS: &str =
    "autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_insert_scale_factor = 0.05,
     autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0";

/// A partition that ends somewhere.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    name: String,
    /// The first number that is no longer in it.
    end: i64,
}

/// Whether the table is in partitions, whatever the configuration says by now.
pub(super) async fn is_made(client: &Client) -> Result<bool, Error> {
    let sql = "SELECT relkind = 'p' FROM pg_class WHERE oid = 'outbox_events'::regclass";
    Ok(client.query_typed_one(sql, &[]).await.and_then(|row| row.try_get(0)).map_err(Trouble::from)?)
}

/// Puts the table into partitions; what is in it is the first one. Its rows are looked at once, and not copied.
pub(super) async fn make(client: &Client) -> Result<(), Error> {
    if is_made(client).await? {
        return Ok(());
    }
    client.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED").await.map_err(Trouble::from)?;
    let made = cut(client).await;
    let end = if made.is_ok() { "COMMIT" } else { "ROLLBACK" };
    client.batch_execute(end).await.map_err(Trouble::from)?;
    made
}

async fn cut(client: &Client) -> Result<(), Error> {
    super::migrate::alone(client).await?;
    // Looked at again under the lock: another process may have been faster.
    if is_made(client).await? {
        return Ok(());
    }
    let cut = async {
        client.batch_execute(include_str!("partition.sql")).await?;
        let last = client.query_typed_one("SELECT coalesce(max(seq), 0) FROM outbox_events_p0", &[]).await?;
        let end = last.try_get::<_, i64>(0)? + FIRST;
        let attach = format!(
            "ALTER TABLE outbox_events ATTACH PARTITION outbox_events_p0 FOR VALUES FROM (MINVALUE) TO ({end})"
        );
        client.batch_execute(&attach).await
    };
    Ok(cut.await.map_err(Trouble::from)?)
}

/// Makes partitions ahead and drops those that nobody needs. Answers how many records went with them.
pub(super) async fn rotate(store: &PostgresStore, retention: &Retention) -> Result<u64, Error> {
    // A connection of its own: one that failed halfway goes with its transaction.
    let client = store.connections.dedicated().await?;
    match turn(&client, retention).await {
        // Somebody else has the table.
        Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => {
            tracing::debug!("partitions are left as they are this time");
            Ok(0)
        }
        done => Ok(done.map_err(Trouble::from)?),
    }
}

async fn turn(client: &Client, retention: &Retention) -> Result<u64, tokio_postgres::Error> {
    let parts = parts(client).await?;
    extend(client, &parts, retention.sent).await?;
    match parts.as_slice() {
        [oldest, _, ..] => retire(client, oldest, retention.sent).await,
        _ => Ok(0),
    }
}

/// The partitions that end somewhere, oldest first.
async fn parts(client: &Client) -> Result<Vec<Part>, tokio_postgres::Error> {
    let rows = client
        .query_typed(
            "SELECT c.relname::text, substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \\(''([0-9]+)''\\)')::bigint AS bound
             FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
             WHERE i.inhparent = 'outbox_events'::regclass AND pg_get_expr(c.relpartbound, c.oid) <> 'DEFAULT'
             ORDER BY bound",
            &[],
        )
        .await?;
    rows.iter().map(|row| Ok(Part { name: row.try_get(0)?, end: row.try_get(1)? })).collect()
}

/// Makes the next partition when the last one is half full.
async fn extend(client: &Client, parts: &[Part], keep: Duration) -> Result<(), tokio_postgres::Error> {
    let Some(last) = parts.last() else { return Ok(()) };
    let start = parts.iter().rev().nth(1).map_or(0, |part| part.end);
    let row = client
        .query_typed_one(
            "SELECT (SELECT max(seq) FROM outbox_events),
                    (SELECT extract(epoch FROM clock_timestamp() - written_at)::bigint FROM outbox_events
                     WHERE seq >= $1 ORDER BY seq LIMIT 1)",
            &[(&start, Type::INT8)],
        )
        .await?;
    let (Some(newest), Some(seconds)) =
        (row.try_get::<_, Option<i64>>(0)?, row.try_get::<_, Option<i64>>(1)?)
    else {
        return Ok(());
    };
    if newest < start + (last.end - start) / 2 {
        return Ok(());
    }
    // What is beyond the last one already stays where it is; the next begins well after it, for others are writing.
    let from = if newest < last.end { last.end } else { newest + LEAST };
    let end = from + size(newest - start, seconds, keep);
    client
        .batch_execute(&format!(
            "BEGIN; SET LOCAL lock_timeout = '1s';
             CREATE TABLE outbox_events_p{end} (LIKE outbox_events INCLUDING DEFAULTS INCLUDING GENERATED
                 INCLUDING CONSTRAINTS INCLUDING INDEXES) WITH ({PARAMETERS});
             ALTER TABLE outbox_events ATTACH PARTITION outbox_events_p{end} FOR VALUES FROM ({from}) TO ({end});
             COMMIT"
        ))
        .await
}

/// Rows for a partition, when `rows` came in `seconds`: an eighth of what is kept.
fn size(rows: i64, seconds: i64, keep: Duration) -> i64 {
    let kept = i64::try_from(keep.as_secs()).unwrap_or(i64::MAX);
    (rows.max(0) / seconds.max(1)).saturating_mul(kept / PARTS).clamp(LEAST, MOST)
}

/// Drops the oldest partition if all that is in it was sent long enough ago, and everybody who was asked has
/// acknowledged it. What keeps it otherwise is removed row by row, as everywhere.
async fn retire(client: &Client, oldest: &Part, keep: Duration) -> Result<u64, tokio_postgres::Error> {
    let Part { name, end } = oldest;
    let now: DateTime<Utc> = client.query_typed_one("SELECT clock_timestamp()", &[]).await?.try_get(0)?;
    let limit = before(now, keep);
    // The next partition must be in use: numbers are drawn in order, but this one's may still be on their way.
    let sql = format!(
        "SELECT EXISTS (SELECT 1 FROM outbox_events WHERE seq >= $2)
            AND NOT EXISTS (SELECT 1 FROM {name} WHERE status <> 'sent' OR sent_at >= $1 OR sent_at IS NULL)
            AND NOT EXISTS (SELECT 1 FROM outbox_unacknowledged WHERE seq < $2)"
    );
    let old = client.query_typed_one(&sql, &[(&limit, Type::TIMESTAMPTZ), (end, Type::INT8)]).await?;
    if !old.try_get::<_, bool>(0)? {
        return Ok(0);
    }
    client.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '1s'").await?;
    // With the table to ourselves nobody can be on the way into the partition: looked at once more, by seeks.
    client.batch_execute(&format!("ALTER TABLE outbox_events DETACH PARTITION {name}")).await?;
    let sql = format!(
        "SELECT EXISTS (SELECT 1 FROM {name} WHERE ready) OR EXISTS (SELECT 1 FROM {name} WHERE status = 'dead')
             OR EXISTS (SELECT 1 FROM {name} WHERE NOT ready AND status IN ('pending', 'failed')),
         (SELECT count(*) FROM {name})"
    );
    let row = client.query_typed_one(&sql, &[]).await?;
    if row.try_get(0)? {
        client.batch_execute("ROLLBACK").await?;
        return Ok(0);
    }
    let rows: i64 = row.try_get(1)?;
    client
        .batch_execute(&format!(
            "DELETE FROM outbox_attempts a USING {name} e WHERE a.seq = e.seq AND e.last_error IS NOT NULL;
             DELETE FROM outbox_acknowledgements WHERE seq < {end};
             INSERT INTO outbox_counters (sent) VALUES (-{rows});
             DROP TABLE {name};
             COMMIT"
        ))
        .await?;
    Ok(u64::try_from(rows).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn about_eight_partitions_cover_the_retention() {
        const WEEK: Duration = Duration::from_secs(7 * 24 * 60 * 60);
        let cases = [(0, 0, LEAST), (1_000, 1_000, LEAST), (500_000, 1_000, 37_800_000), (i64::MAX, 1, MOST)];
        for (rows, seconds, expected) in cases {
            assert_eq!(size(rows, seconds, WEEK), expected, "{rows} rows in {seconds} s");
        }
    }
}
