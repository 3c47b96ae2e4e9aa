//! Appending to the log: one transaction per call, one statement per message.
//!
//! Several processes may publish into one file, so the next offset of a partition is always read inside the
//! transaction that uses it. What never changes (where a topic's partitions are) is remembered.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use message::{Invalid, Message, check_topic};
use rusqlite::{Connection, OptionalExtension, params};

use super::error::outcome;
use super::{Broker, position};
use crate::{Guarantees, Outcome, Outgoing, Publisher};

/// Messages in one transaction at most: more would hold the file's lock for too long.
const MAX_BATCH: usize = 10_000;

/// Longer than the file's own patience with a lock, so that its clear answer comes first.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// Where a topic's partitions are; fixed when the topic is created.
#[derive(Clone, Copy, Debug)]
pub(super) struct Topic {
    base: u32,
    partitions: u32,
}

/// A message ready to be written, made outside the writer's thread.
struct Row {
    topic: usize,
    hash: u64,
    outgoing: Outgoing,
    headers: Option<String>,
}

/// The rows of one call and the topics they name.
struct Batch {
    topics: Vec<(String, Option<Topic>)>,
    rows: Vec<Row>,
    partitions: u16,
}

#[async_trait]
impl Publisher for Broker {
    fn guarantees(&self) -> Guarantees {
        Guarantees {
            ordered_batches: true,
            max_payload: Some(self.inner.config.max_payload),
            max_batch: MAX_BATCH,
            deduplication: None,
            durability: "survives a crash of the process and of the machine; one file on one machine, no copies",
        }
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let (mut outcomes, batch) = self.sort(batch);
        if batch.rows.is_empty() {
            return outcomes.into_iter().map(|outcome| outcome.unwrap_or(Outcome::Held)).collect();
        }
        fail::fail_point!("broker::publishing");
        let written = self.inner.file.write(move |connection| append(connection, batch));
        let result = match tokio::time::timeout(TIME_LIMIT, written).await {
            Ok(Ok(learned)) => {
                fail::fail_point!("broker::published");
                self.inner.remember(learned);
                self.inner.ring();
                Outcome::Confirmed
            }
            Ok(Err(error)) => outcome(&error),
            Err(_) => Outcome::Unconfirmed {
                error: format!("the embedded broker did not answer within {TIME_LIMIT:?}"),
            },
        };
        outcomes.iter_mut().map(|outcome| outcome.take().unwrap_or_else(|| result.clone())).collect()
    }
}

impl Broker {
    /// Splits what can be stored from what is answered at once. `None` waits for the transaction.
    fn sort(&self, outgoing: Vec<Outgoing>) -> (Vec<Option<Outcome>>, Batch) {
        let mut outcomes = Vec::with_capacity(outgoing.len());
        let mut batch = Batch {
            topics: Vec::new(),
            rows: Vec::with_capacity(outgoing.len()),
            partitions: self.inner.config.partitions,
        };
        let mut numbers: HashMap<String, usize> = HashMap::new();
        let mut held: HashSet<(String, String)> = HashSet::new();
        for one in outgoing {
            let message = &one.message;
            let waits = !held.is_empty()
                && message
                    .key
                    .as_ref()
                    .is_some_and(|key| held.contains(&(message.topic.clone(), key.clone())));
            if waits {
                outcomes.push(Some(Outcome::Held));
                continue;
            }
            let headers = match self.check(message) {
                Ok(headers) => headers,
                Err(error) => {
                    if let Some(key) = &message.key {
                        held.insert((message.topic.clone(), key.clone()));
                    }
                    outcomes.push(Some(Outcome::Rejected { error }));
                    continue;
                }
            };
            let topic = match numbers.get(&message.topic) {
                Some(number) => *number,
                None => {
                    let number = batch.topics.len();
                    batch.topics.push((message.topic.clone(), self.inner.recall(&message.topic)));
                    numbers.insert(message.topic.clone(), number);
                    number
                }
            };
            let hash = match &message.key {
                Some(key) => fnv1a(key.as_bytes()),
                None => fnv1a(message.id.0.as_bytes()),
            };
            batch.rows.push(Row { topic, hash, outgoing: one, headers });
            outcomes.push(None);
        }
        (outcomes, batch)
    }

    /// The headers as they are stored, or why the message never can be.
    fn check(&self, message: &Message) -> Result<Option<String>, String> {
        check_topic(&message.topic).map_err(|invalid| invalid.to_string())?;
        let (size, limit) = (message.payload.len(), self.inner.config.max_payload);
        if size > limit {
            return Err(Invalid::PayloadTooLarge { size, limit }.to_string());
        }
        if message.headers.is_empty() {
            return Ok(None);
        }
        let headers = serde_json::to_string(&message.headers)
            .map_err(|error| format!("the headers cannot be written as JSON: {error}"))?;
        Ok(Some(headers))
    }
}

