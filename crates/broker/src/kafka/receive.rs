//! Receiving as a member of a consumer group.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::DateTime;
use message::{check_group, check_topic};
use rdkafka::consumer::{CommitMode, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers, Message as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::config::{Config, millis};
use super::error::{self, Commit};
use super::member::{Changes, Client, Member, TAKEN_FOR_DEAD};
use super::{Broker, EVENT};
use crate::envelope::{self, Arrived};
use crate::{Delivery, Position, ReceiveError, SubscribeTogether, Subscriber, Subscription};

/// How long a member may take to answer a change in the group while it works on what it has: its heartbeats say that
/// it lives, so this is for a member that hangs.
const MAX_WORK: Duration = Duration::from_secs(1_800);

/// Bytes of payload that one `receive` returns, near enough: five hundred of the largest would fill the memory.
const MAX_BYTES: usize = 8 << 20;

/// Before a commit is tried again that met a group busy with itself.
const PAUSE: Duration = Duration::from_millis(20);

/// What a consumer is told.
fn settings(config: &Config, group: &str) -> ClientConfig {
    let mut client = config.client();
    client.set("group.id", group);
    // Done is what somebody says is done.
    client.set("enable.auto.commit", "false").set("enable.auto.offset.store", "false");
    client.set("auto.offset.reset", "earliest").set("isolation.level", "read_committed");
    client.set("partition.assignment.strategy", "cooperative-sticky");
    client.set("session.timeout.ms", millis(config.session));
    client.set("heartbeat.interval.ms", millis(config.heartbeat));
    client.set("max.poll.interval.ms", millis(MAX_WORK));
    // New partitions of a topic are found by looking.
    client.set("topic.metadata.refresh.interval.ms", "30000");
    // What waits to be received: enough to be quick, little enough to be forgotten.
    client.set("queued.min.messages", "10000").set("queued.max.messages.kbytes", "16384");
    client.set("fetch.queue.backoff.ms", "10").set("fetch.error.backoff.ms", "100");
    client
}

#[async_trait]
impl Subscriber for Broker {
    async fn subscribe(&self, group: &str, topics: &[String]) -> Result<Box<dyn Subscription>, ReceiveError> {
        Ok(Box::new(self.join(group, topics).await?))
    }

    fn together(&self) -> Option<Arc<dyn SubscribeTogether>> {
        Some(Arc::new(self.clone()))
    }
}

impl Broker {
    /// Joins a group.
    pub(super) async fn join(&self, group: &str, topics: &[String]) -> Result<Reader, ReceiveError> {
        let config = &self.inner.config;
        let refuse = |invalid: message::Invalid| ReceiveError::Misconfigured(invalid.to_string());
        if topics.is_empty() {
            let text = format!("the consumer group `{group}` names no topic: name at least one");
            return Err(ReceiveError::Misconfigured(text));
        }
        let named = |name: &str| format!("{}{name}", config.prefix);
        let group = named(group);
        check_group(&group).map_err(refuse)?;
        let mut topics: Vec<String> = topics.iter().map(|topic| named(topic)).collect();
        topics.sort();
        topics.dedup();
        let until = Instant::now() + config.timeout;
        for topic in &topics {
            check_topic(topic).map_err(refuse)?;
            let found = self.inner.topics.find(topic, until).await;
            found.map_err(|trouble| error::receive(trouble.code, trouble.text))?;
        }
        let failed = |failed: KafkaError| ReceiveError::Misconfigured(error::text(&failed));
        let consumer: Client =
            settings(config, &group).create_with_context(Changes::default()).map_err(failed)?;
        consumer.subscribe(&topics.iter().map(String::as_str).collect::<Vec<_>>()).map_err(failed)?;
        let started = Member::start(consumer, topics);
        let (member, left) = started.map_err(|error| ReceiveError::Unreachable(error.to_string()))?;
        Ok(Reader { member, left, after: 0, prefix: config.prefix.clone(), patience: config.timeout })
    }
}

/// A subscription of Kafka.
pub(super) struct Reader {
    pub(super) member: Arc<Member>,
    left: oneshot::Receiver<()>,
    /// The partition that was read last: the next ones come first, so that none waits behind a busy one.
    after: u64,
    prefix: String,
    patience: Duration,
}

#[async_trait]
impl Subscription for Reader {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError> {
        let bell = Arc::clone(&self.member.bell);
        loop {
            let deliveries = self.look(max.max(1), &BTreeSet::new())?;
            if !deliveries.is_empty() {
                return Ok(deliveries);
            }
            // A ring between the look and this is kept for it.
            bell.notified().await;
        }
    }

    async fn acknowledge(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        let until = Instant::now() + self.patience;
        loop {
            let commits = self.member.finishing(positions);
            let Some(consumer) = self.member.consumer().filter(|_| !commits.is_empty()) else {
                return Ok(());
            };
            let list = offsets(&commits).map_err(|failed| ReceiveError::Unreachable(failed.to_string()))?;
            // It waits for the network.
            let answer = tokio::task::spawn_blocking(move || consumer.commit(&list, CommitMode::Sync));
            let answer = tokio::time::timeout_at(until, answer).await;
            let slow =
                || ReceiveError::Unreachable(format!("no answer to a commit within {:?}", self.patience));
            match error::commit(answer.map_err(|_| slow())?.unwrap_or(Err(KafkaError::Canceled))) {
                Commit::Done => {
                    self.member.finished(&commits);
                    return Ok(());
                }
                Commit::Lost => {
                    self.member.end(TAKEN_FOR_DEAD);
                    return Ok(());
                }
                Commit::Again if Instant::now() < until => tokio::time::sleep(PAUSE).await,
                Commit::Again => return Err(slow()),
                Commit::Failed(error) => return Err(error),
            }
        }
    }

    async fn give_back(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        self.member.go_back(positions).map_err(|failed| ReceiveError::Unreachable(failed.to_string()))
    }

    async fn close(mut self: Box<Self>) {
        self.member.close();
        // A broker that is away does not let it leave; it will be missed soon enough.
        drop(tokio::time::timeout(self.patience, &mut self.left).await);
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.member.close();
    }
}

impl Reader {
    /// What has come of other partitions than these, in the order of each partition.
    pub(super) fn look(
        &mut self,
        max: usize,
        without: &BTreeSet<u64>,
    ) -> Result<Vec<Delivery>, ReceiveError> {
        let mut standing = self.member.standing();
        if let Some(trouble) = standing.over.clone().or_else(|| standing.trouble.take()) {
            return Err(trouble);
        }
        let numbers: Vec<u64> =
            standing.held.keys().copied().filter(|number| !without.contains(number)).collect();
        let (before, after): (Vec<_>, Vec<_>) = numbers.into_iter().partition(|number| *number <= self.after);
        let (mut deliveries, mut bytes) = (Vec::new(), 0);
        let mut failed = None;
        for number in after.into_iter().chain(before) {
            let Some(held) = standing.held.get_mut(&number).filter(|held| !held.leaving) else { continue };
            while deliveries.len() < max && bytes < MAX_BYTES {
                let offset = match held.queue.poll(Duration::ZERO) {
                    None => break,
                    Some(Err(error)) => {
                        failed = Some(error);
                        break;
                    }
                    Some(Ok(message)) => {
                        let position = Position { partition: number, offset: message.offset() };
                        let delivery = delivery(&message, &self.prefix, position);
                        bytes += delivery.message.size();
                        deliveries.push(delivery);
                        position.offset
                    }
                };
                held.receive(offset);
                self.after = number;
            }
        }
        drop(standing);
        if let Some(failed) = failed {
            self.member.hear(&failed);
        }
        Ok(deliveries)
    }
}

pub(super) fn offsets(
    commits: &BTreeMap<u64, ((String, i32), i64)>,
) -> Result<TopicPartitionList, KafkaError> {
    let mut list = TopicPartitionList::with_capacity(commits.len());
    for ((topic, partition), next) in commits.values() {
        list.add_partition_offset(topic, *partition, Offset::Offset(*next))?;
    }
    Ok(list)
}

pub(super) fn delivery(message: &BorrowedMessage<'_>, prefix: &str, position: Position) -> Delivery {
    let topic = message.topic();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let arrived = Arrived {
        topic: topic.strip_prefix(prefix).unwrap_or(topic),
        payload: Bytes::copy_from_slice(message.payload().unwrap_or_default()),
        content_type: None,
        key: message.key().map(text),
        fields: fields(message),
        place: format!("{}/{}", message.partition(), message.offset()),
        stored_at: message.timestamp().to_millis().and_then(DateTime::from_timestamp_millis),
    };
    envelope::read(arrived, EVENT, position)
}

/// The headers. rdkafka panics at a name that is not UTF-8, and nobody may stop a group by such a header: it is left out.
fn fields(message: &BorrowedMessage<'_>) -> Vec<(String, String)> {
    let Some(headers) = message.headers() else { return Vec::new() };
    let field = |number: usize| {
        let header = catch_unwind(AssertUnwindSafe(|| headers.try_get(number))).ok().flatten()?;
        let value = String::from_utf8_lossy(header.value.unwrap_or_default()).into_owned();
        Some((header.key.to_owned(), value))
    };
    (0..headers.count()).filter_map(field).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_that_promises_rest_on_are_not_left_to_defaults() {
        let settings = settings(&Config::new("127.0.0.1:9092"), "billing");
        let expected = [
            ("enable.auto.commit", "false"),
            ("enable.auto.offset.store", "false"),
            ("auto.offset.reset", "earliest"),
            ("isolation.level", "read_committed"),
            ("partition.assignment.strategy", "cooperative-sticky"),
            ("session.timeout.ms", "20000"),
            ("heartbeat.interval.ms", "4000"),
        ];
        for (name, value) in expected {
            assert_eq!(settings.get(name), Some(value), "{name}");
        }
        settings.create_native_config().expect("librdkafka takes them");
    }
}
