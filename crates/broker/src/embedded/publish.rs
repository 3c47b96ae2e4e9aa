//! Appending to the log: one transaction per call, one block per partition that it touches.
//!
//! Several processes may publish into one file, so the next offset of a partition is always read inside the
//! transaction that uses it. What never changes (where a topic's partitions are) is remembered.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use message::{Invalid, Message, check_topic};
use rusqlite::{Connection, OptionalExtension};

use super::Config;
use super::block::Block;
use super::error::outcome;
use super::{Broker, position};
use crate::partition::partition;
use crate::{Guarantees, Outcome, Outgoing, Publisher, Transactions};

/// Messages in one transaction at most: more would hold the file's lock for too long.
const MAX_BATCH: usize = 10_000;

/// Longer than the file's own patience with a lock, so that its clear answer comes first.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(30);

/// Where a topic's partitions are; fixed when the topic is created.
#[derive(Clone, Copy, Debug)]
pub(super) struct Topic {
    base: u32,
    partitions: u32,
}

/// What is written, by partition.
pub(super) type Blocks = BTreeMap<u32, Vec<Block>>;

/// A message that can be stored, and its headers as they are stored.
pub(super) struct Ready {
    outgoing: Outgoing,
    headers: Option<String>,
}

/// What is said of messages that nobody spoke of in time.
pub(super) fn unanswered() -> Outcome {
    Outcome::Unconfirmed { error: format!("the embedded broker did not answer within {TIME_LIMIT:?}") }
}

impl Config {
    /// What a broker with these settings promises.
    pub(crate) fn guarantees(&self) -> Guarantees {
        Guarantees {
            key_order: true,
            ordered_batches: true,
            groups: true,
            fenced: true,
            max_payload: Some(self.max_payload),
            max_batch: MAX_BATCH,
            deduplication: None,
            durability: "survives a crash of the process and of the machine; one file on one machine, no copies",
            needs: &["a disk that keeps what it says it wrote", "room for what its groups have not read"],
        }
    }
}

#[async_trait]
impl Publisher for Broker {
    fn guarantees(&self) -> Guarantees {
        self.inner.config.guarantees()
    }

    fn transactions(&self) -> Option<Arc<dyn Transactions>> {
        Some(Arc::new(self.clone()))
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let (mut outcomes, ready) = self.sort(batch);
        if ready.is_empty() {
            return outcomes.into_iter().flatten().collect();
        }
        let failure = match tokio::time::timeout(TIME_LIMIT, self.store(&ready)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(outcome(&error)),
            Err(_) => Some(unanswered()),
        };
        let mut results = match failure {
            None => vec![Outcome::Confirmed; ready.len()],
            Some(failure) => failed(&ready, &failure),
        }
        .into_iter();
        for outcome in outcomes.iter_mut().filter(|outcome| outcome.is_none()) {
            *outcome = results.next();
        }
        outcomes.into_iter().flatten().collect()
    }
}

/// What becomes of each message when none was stored: the first of each key failed, the later ones were held.
pub(super) fn failed(ready: &[Ready], failure: &Outcome) -> Vec<Outcome> {
    // Perhaps all of them are stored, the later ones too.
    let certain = !matches!(failure, Outcome::Unconfirmed { .. });
    let mut first = HashSet::new();
    let mut outcomes = Vec::with_capacity(ready.len());
    for Ready { outgoing: Outgoing { message, .. }, .. } in ready {
        let follows = message.key.as_ref().is_some_and(|key| !first.insert((&message.topic, key)));
        outcomes.push(if follows && certain { Outcome::Held } else { failure.clone() });
    }
    outcomes
}

impl Broker {
    /// Splits what can be stored from what is answered at once. `None` waits for the transaction.
    pub(super) fn sort(&self, batch: Vec<Outgoing>) -> (Vec<Option<Outcome>>, Vec<Ready>) {
        let mut outcomes = Vec::with_capacity(batch.len());
        let mut ready = Vec::with_capacity(batch.len());
        let mut held: HashSet<(String, String)> = HashSet::new();
        for outgoing in batch {
            let message = &outgoing.message;
            let lane = || message.key.as_ref().map(|key| (message.topic.clone(), key.clone()));
            if !held.is_empty() && lane().is_some_and(|lane| held.contains(&lane)) {
                outcomes.push(Some(Outcome::Held));
                continue;
            }
            match self.check(message) {
                Ok(headers) => {
                    ready.push(Ready { outgoing, headers });
                    outcomes.push(None);
                }
                Err(error) => {
                    held.extend(lane());
                    outcomes.push(Some(Outcome::Rejected { error }));
                }
            }
        }
        (outcomes, ready)
    }

