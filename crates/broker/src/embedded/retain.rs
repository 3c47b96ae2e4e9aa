//! Removing what everybody has read, in small steps that no publisher notices.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension};

use super::{Broker, Error, position};

/// Messages removed in one transaction at most, unless one block has more.
const STEP: i64 = 1_000;

/// Left to others between two steps.
const PAUSE: Duration = Duration::from_millis(10);

impl Broker {
    /// Removes now what would be removed in the background anyway, and says how many messages that were.
    ///
    /// # Errors
    /// When the file cannot be used.
    ///
    /// # Cancel safety
    /// Safe: what was removed stays removed.
    pub async fn trim(&self) -> Result<u64, Error> {
        Ok(trim(&self.inner.file, self.inner.config.retain).await?)
    }
}

/// Trims until it is stopped.
pub(super) async fn keep(file: Arc<sqlite::File>, retain: Duration) {
    let every = (retain / 10).clamp(Duration::from_secs(1), Duration::from_secs(60));
    loop {
        tokio::time::sleep(every).await;
        match trim(&file, retain).await {
            Ok(0) => {}
            Ok(removed) => tracing::debug!(removed, "the embedded broker removed what everybody has read"),
            Err(error) => tracing::warn!(%error, "the embedded broker could not remove old messages"),
        }
    }
}

async fn trim(file: &sqlite::File, retain: Duration) -> Result<u64, sqlite::Error> {
    let retain = i64::try_from(retain.as_millis()).unwrap_or(i64::MAX);
    let mut removed = 0;
    // Looked for without the lock: mostly there is nothing to do.
    let partitions = file.read(move |connection| candidates(connection, retain)).await?;
    for partition in partitions {
        loop {
            let step = file.write(move |connection| remove(connection, partition, retain)).await?;
            removed += step;
            if step == 0 {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
    Ok(removed)
}

/// Partitions whose oldest message may go.
fn candidates(connection: &Connection, retain: i64) -> Result<Vec<u32>, sqlite::Error> {
    let mut found = Vec::new();
    let mut floors = connection.prepare_cached(include_str!("floors.sql"))?;
    let mut rows = floors.query((0, u32::MAX))?;
    while let Some(row) = rows.next()? {
        let (partition, first, floor) = (row.get(0)?, row.get(1)?, row.get(2)?);
        if end_of_step(connection, partition, first, floor, retain)? > first {
            found.push(partition);
        }
    }
    Ok(found)
}

/// Removes the oldest messages of one partition. The floor is read again: a group may have joined meanwhile.
fn remove(connection: &Connection, partition: u32, retain: i64) -> Result<u64, sqlite::Error> {
    let floor = connection
        .prepare_cached(include_str!("floors.sql"))?
        .query_row((partition, partition), |row| Ok((row.get(1)?, row.get(2)?)))
        .optional()?;
    let Some((first, floor)) = floor else { return Ok(0) };
    let end = end_of_step(connection, partition, first, floor, retain)?;
    if end > first {
        connection
            .prepare_cached("DELETE FROM broker_blocks WHERE position >= ?1 AND position < ?2")?
            .execute((position(partition, first), position(partition, end)))?;
        connection
            .prepare_cached("UPDATE broker_partitions SET first = ?2 WHERE id = ?1")?
            .execute((partition, end))?;
    }
    Ok((end - first).unsigned_abs())
}

/// Where removing must stop: before the first block that is not read to its end or too young, or after one step.
fn end_of_step(
    connection: &Connection,
    partition: u32,
    first: i64,
    floor: i64,
    retain: i64,
) -> Result<i64, sqlite::Error> {
    let base = position(partition, 0);
    let mut blocks = connection.prepare_cached(
        "SELECT position + messages, stored_at > CAST(unixepoch('subsec') * 1000 AS INTEGER) - ?3
         FROM broker_blocks WHERE position >= ?1 AND position < ?2 ORDER BY position",
    )?;
    let mut rows = blocks.query((base + first, base + floor, retain))?;
    let mut end = first;
    while let Some(row) = rows.next()? {
        let (block_end, young): (i64, bool) = (row.get::<_, i64>(0)? - base, row.get(1)?);
        if young || block_end > floor || (end > first && block_end > first + STEP) {
            break;
        }
        end = block_end;
    }
    Ok(end)
}
