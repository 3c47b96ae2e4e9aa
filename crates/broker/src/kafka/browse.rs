//! Reading partitions beside their groups: they are assigned by hand, and no offset is ever committed.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{DateTime, TimeDelta, Utc};
use message::MessageId;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::Message as _;
use rdkafka::types::RDKafkaErrorCode as Code;
use rdkafka::{Offset, TopicPartitionList};
use tokio::sync::mpsc;

use super::client::Aside;
use super::config::Config;
use super::receive::delivery;
use super::{Broker, error};
use crate::{Browse, Position, ReceiveError, See, Seen, Span};

/// Messages that are told at a time.
const CHUNK: usize = 1_000;

/// Records stand in the order in which they were stored, and their times nearly so: producers have clocks of their own.
const DISORDER: TimeDelta = TimeDelta::minutes(1);

/// Between two looks at whether somebody still listens.
const TICK: Duration = Duration::from_millis(100);

/// librdkafka polls no consumer without the name of a group. Nobody joins it and nothing is committed for it, so Kafka
/// never hears of it.
const GROUP: &str = "postrider-reconcile";

#[async_trait]
impl Browse for Broker {
    async fn browse(
        &self,
        topic: &str,
        span: Span,
        see: See<'_>,
    ) -> Result<Option<DateTime<Utc>>, ReceiveError> {
        let name = format!("{}{topic}", self.inner.config.prefix);
        let (tell, mut told) = mpsc::channel::<Vec<Seen>>(4);
        let reading = Reading { config: self.inner.config.clone(), name: name.clone(), span, tell };
        // It waits for the network.
        let reading = tokio::task::spawn_blocking(move || reading.read());
        while let Some(seen) = told.recv().await {
            seen.into_iter().for_each(&mut *see);
        }
        let failed = |failed: KafkaError| error::receive(error::code(&failed), error::text(&failed));
        let kept = reading.await.unwrap_or(Err(KafkaError::Canceled)).map_err(failed)?;
        if kept.is_empty() {
            return Ok(None);
        }
        let settings = self.settings(&name, self.inner.config.timeout).await.unwrap_or_default();
        let now = Utc::now();
        if settings.get("cleanup.policy").is_some_and(|policy| policy.contains("compact")) {
            // Then what is removed is anywhere.
            return Ok(Some(now));
        }
        let promised = now - retention(&settings);
        let since = kept.into_iter().filter_map(|kept| match kept {
            Kept::Whole => None,
            Kept::Since(time) => Some(promised.min(time)),
            Kept::Nothing => Some(promised),
        });
        Ok(since.max())
    }
}

/// What is left of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    /// All that was ever stored.
    Whole,
    /// What was stored from this moment on.
    Since(DateTime<Utc>),
    /// Nothing that tells since when.
    Nothing,
}

/// How long a topic keeps a record at least; nothing where its size decides.
fn retention(settings: &HashMap<String, String>) -> TimeDelta {
    let number = |setting: &str| settings.get(setting).and_then(|value| value.parse::<i64>().ok());
    let deletes = settings.get("cleanup.policy").is_some_and(|policy| policy == "delete");
    match (number("retention.ms"), number("retention.bytes")) {
        (Some(millis @ 0..), Some(..0)) if deletes => TimeDelta::milliseconds(millis),
        _ => TimeDelta::zero(),
    }
}

/// One reading of a topic.
struct Reading {
    config: Config,
    name: String,
    span: Span,
    tell: mpsc::Sender<Vec<Seen>>,
}

/// A partition that is read.
struct Part {
    /// What is read begins and ends here.
    from: i64,
    end: i64,
    /// The oldest that is kept.
    low: i64,
    /// When the first record was stored that was met.
    first: Option<i64>,
    done: bool,
}

impl Part {
    fn kept(&self, since: DateTime<Utc>) -> Kept {
        if self.low == 0 {
            return Kept::Whole;
        }
        if self.from > self.low {
            // Older ones than were asked for are there.
            return Kept::Since(since);
        }
        // The one before it may be of the same millisecond.
        let first = self.first.and_then(|first| DateTime::from_timestamp_millis(first + 1));
        first.map_or(Kept::Nothing, Kept::Since)
    }
}

impl Reading {
    fn read(self) -> KafkaResult<Vec<Kept>> {
        let consumer = self.consumer()?;
        let mut parts = self.parts(&consumer)?;
        let mut assignment = TopicPartitionList::new();
        for (partition, part) in parts.iter().filter(|(_, part)| !part.done) {
            assignment.add_partition_offset(&self.name, *partition, Offset::Offset(part.from))?;
        }
        if assignment.count() > 0 {
            consumer.assign(&assignment)?;
            self.follow(&consumer, &mut parts)?;
        }
        Ok(parts.values().map(|part| part.kept(self.span.since)).collect())
    }