/// Writes the batch and returns the topics that were not known before.
fn append(connection: &Connection, batch: Batch) -> Result<Vec<(String, Topic)>, sqlite::Error> {
    let mut learned = Vec::new();
    let mut topics = Vec::with_capacity(batch.topics.len());
    let mut next: BTreeMap<u32, (i64, i64)> = BTreeMap::new();
    for (name, known) in batch.topics {
        let topic = match known {
            Some(topic) => topic,
            None => {
                let topic = find_or_create(connection, &name, batch.partitions)?;
                learned.push((name, topic));
                topic
            }
        };
        let mut offsets =
            connection.prepare_cached("SELECT id, next FROM broker_partitions WHERE id >= ?1 AND id < ?2")?;
        let mut rows = offsets.query((topic.base, topic.base + topic.partitions))?;
        while let Some(row) = rows.next()? {
            let offset = row.get(1)?;
            next.insert(row.get(0)?, (offset, offset));
        }
        topics.push(topic);
    }
    let now: i64 = connection
        .prepare_cached("SELECT CAST(unixepoch('subsec') * 1000 AS INTEGER)")?
        .query_row([], |row| row.get(0))?;
    let mut insert = connection.prepare_cached(include_str!("append.sql"))?;
    for Row { topic, hash, outgoing: Outgoing { message, seq, delivery }, headers } in batch.rows {
        let topic = topics[topic];
        let partition = topic.base + (hash % u64::from(topic.partitions)) as u32;
        let (_, offset) = next.get_mut(&partition).ok_or_else(|| {
            sqlite::Error::Statement(format!("the broker's file has lost its partition {partition}"))
        })?;
        insert.execute(params![
            position(partition, *offset),
            now,
            message.id.0.as_bytes().as_slice(),
            seq,
            delivery,
            message.kind,
            message.key,
            message.content_type,
            headers,
            message.occurred_at.timestamp(),
            message.occurred_at.timestamp_subsec_nanos(),
            &message.payload[..],
        ])?;
        *offset += 1;
    }
    let mut advance = connection.prepare_cached("UPDATE broker_partitions SET next = ?2 WHERE id = ?1")?;
    for (partition, (_, offset)) in next.iter().filter(|(_, (before, after))| before != after) {
        advance.execute((partition, offset))?;
    }
    Ok(learned)
}

fn find_or_create(connection: &Connection, name: &str, partitions: u16) -> Result<Topic, sqlite::Error> {
    let found = connection
        .prepare_cached("SELECT base, partitions FROM broker_topics WHERE name = ?1")?
        .query_row([name], |row| Ok(Topic { base: row.get(0)?, partitions: row.get(1)? }))
        .optional()?;
    if let Some(topic) = found {
        return Ok(topic);
    }
    let base: u32 =
        connection.query_row("SELECT coalesce(max(base + partitions), 0) FROM broker_topics", [], |row| {
            row.get(0)
        })?;
    let topic = Topic { base, partitions: u32::from(partitions) };
    let id: i64 = connection.query_row(
        "INSERT INTO broker_topics (name, base, partitions) VALUES (?1, ?2, ?3) RETURNING id",
        (name, topic.base, topic.partitions),
        |row| row.get(0),
    )?;
    let mut insert = connection.prepare("INSERT INTO broker_partitions (id, topic) VALUES (?1, ?2)")?;
    for partition in topic.base..topic.base + topic.partitions {
        insert.execute((partition, id))?;
    }
    // The groups that were waiting for this topic have partitions to share now.
    connection.execute(
        "UPDATE broker_groups SET generation = generation + 1
         WHERE id IN (SELECT group_id FROM broker_subscriptions WHERE topic = ?1)",
        [name],
    )?;
    tracing::info!(topic = name, partitions, "the embedded broker created a topic");
    Ok(topic)
}

/// FNV-1a, folded. Written out here because the partition of a key must be the same in every version.
fn fnv1a(bytes: &[u8]) -> u64 {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    hash ^ (hash >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_partition_of_a_key_never_changes() {
        let partitions: Vec<_> =
            ["", "a", "42", "customer-7", "żółć"].iter().map(|key| fnv1a(key.as_bytes()) % 16).collect();
        assert_eq!(partitions, [1, 0, 4, 10, 4]);
    }

    #[test]
    fn keys_spread_evenly_over_partitions() {
        let mut counts = [0; 16];
        for n in 0..16_000 {
            counts[(fnv1a(format!("customer-{n}").as_bytes()) % 16) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
    }
}
