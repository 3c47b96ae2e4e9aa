//! Sent records in partitions of the table, each dropped as a whole: no row of them is ever deleted.
//!
//! Partitions are ranges of `seq`, made ahead of the writers: to cut one that has rows in it would copy them. About eight
//! cover the retention, so that looking into all of them stays cheap. Changing them needs the table for a moment; who
//! does not get it within a second tries again at the next cleaning, because everybody else waits behind.

use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Row};

use super::MysqlStore;
use super::error::Trouble;
use super::migrate::{alone, done};
use super::row::{Read, at};
use super::session::{close, connect};
use super::tally::any_part;
use crate::column::millis;
use crate::{Error, Retention};

/// Partitions that cover the retention, more or less.
const PARTS: i64 = 8;

/// Rows in a partition, at least and at most, and in the first ones.
const LEAST: i64 = 100_000;
const MOST: i64 = 1_000_000_000;
const FIRST: i64 = 1_000_000;

/// The name of the partition for all that is beyond the others. It is kept empty.
const BEYOND: &str = "beyond";

/// A partition that ends somewhere.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    name: String,
    /// The first number that is no longer in it.
    end: i64,
}

/// Whether the table is in partitions, whatever the configuration says by now.
pub(super) async fn is_made(connection: &mut Conn) -> Result<bool, Trouble> {
    let found: Option<u8> = connection
        .query_first(
            "SELECT 1 FROM information_schema.partitions
             WHERE table_schema = database() AND table_name = 'outbox_events' AND partition_name IS NOT NULL LIMIT 1",
        )
        .await?;
    Ok(found.is_some())
}

/// Puts the table into partitions. A large one is copied, once.
pub(super) async fn make(connection: &mut Conn) -> Result<(), Trouble> {
    if is_made(connection).await? {
        return Ok(());
    }
    alone(connection).await?;
    // Looked at again under the lock: another process may have been faster.
    let made = match is_made(connection).await {
        Ok(false) => cut(connection).await,
        made => made.map(drop),
    };
    done(connection).await?;
    made
}

async fn cut(connection: &mut Conn) -> Result<(), Trouble> {
    let last: Option<Option<i64>> = connection.query_first("SELECT max(seq) FROM outbox_events").await?;
    let end = last.flatten().unwrap_or(0) + FIRST;
    connection
        .query_drop(format!(
            "ALTER TABLE outbox_events DROP INDEX outbox_id, ADD INDEX outbox_id (id)
             PARTITION BY RANGE (seq) (PARTITION p{end} VALUES LESS THAN ({end}),
                                       PARTITION {BEYOND} VALUES LESS THAN MAXVALUE)"
        ))
        .await?;
    Ok(())
}

/// Makes partitions ahead and drops those that nobody needs. Answers how many records went with them.
pub(super) async fn rotate(store: &MysqlStore, retention: &Retention) -> Result<u64, Trouble> {
    let mut connection = connect(store.options.clone()).await?;
    let rotated = async {
        // Everybody waits behind one who waits for the table.
        connection.query_drop("SET SESSION lock_wait_timeout = 1").await?;
        let parts = parts(&mut connection).await?;
        extend(&mut connection, &parts, retention.sent).await?;
        match parts.first() {
            Some(oldest) => retire(&mut connection, oldest, retention.sent).await,
            None => Ok(0),
        }
    }
    .await;
    close(connection).await;
    match rotated {
        Err(Trouble::Again(error)) => {
            tracing::debug!(%error, "partitions are left as they are this time");
            Ok(0)
        }
        rotated => rotated,
    }
}

/// The partitions that end somewhere, oldest first.
async fn parts(connection: &mut Conn) -> Result<Vec<Part>, Trouble> {
    let rows: Vec<Row> = connection
        .exec(
            "SELECT partition_name, partition_description FROM information_schema.partitions
             WHERE table_schema = database() AND table_name = 'outbox_events' AND partition_description <> 'MAXVALUE'
             ORDER BY partition_ordinal_position",
            (),
        )
        .await?;
    let mut parts = Vec::with_capacity(rows.len());
    for mut row in rows {
        parts.push(Part { name: row.text(0)?, end: row.number(1)? });
    }
    Ok(parts)
}

