//! Reading the log beside its groups, block by block: no offset moves and no group is made.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use rusqlite::{Connection, OptionalExtension};

use super::block::{Messages, Unreadable};
use super::error::receive as failed;
use super::{Broker, position};
use crate::{Browse, ReceiveError, See, Seen, Span};

/// Blocks that are read at a time: a few megabytes.
const BLOCKS: usize = 32;

/// What is wrong with a block.
const DAMAGED: &str = "a block of the log is damaged, or was written by a newer version";

#[async_trait]
impl Browse for Broker {
    async fn browse(
        &self,
        topic: &str,
        span: Span,
        see: See<'_>,
    ) -> Result<Option<DateTime<Utc>>, ReceiveError> {
        let file = &self.inner.file;
        let name = topic.to_owned();
        let found = file.read(move |connection| partitions(connection, &name)).await;
        let Some((base, count)) = found.map_err(|error| failed(&error))? else { return Ok(None) };
        for partition in base..base + count {
            let mut from = position(partition, 0);
            loop {
                let read = file.read(move |connection| page(connection, from, partition, span)).await;
                let (seen, last) = read.map_err(|error| failed(&error))?;
                seen.map_err(|Unreadable| ReceiveError::Misconfigured(DAMAGED.to_owned()))?
                    .into_iter()
                    .for_each(&mut *see);
                let Some(last) = last else { break };
                from = last + 1;
            }
        }
        // Asked for last: what was removed while this was reading counts as well.
        let retain = i64::try_from(self.inner.config.retain.as_millis()).unwrap_or(i64::MAX);
        let kept = file.read(move |connection| kept_since(connection, base, count, retain)).await;
        Ok(kept.map_err(|error| failed(&error))?.and_then(DateTime::from_timestamp_millis))
    }
}

/// The first partition of a topic, and how many it has.
fn partitions(connection: &Connection, topic: &str) -> Result<Option<(u32, u32)>, sqlite::Error> {
    let found = connection
        .prepare_cached("SELECT base, partitions FROM broker_topics WHERE name = ?1")?
        .query_row([topic], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    Ok(found)
}

/// What a page of blocks holds, and the position of its last one if there may be more.
type Page = (Result<Vec<Seen>, Unreadable>, Option<i64>);

fn page(connection: &Connection, from: i64, partition: u32, span: Span) -> Result<Page, sqlite::Error> {
    let mut blocks = connection.prepare_cached(
        "SELECT position, messages, stored_at, data FROM broker_blocks
         WHERE position >= ?1 AND position < ?2 AND stored_at >= ?3 AND stored_at < ?4
         ORDER BY position LIMIT ?5",
    )?;
    let (since, until) = (span.since.timestamp_millis(), span.until.timestamp_millis());
    let mut rows = blocks.query((from, position(partition + 1, 0), since, until, BLOCKS))?;
    let (mut seen, mut read, mut last) = (Vec::new(), 0, None);
    while let Some(row) = rows.next()? {
        (read, last) = (read + 1, Some(row.get(0)?));
        let (messages, stored_at): (usize, i64) = (row.get(1)?, row.get(2)?);
        if heads(row.get(3)?, messages, stored_at, &mut seen).is_err() {
            return Ok((Err(Unreadable), None));
        }
    }
    Ok((Ok(seen), last.filter(|_| read == BLOCKS)))
}

fn heads(data: Vec<u8>, messages: usize, stored_at: i64, seen: &mut Vec<Seen>) -> Result<(), Unreadable> {
    let stored_at = DateTime::from_timestamp_millis(stored_at).ok_or(Unreadable)?;
    let mut block = Messages::of(data)?;
    for _ in 0..messages {
        let (id, seq, delivery) = block.head()?;
        seen.push(Seen { id, seq: Some(seq), delivery, stored_at, made: false });
    }
    Ok(())
}

/// Since when nothing was removed from any of the partitions: since the oldest that each still has, or for as long as
/// everything is kept.
fn kept_since(
    connection: &Connection,
    base: u32,
    count: u32,
    retain: i64,
) -> Result<Option<i64>, sqlite::Error> {
    let now: i64 =
        connection.query_row("SELECT CAST(unixepoch('subsec') * 1000 AS INTEGER)", [], |row| row.get(0))?;
    let mut trimmed = connection
        .prepare_cached("SELECT id, first FROM broker_partitions WHERE id >= ?1 AND id < ?2 AND first > 0")?;
    let mut oldest = connection.prepare_cached("SELECT stored_at FROM broker_blocks WHERE position = ?1")?;
    let mut rows = trimmed.query((base, base + count))?;
    let mut since = None;
    while let Some(row) = rows.next()? {
        let first = position(row.get(0)?, row.get(1)?);
        // The one before it may be of the same millisecond.
        let stored_at: Option<i64> = oldest.query_row([first], |row| row.get(0)).optional()?;
        let kept = now.saturating_sub(retain);
        since = since.max(Some(stored_at.map_or(kept, |stored_at| kept.min(stored_at + 1))));
    }
    Ok(since)
}