    /// Stores all or nothing.
    async fn store(&self, ready: &[Ready]) -> Result<(), sqlite::Error> {
        let blocks = self.blocks(ready).await?;
        fail::fail_point!("broker::publishing");
        self.inner.file.write(move |connection| append(connection, &blocks)).await?;
        fail::fail_point!("broker::published");
        self.inner.ring();
        Ok(())
    }

    /// What is written of these messages. Made here and not in the transaction: the writer's thread is the one that all share.
    pub(super) async fn blocks(&self, ready: &[Ready]) -> Result<Blocks, sqlite::Error> {
        let topics = self.find_topics(ready).await?;
        let mut blocks = Blocks::new();
        for Ready { outgoing, headers } in ready {
            let message = &outgoing.message;
            let partition = topics[&message.topic].partition(message);
            let blocks = blocks.entry(partition).or_default();
            if blocks.last().is_none_or(Block::is_full) {
                blocks.push(Block::new());
            }
            let block = blocks.last_mut().expect("there is one that is not full");
            block.push(outgoing, headers.as_deref());
        }
        Ok(blocks)
    }

    /// Where the topics of these messages are; those that do not exist yet are created.
    async fn find_topics(&self, ready: &[Ready]) -> Result<HashMap<String, Topic>, sqlite::Error> {
        let mut topics = HashMap::new();
        let mut unknown = Vec::new();
        for Ready { outgoing, .. } in ready {
            let name = &outgoing.message.topic;
            if topics.contains_key(name) || unknown.contains(name) {
                continue;
            }
            match self.inner.recall(name) {
                Some(topic) => drop(topics.insert(name.clone(), topic)),
                None => unknown.push(name.clone()),
            }
        }
        if !unknown.is_empty() {
            let partitions = self.inner.config.partitions;
            let find = move |connection: &Connection| -> Result<Vec<(String, Topic)>, sqlite::Error> {
                let found =
                    |name: String| find_or_create(connection, &name, partitions).map(|topic| (name, topic));
                unknown.into_iter().map(found).collect()
            };
            let learned = self.inner.file.write(find).await?;
            topics.extend(learned.iter().cloned());
            self.inner.remember(learned);
        }
        Ok(topics)
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

impl Topic {
    /// All messages of a key are in one partition.
    fn partition(self, message: &Message) -> u32 {
        self.base + partition(message, self.partitions)
    }
}

/// Writes the blocks of one call. The next offsets are read here, because other processes publish too.
pub(super) fn append(connection: &Connection, blocks: &Blocks) -> Result<(), sqlite::Error> {
    let now: i64 = connection
        .prepare_cached("SELECT CAST(unixepoch('subsec') * 1000 AS INTEGER)")?
        .query_row([], |row| row.get(0))?;
    let mut advance = connection
        .prepare_cached("UPDATE broker_partitions SET next = next + ?2 WHERE id = ?1 RETURNING next - ?2")?;
    let mut insert = connection.prepare_cached(
        "INSERT INTO broker_blocks (position, messages, stored_at, data) VALUES (?1, ?2, ?3, ?4)",
    )?;
    for (partition, blocks) in blocks {
        let messages: u32 = blocks.iter().map(|block| block.messages).sum();
        let mut offset: i64 = advance.query_row((partition, messages), |row| row.get(0))?;
        for block in blocks {
            insert.execute((position(*partition, offset), block.messages, now, &block.data))?;
            offset += i64::from(block.messages);
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_nothing_was_stored_only_the_first_of_each_key_failed() {
        let ready = |topic: &str, key: Option<&str>| {
            let message = Message { key: key.map(str::to_owned), ..Message::new(topic, "") };
            Ready { outgoing: Outgoing::new(message, 0), headers: None }
        };
        let batch = [
            ready("orders", Some("a")),
            ready("orders", Some("a")),
            ready("refunds", Some("a")),
            ready("orders", None),
            ready("orders", None),
        ];
        let down = Outcome::Unreachable { error: "full".to_owned() };
        let expected = [down.clone(), Outcome::Held, down.clone(), down.clone(), down.clone()];
        assert_eq!(failed(&batch, &down), expected);
        let unknown = Outcome::Unconfirmed { error: "no answer".to_owned() };
        assert_eq!(failed(&batch, &unknown), vec![unknown; 5]);
    }
}