/// Makes the next partition when the last one is half full.
async fn extend(connection: &mut Conn, parts: &[Part], keep: Duration) -> Result<(), Trouble> {
    let Some(last) = parts.last() else { return Ok(()) };
    let start = parts.iter().rev().nth(1).map_or(0, |before| before.end);
    let sql = "SELECT (SELECT max(seq) FROM outbox_events),
                      (SELECT timestampdiff(SECOND, written_at, utc_timestamp(3)) FROM outbox_events
                       WHERE seq >= ? ORDER BY seq LIMIT 1)";
    let row: Option<Row> = connection.exec_first(sql, (start,)).await?;
    let Some(mut row) = row else { return Ok(()) };
    let (Some(newest), Some(seconds)) = (row.optional_number(0)?, row.optional_number(1)?) else {
        return Ok(());
    };
    if newest < start + (last.end - start) / 2 {
        return Ok(());
    }
    let end = last.end.max(newest + 1) + size(newest - start, seconds, keep);
    let sql = format!(
        "ALTER TABLE outbox_events REORGANIZE PARTITION {BEYOND} INTO (
             PARTITION p{end} VALUES LESS THAN ({end}), PARTITION {BEYOND} VALUES LESS THAN MAXVALUE)"
    );
    Ok(connection.query_drop(sql).await?)
}

/// Rows for a partition, when `rows` came in `seconds`: an eighth of what is kept.
fn size(rows: i64, seconds: i64, keep: Duration) -> i64 {
    let kept = i64::try_from(keep.as_secs()).unwrap_or(i64::MAX);
    (rows.max(0) / seconds.max(1)).saturating_mul(kept / PARTS).clamp(LEAST, MOST)
}

/// Drops the oldest partition if all that is in it was sent long enough ago, and everybody who was asked has
/// acknowledged it. What keeps it otherwise is removed row by row, as everywhere.
async fn retire(connection: &mut Conn, oldest: &Part, keep: Duration) -> Result<u64, Trouble> {
    let Part { name, end } = oldest;
    let now: Option<Row> = connection.query_first("SELECT utc_timestamp(3)").await?;
    let now = now.ok_or_else(|| Error::Broken("the server says no time".to_owned()))?.millis(0)?;
    let limit = at(now.saturating_sub(millis(keep)));
    // The next partition must be in use: numbers are drawn in order, but this one's may still be on their way.
    let passed: Option<bool> = connection
        .query_first(format!("SELECT EXISTS (SELECT 1 FROM outbox_events WHERE seq >= {end})"))
        .await?;
    let young = format!(
        "SELECT EXISTS (SELECT 1 FROM outbox_events PARTITION ({name})
                        WHERE status <> 'sent' OR sent_at >= ? OR sent_at IS NULL)
             OR EXISTS (SELECT 1 FROM outbox_unacknowledged u
                        LEFT JOIN outbox_acknowledgements a ON a.seq = u.seq AND a.grp = u.grp
                        WHERE u.seq < {end} AND a.seq IS NULL)"
    );
    let young: Option<bool> = connection.exec_first(young, (limit,)).await?;
    if passed != Some(true) || young != Some(false) {
        return Ok(0);
    }
    let rows: Option<i64> =
        connection.query_first(format!("SELECT count(*) FROM outbox_events PARTITION ({name})")).await?;
    let rows = rows.unwrap_or(0);
    // With the table to ourselves no writer can be on its way into the partition: looked at once more, by a seek.
    connection.query_drop("LOCK TABLES outbox_events WRITE").await?;
    let unsent: Option<bool> = connection
        .query_first(format!(
            "SELECT EXISTS (SELECT 1 FROM outbox_events PARTITION ({name}) WHERE status IN ('pending', 'failed', 'dead'))"
        ))
        .await?;
    let dropped = match unsent {
        Some(false) => {
            connection.query_drop(format!("ALTER TABLE outbox_events DROP PARTITION {name}")).await
        }
        _ => Ok(()),
    };
    connection.query_drop("UNLOCK TABLES").await?;
    dropped?;
    if unsent != Some(false) {
        return Ok(0);
    }
    let sql = "UPDATE outbox_counters SET sent = sent - ? WHERE part = ?";
    connection.exec_drop(sql, (rows, any_part())).await?;
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
