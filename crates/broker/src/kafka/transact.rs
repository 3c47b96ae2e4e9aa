//! Transactions: a batch and the note of it, committed together.
//!
//! Each line (a lane of a store) has a transactional id of its own. Who takes it over makes Kafka end whatever was open
//! under that id, one way or the other, and refuse its former owner from then on. Then the last note that was committed
//! says what is in the log. Notes are in a compacted topic, one for each line, and lines have a partition of their own
//! as far as there are enough.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rdkafka::Message as _;
use rdkafka::client::{Client, ClientContext};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::producer::Producer;
use rdkafka::types::RDKafkaErrorCode as Code;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio::time::Instant;

use super::client::Aside;
use super::producer::{Call, Line as Sender, Record};
use super::topics::{NOTE_PARTITIONS, rest};
use super::{Broker, Inner, error};
use crate::{Line, Outcome, Outgoing, SendTogether, TakenOver, Transactions, WriteNote};

/// The topic of notes.
const NOTES: &str = "postrider-notes";

/// Between two looks at how far others have committed.
const PAUSE: Duration = Duration::from_millis(5);

/// Notes that are read at first, from the end; if none of them is the line's, all are.
const LAST: i64 = 32;

#[async_trait]
impl Transactions for Broker {
    async fn take_over(&self, line: &Line) -> Result<TakenOver, Outcome> {
        let inner = Arc::clone(&self.inner);
        let until = Instant::now() + inner.config.timeout;
        let notes = inner.topic(NOTES);
        let found = inner.topics.find_notes(&notes, until).await;
        found.map_err(|trouble| error::outcome(trouble.code, trouble.text))?;
        let name = format!("{}{}.{}.{}", inner.config.prefix, line.store, line.broker, line.lane);
        let failed = |failed: KafkaError| {
            let error = format!("no transaction can be had from Kafka: {}", error::text(&failed));
            match error::outcome(error::code(&failed), error) {
                // Nothing was sent.
                Outcome::Unconfirmed { error } => Outcome::Unreachable { error },
                outcome => outcome,
            }
        };
        let batch = inner.topics.batch().min(1_000_000);
        let id = format!("postrider.{name}");
        let sender = Arc::new(Sender::transactional(&inner.config, batch, &id).map_err(failed)?);
        let begun = sender.step(move |producer| producer.init_transactions(rest(until)), until).await;
        begun.map_err(failed)?;
        let reader =
            Reader { client: inner.config.client(), topic: notes, key: name, lane: line.lane, until };
        let admin = inner.topics.admin();
        let read = tokio::task::spawn_blocking(move || {
            loop {
                let read = reader.partition(admin.inner()).and_then(|partition| {
                    let note = reader.read(partition)?;
                    Ok((partition, note))
                });
                match read {
                    // The topic was made a moment ago, and not everybody has heard of it.
                    Err(failed) if unsettled(&failed) && Instant::now() < reader.until => {
                        std::thread::sleep(PAUSE);
                    }
                    read => return read.map(|(partition, note)| (note, reader, partition)),
                }
            }
        });
        let (note, Reader { topic, key, .. }, partition) =
            read.await.unwrap_or(Err(KafkaError::Canceled)).map_err(failed)?;
        let sender = Together { inner, sender, notes: topic, key, partition, good: true };
        Ok(TakenOver { sender: Box::new(sender), note })
    }
}

/// Reads the last note of a line.
struct Reader {
    client: ClientConfig,
    topic: String,
    key: String,
    lane: u16,
    until: Instant,
}

impl Reader {
    /// The partition of the line, the same for as long as the topic is there.
    fn partition(&self, client: &Client<impl ClientContext>) -> KafkaResult<i32> {
        let metadata = client.fetch_metadata(Some(&self.topic), rest(self.until))?;
        let count = match metadata.topics().first() {
            Some(topic) if topic.error().is_none() && !topic.partitions().is_empty() => {
                topic.partitions().len()
            }
            _ => return Err(KafkaError::MetadataFetch(Code::LeaderNotAvailable)),
        };
        // Partitions that somebody adds change nothing.
        let count = i32::try_from(count).unwrap_or(NOTE_PARTITIONS).min(NOTE_PARTITIONS);
        Ok(i32::from(self.lane) % count)
    }

