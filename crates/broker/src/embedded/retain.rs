//! Removing what everybody has read, in small steps that no publisher notices.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;

use super::{Broker, Error, position};

/// Messages removed in one transaction at most.
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
            if step < STEP as u64 {
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
    let mut rows = floors.query([])?;
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
    let mut floors = connection.prepare_cached(include_str!("floors.sql"))?;
    let mut rows = floors.query([])?;
    while let Some(row) = rows.next()? {
        if row.get::<_, u32>(0)? != partition {
            continue;
        }
        let (first, floor) = (row.get(1)?, row.get(2)?);
        let end = end_of_step(connection, partition, first, floor, retain)?;
        if end <= first {
            return Ok(0);
        }
        let removed = connection
            .prepare_cached("DELETE FROM broker_messages WHERE position >= ?1 AND position < ?2")?
            .execute((position(partition, first), position(partition, end)))?;
        connection
            .prepare_cached("UPDATE broker_partitions SET first = ?2 WHERE id = ?1")?
            .execute((partition, end))?;
        return Ok(removed as u64);
    }
    Ok(0)
}

/// Where removing must stop: at the floor, after one step, or at the first message that is too young.
fn end_of_step(
    connection: &Connection,
    partition: u32,
    first: i64,
    floor: i64,
    retain: i64,
) -> Result<i64, sqlite::Error> {
    let end = floor.min(first + STEP);
    let young: Option<i64> = connection
        .prepare_cached(
            "SELECT min(position) FROM broker_messages WHERE position >= ?1 AND position < ?2
             AND stored_at > CAST(unixepoch('subsec') * 1000 AS INTEGER) - ?3",
        )?
        .query_row((position(partition, first), position(partition, end), retain), |row| row.get(0))?;
    Ok(young.map_or(end, |young| young - position(partition, 0)))
}