    fn consumer(&self) -> KafkaResult<Aside<BaseConsumer>> {
        let mut client = self.config.client();
        client.set("group.id", format!("{}{GROUP}", self.config.prefix));
        client.set("enable.auto.commit", "false").set("enable.auto.offset.store", "false");
        client.set("isolation.level", "read_committed").set("enable.partition.eof", "true");
        // What is removed while this reads is passed over.
        client.set("auto.offset.reset", "earliest");
        client.set("queued.max.messages.kbytes", "16384").set("fetch.wait.max.ms", "10");
        Ok(Aside::new(client.create()?))
    }

    /// The partitions, and what is to be read of each. None of a topic that is not there.
    fn parts(&self, consumer: &BaseConsumer) -> KafkaResult<BTreeMap<i32, Part>> {
        let patience = self.config.timeout;
        let seen = consumer.fetch_metadata(Some(&self.name), patience)?;
        let Some(topic) = seen.topics().first() else { return Ok(BTreeMap::new()) };
        match topic.error().map(Code::from) {
            None => {}
            Some(Code::UnknownTopicOrPartition | Code::UnknownTopic) => return Ok(BTreeMap::new()),
            Some(code) => return Err(KafkaError::MetadataFetch(code)),
        }
        let partitions: Vec<i32> = topic.partitions().iter().map(|partition| partition.id()).collect();
        let begins = self.offsets(consumer, &partitions, self.span.since)?;
        let ends = self.offsets(consumer, &partitions, self.span.until + DISORDER)?;
        let mut parts = BTreeMap::new();
        for partition in partitions {
            let (low, high) = consumer.fetch_watermarks(&self.name, partition, patience)?;
            let at = |offsets: &BTreeMap<i32, i64>| offsets.get(&partition).copied().unwrap_or(high);
            let (from, end) = (at(&begins).max(low), at(&ends).min(high));
            parts.insert(partition, Part { from, end, low, first: None, done: from >= end });
        }
        Ok(parts)
    }

    /// The first offset of each partition that is as late as `time`; none where nothing is.
    fn offsets(
        &self,
        consumer: &BaseConsumer,
        partitions: &[i32],
        time: DateTime<Utc>,
    ) -> KafkaResult<BTreeMap<i32, i64>> {
        let mut times = TopicPartitionList::new();
        let millis = time.timestamp_millis().max(0);
        for partition in partitions {
            times.add_partition_offset(&self.name, *partition, Offset::Offset(millis))?;
        }
        let found = consumer.offsets_for_times(times, self.config.timeout)?;
        let mut offsets = BTreeMap::new();
        for element in found.elements() {
            element.error()?;
            if let Offset::Offset(offset) = element.offset() {
                offsets.insert(element.partition(), offset);
            }
        }
        Ok(offsets)
    }

    /// Reads until all partitions are done, or nobody listens any more.
    fn follow(&self, consumer: &BaseConsumer, parts: &mut BTreeMap<i32, Part>) -> KafkaResult<()> {
        let mut seen = Vec::with_capacity(CHUNK);
        let mut until = Instant::now() + self.config.timeout;
        let span = self.span.since.timestamp_millis()..self.span.until.timestamp_millis();
        while parts.values().any(|part| !part.done) && !self.tell.is_closed() {
            let record = match consumer.poll(TICK) {
                Some(Ok(record)) => record,
                Some(Err(KafkaError::PartitionEOF(partition))) => {
                    parts.entry(partition).and_modify(|part| part.done = true);
                    continue;
                }
                Some(Err(failed)) if !error::passes(error::code(&failed)) => return Err(failed),
                _ if Instant::now() < until => continue,
                _ => return Err(KafkaError::MessageConsumption(Code::OperationTimedOut)),
            };
            until = Instant::now() + self.config.timeout;
            let Some(part) = parts.get_mut(&record.partition()).filter(|part| !part.done) else { continue };
            let time = record.timestamp().to_millis().unwrap_or(0);
            part.first.get_or_insert(time);
            if record.offset() >= part.end - 1 {
                part.done = true;
                let mut enough = TopicPartitionList::new();
                enough.add_partition(&self.name, record.partition());
                consumer.pause(&enough)?;
            }
            if record.offset() < part.end && span.contains(&time) {
                let came = delivery(&record, &self.config.prefix, Position { partition: 0, offset: 0 });
                let stored_at = DateTime::from_timestamp_millis(time).unwrap_or_default();
                let of = came.message.headers.get(Seen::MADE_OF);
                let made = of.is_some_and(|of| of.parse::<MessageId>().is_ok());
                let (id, seq, delivery) = (came.message.id, came.seq, came.delivery);
                seen.push(Seen { id, seq, delivery, stored_at, made });
            }
            if seen.len() == CHUNK {
                // Nobody who listens is no failure.
                let _ = self.tell.blocking_send(std::mem::replace(&mut seen, Vec::with_capacity(CHUNK)));
            }
        }
        let _ = self.tell.blocking_send(seen);
        Ok(())
    }
}