    /// The last that was committed. Everything of this line is decided by now; of others, transactions may be open, and what
    /// is behind them can be read only when they have ended.
    fn read(&self, partition: i32) -> KafkaResult<Option<Vec<u8>>> {
        let end =
            self.consumer("read_uncommitted")?.fetch_watermarks(&self.topic, partition, rest(self.until))?.1;
        let consumer = self.consumer("read_committed")?;
        let begin = loop {
            let (low, stable) = consumer.fetch_watermarks(&self.topic, partition, rest(self.until))?;
            if stable >= end {
                break low;
            }
            if Instant::now() >= self.until {
                return Err(KafkaError::ConsumerCommit(Code::OperationTimedOut));
            }
            std::thread::sleep(PAUSE);
        };
        let near = (end - LAST).max(begin);
        match self.last(&consumer, partition, near, end)? {
            None if near > begin => self.last(&consumer, partition, begin, end),
            found => Ok(found),
        }
    }

    fn consumer(&self, isolation: &str) -> KafkaResult<Aside<BaseConsumer>> {
        let mut client = self.client.clone();
        client.set("group.id", "postrider-notes").set("enable.auto.commit", "false");
        client.set("isolation.level", isolation).set("enable.partition.eof", "true");
        client.set("auto.offset.reset", "error");
        Ok(Aside::new(client.create()?))
    }

    /// The last note of the line between two offsets.
    fn last(
        &self,
        consumer: &BaseConsumer,
        partition: i32,
        from: i64,
        end: i64,
    ) -> KafkaResult<Option<Vec<u8>>> {
        let mut last = None;
        if from >= end {
            return Ok(last);
        }
        let mut assignment = TopicPartitionList::new();
        assignment.add_partition_offset(&self.topic, partition, Offset::Offset(from))?;
        consumer.assign(&assignment)?;
        loop {
            match consumer.poll(rest(self.until)) {
                Some(Ok(record)) if record.offset() >= end => return Ok(last),
                Some(Ok(record)) => {
                    if record.key() == Some(self.key.as_bytes()) {
                        last = record.payload().map(<[u8]>::to_vec);
                    }
                }
                Some(Err(KafkaError::PartitionEOF(_))) => {
                    // A new leader may be behind for a moment.
                    let (_, stable) = consumer.fetch_watermarks(&self.topic, partition, rest(self.until))?;
                    if stable >= end {
                        return Ok(last);
                    }
                }
                Some(Err(failed)) => return Err(failed),
                None => return Err(KafkaError::MessageConsumption(Code::OperationTimedOut)),
            }
        }
    }
}

/// Whether servers do not agree yet on who has a partition.
fn unsettled(failed: &KafkaError) -> bool {
    matches!(
        error::code(failed),
        Code::NotLeaderForPartition
            | Code::LeaderNotAvailable
            | Code::UnknownTopicOrPartition
            | Code::UnknownPartition
    )
}

/// A line in our hands.
struct Together {
    inner: Arc<Inner>,
    sender: Arc<Sender>,
    notes: String,
    key: String,
    partition: i32,
    good: bool,
}

#[async_trait]
impl SendTogether for Together {
    async fn publish(&mut self, batch: Vec<Outgoing>, note: WriteNote<'_>) -> Vec<Outcome> {
        let until = Instant::now() + self.inner.config.timeout;
        let inner = Arc::clone(&self.inner);
        let (mut book, ready) = inner.prepare(&batch, until).await;
        if ready.is_empty() {
            return book.close();
        }
        if inner.topics.batch() < self.sender.batch {
            // A topic takes only smaller batches than this producer makes: another is made.
            self.good = false;
            for (place, _) in ready {
                book.settle(place, Outcome::Held);
            }
            return book.close();
        }
        let places: Vec<usize> = ready.iter().map(|(place, _)| *place).collect();
        let note = note(&places);
        // Until it is known how this ends, nothing else may begin.
        self.good = false;
        if let Err(failed) = self.sender.step(|producer| producer.begin_transaction(), until).await {
            let error = format!("no transaction can be begun: {}", error::text(&failed));
            for place in places {
                book.settle(place, Outcome::Unreachable { error: error.clone() });
            }
            return book.close();
        }
        fail::fail_point!("kafka::begun");
        // The note is the last of the call.
        let call = Call::new(ready.len() + 1);
        inner.hand_over(&self.sender, &call, &batch, &ready, until).await;
        let record = Record::with_opaque_to(&self.notes, call.ticket(ready.len()))
            .partition(self.partition)
            .key(self.key.as_bytes())
            .payload(&note);
        if let Err(code) = self.sender.hand_over(record, until).await {
            call.settle(ready.len(), Err(code));
        }
        fail::fail_point!("kafka::sent");
        let whole = self.sender.finish(&call, until).await;
        let reports = call.reported();
        let ended = match whole && reports.iter().all(Result::is_ok) {
            true => self.commit(until).await,
            false => Ok(self.abort(until, self.sender.said()).await),
        };
        let noted = reports[ready.len()].map_err(|code| failed(code, &self.notes));
        if noted.is_err() {
            inner.topics.forget(&self.notes);
        }
        for ((place, _), report) in ready.iter().zip(&reports) {
            let topic = inner.topic(&batch[*place].message.topic);
            if report.is_err_and(|code| !error::of_the_producer(code)) {
                inner.topics.forget(&topic);
            }
            book.settle(*place, outcome(*report, &ended, &noted, &topic));
        }
        book.close()
    }

    fn is_good(&self) -> bool {
        self.good
    }
}

/// How a transaction ended, where that is known.
enum End {
    Committed,
    Aborted(String),
}

/// What failed was not stored, or will not be seen.
fn failed(code: Code, topic: &str) -> Outcome {
    match error::outcome(code, format!("topic `{topic}`: {code}")) {
        Outcome::Unconfirmed { error } => Outcome::Unreachable { error },
        outcome => outcome,
    }
}

/// What a message of a transaction is told, whose note was stored or not.
fn outcome(
    report: Result<(), Code>,
    ended: &Result<End, String>,
    noted: &Result<(), Outcome>,
    topic: &str,
) -> Outcome {
    match (ended, report, noted) {
        (Ok(End::Committed), ..) => Outcome::Confirmed,
        (Ok(End::Aborted(_)), Err(code), _) if !error::of_the_producer(code) => failed(code, topic),
        (Ok(End::Aborted(said)), Err(_), _) => {
            Outcome::Unreachable { error: format!("Kafka did not take the transaction{said}") }
        }
        (Ok(End::Aborted(_)), Ok(()), Err(note)) => note.clone(),
        // It is for another that failed that it is sent again.
        (Ok(End::Aborted(_)), Ok(()), Ok(())) => Outcome::Held,
        (Err(error), ..) => Outcome::Unconfirmed { error: error.clone() },
    }
}

impl Together {
    async fn commit(&mut self, until: Instant) -> Result<End, String> {
        fail::fail_point!("kafka::committing");
        let committed =
            self.sender.step(move |producer| producer.commit_transaction(rest(until)), until).await;
        match committed {
            Ok(()) => {
                fail::fail_point!("kafka::committed");
                self.good = true;
                Ok(End::Committed)
            }
            Err(KafkaError::Transaction(error)) if error.txn_requires_abort() => {
                Ok(self.abort(until, format!(": {error}")).await)
            }
            Err(failed) => Err(format!("whether Kafka committed is not known: {}", error::text(&failed))),
        }
    }

    /// What was never committed is not in the log, whether Kafka hears of the end or not.
    async fn abort(&mut self, until: Instant, why: String) -> End {
        // What is left of the call may be nothing.
        let until = until.max(Instant::now() + self.inner.config.timeout / 4);
        let aborted = self.sender.step(move |producer| producer.abort_transaction(rest(until)), until).await;
        self.good = aborted.is_ok();
        End::Aborted(why)
    }
}
