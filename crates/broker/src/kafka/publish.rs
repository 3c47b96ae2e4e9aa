//! Sending a batch: everything at once, a report for each message, and nothing after the call has ended.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use message::{Invalid, check_topic};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio::time::Instant;

use super::partition::{Spot, Spread};
use super::producer::{Call, Line, Record, Report, largest};
use super::topics::{Topic, Trouble};
use super::{Broker, Config, EVENT, Inner, error};
use crate::envelope::{self, CONTENT_TYPE, KEY, Wire};
use crate::{Guarantees, Outcome, Outgoing, Publisher, Transactions};

/// Messages of one call at most: a tenth of what librdkafka queues.
const MAX_BATCH: usize = 10_000;

/// How often what a failing producer took with it is sent again within a call.
const ROUNDS: usize = 4;

/// Bytes that Kafka adds to a record and to its batch, and to each header of it.
const FRAME: usize = 128;
const HEADER_FRAME: usize = 10;

#[async_trait]
impl Publisher for Broker {
    fn guarantees(&self) -> Guarantees {
        Guarantees {
            key_order: true,
            ordered_batches: true,
            groups: true,
            fenced: true,
            max_payload: Some(self.inner.config.max_payload),
            max_batch: MAX_BATCH,
            deduplication: None,
            durability: "on all replicas in sync: with three copies and min.insync.replicas=2 it survives the loss of \
                         a server; Kafka flushes to disk later",
            needs: &[
                "replication.factor 3 and min.insync.replicas 2 for each topic",
                "unclean.leader.election.enable false",
                "retention longer than any group may be behind",
            ],
        }
    }

    fn transactions(&self) -> Option<Arc<dyn Transactions>> {
        Some(Arc::new(self.clone()))
    }

    fn once(&self) -> Option<Arc<dyn Publisher>> {
        let config = Config { once: true, ..self.inner.config.clone() };
        let topics = Arc::clone(&self.inner.topics);
        let inner = Inner { config, topics, line: Mutex::default(), fenced: Default::default() };
        Some(Arc::new(Self { inner: Arc::new(inner) }))
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let until = Instant::now() + self.inner.config.timeout;
        let (mut book, mut ready) = self.inner.prepare(&batch, until).await;
        let rounds = if self.inner.config.once { 1 } else { ROUNDS };
        for round in 1..=rounds {
            ready.retain(|ready| book.is_open(ready.place));
            if ready.is_empty() {
                break;
            }
            let sent = self.inner.send(&batch, &ready, until).await;
            let last = round == rounds || Instant::now() >= until;
            self.inner.enter(&mut book, &ready, &sent, last);
        }
        book.close()
    }
}

/// A message that can be sent.
pub(super) struct Ready<'a> {
    /// Its place in the batch.
    pub(super) place: usize,
    wire: Wire<'a>,
    partition: i32,
}

/// What a round of sending came to.
struct Sent {
    reports: Vec<Report>,
    /// What librdkafka complained of.
    said: String,
}

impl Inner {
    pub(super) fn topic(&self, name: &str) -> String {
        format!("{}{name}", self.config.prefix)
    }

    /// What can be sent, and the outcomes of what cannot.
    pub(super) async fn prepare<'a>(
        &self,
        batch: &'a [Outgoing],
        until: Instant,
    ) -> (Book<'a>, Vec<Ready<'a>>) {
        let topics = self.find_all(batch, until).await;
        let mut book = Book::new(batch);
        let mut ready = Vec::with_capacity(batch.len());
        let mut spread = Spread::new();
        for (place, outgoing) in batch.iter().enumerate() {
            if book.is_blocked(place) {
                book.settle(place, Outcome::Held);
                continue;
            }
            match self.write(outgoing, &topics[outgoing.message.topic.as_str()]) {
                Ok((wire, topic)) => {
                    let key = outgoing.message.key.as_deref().map(str::as_bytes);
                    ready.push(Ready { place, wire, partition: spread.choose(key, topic.partitions) });
                }
                Err(outcome) => book.settle(place, outcome),
            }
        }
        (book, ready)
    }

    /// Every topic of the batch, once.
    async fn find_all<'a>(
        &self,
        batch: &'a [Outgoing],
        until: Instant,
    ) -> HashMap<&'a str, Result<Topic, Trouble>> {
        let mut found = HashMap::new();
        for Outgoing { message, .. } in batch {
            if !found.contains_key(message.topic.as_str()) {
                let name = self.topic(&message.topic);
                let topic = match check_topic(&name) {
                    Ok(()) => self.topics.find(&name, until).await,
                    Err(invalid) => Err(Trouble { code: Code::InvalidTopic, text: invalid.to_string() }),
                };
                found.insert(message.topic.as_str(), topic);
            }
        }
        found
    }

    /// Writes a message down, or says why it cannot be sent.
    fn write<'a>(
        &self,
        outgoing: &'a Outgoing,
        topic: &Result<Topic, Trouble>,
    ) -> Result<(Wire<'a>, Topic), Outcome> {
        let rejected = |error: String| Outcome::Rejected { error };
        let message = &outgoing.message;
        let (size, limit) = (message.payload.len(), self.config.max_payload);
        if size > limit {
            return Err(rejected(Invalid::PayloadTooLarge { size, limit }.to_string()));
        }
        let topic = topic.as_ref().map_err(|trouble| error::outcome(trouble.code, trouble.text.clone()))?;
        let mut wire = envelope::wire(outgoing, EVENT);
        // Kafka has a place of its own for it.
        wire.fields.retain(|(name, _)| name != KEY);
        let size = weight(&wire, message.key.as_deref());
        let limit = topic.limit.min(largest(&self.config));
        if size > limit {
            let name = self.topic(&message.topic);
            let text = format!(
                "the message has {size} bytes with its headers, and the topic `{name}` takes {limit}"
            );
            return Err(rejected(format!("{text}: raise its max.message.bytes, or send a reference")));
        }
        if topic.compacted && message.key.is_none() {
            let name = self.topic(&message.topic);
            return Err(rejected(format!("the topic `{name}` is compacted: its messages must have a key")));
        }
        Ok((wire, *topic))
    }

    /// Sends what is ready and waits for the reports.
    async fn send(&self, batch: &[Outgoing], ready: &[Ready<'_>], until: Instant) -> Sent {
        let line = match self.line() {
            Ok(line) => line,
            Err(said) => return Sent { reports: vec![Err(Code::QueueFull); ready.len()], said },
        };
        let call = Call::new(ready.len());
        self.hand_over(&line, &call, batch, ready, until).await;
        let good = line.finish(&call, until).await;
        let said = line.said();
        if !good {
            self.discard(&line);
        }
        Sent { reports: call.reported(), said }
    }

    /// Hands everything that is ready to a producer. What it does not take is settled.
    pub(super) async fn hand_over(
        &self,
        line: &Line,
        call: &Arc<Call>,
        batch: &[Outgoing],
        ready: &[Ready<'_>],
        until: Instant,
    ) {
        let message = |ready: &Ready<'_>| &batch[ready.place].message;
        let mut names: HashMap<&str, String> = HashMap::new();
        for topic in ready.iter().map(|ready| message(ready).topic.as_str()) {
            if !names.contains_key(topic) {
                names.insert(topic, self.topic(topic));
            }
        }
        let spot = |ready: &Ready<'_>| (names[message(ready).topic.as_str()].as_str(), ready.partition);
        let spots: Vec<Spot<'_>> = ready.iter().map(spot).collect();
        let record = |number: usize, ticket| {
            let ((topic, partition), Ready { wire, .. }) = (spots[number], &ready[number]);
            let record =
                Record::with_opaque_to(topic, ticket).partition(partition).payload(&wire.payload[..]);
            let record = record.headers(headers(wire));
            match &message(&ready[number]).key {
                Some(key) => record.key(key.as_bytes()),
                None => record,
            }
        };
        line.hand_over_all(call, &spots, record, until).await;
    }

    /// The producer in use, or another where it failed or batches have to be smaller now.
    pub(super) fn line(&self) -> Result<Arc<Line>, String> {
        let batch = self.topics.batch().min(1_000_000);
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = line.as_ref().filter(|line| line.batch <= batch) {
            return Ok(Arc::clone(line));
        }
        let fresh = Arc::new(Line::new(&self.config, batch).map_err(|failed| error::text(&failed))?);
        *line = Some(Arc::clone(&fresh));
        Ok(fresh)
    }

    /// The next call gets another.
    pub(super) fn discard(&self, dead: &Arc<Line>) {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        if line.as_ref().is_some_and(|line| Arc::ptr_eq(line, dead)) {
            *line = None;
        }
    }

    /// Enters the reports of a round. What failed only because the producer did stays open, unless this was the `last`.
    fn enter(&self, book: &mut Book<'_>, ready: &[Ready<'_>], sent: &Sent, last: bool) {
        let blamed = error::blamed(&sent.reports);
        for (Ready { place, .. }, report) in ready.iter().zip(&sent.reports) {
            let topic = &book.batch[*place].message.topic;
            match report {
                Ok(()) => book.settle(*place, Outcome::Confirmed),
                Err(code) if error::of_the_producer(*code) => {
                    if *code == Code::UnknownPartition {
                        self.topics.forget(&self.topic(topic));
                    }
                    let untried = error::certain(*code) && (book.is_blocked(*place) || last && blamed);
                    if untried {
                        book.settle(*place, Outcome::Held);
                    } else if last || book.is_blocked(*place) {
                        let error =
                            format!("Kafka did not answer within {:?}{}", self.config.timeout, sent.said);
                        book.settle(*place, error::outcome(*code, error));
                    }
                }
                Err(code) => {
                    self.topics.forget(&self.topic(topic));
                    let error = format!("topic `{topic}`: {code}");
                    book.settle(*place, error::outcome(*code, error));
                }
            }
        }
    }
}

/// Bytes of a message within a batch, or a few more.
fn weight(wire: &Wire<'_>, key: Option<&str>) -> usize {
    let fields = wire.fields.iter().map(|(name, value)| name.len() + value.len() + HEADER_FRAME);
    let kind = CONTENT_TYPE.len() + wire.content_type.len() + HEADER_FRAME;
    wire.payload.len() + key.map_or(0, str::len) + fields.sum::<usize>() + kind + FRAME
}

fn headers(wire: &Wire<'_>) -> OwnedHeaders {
    let headers = OwnedHeaders::new_with_capacity(wire.fields.len() + 1);
    let kind = Header { key: CONTENT_TYPE, value: Some(wire.content_type.as_bytes()) };
    let fields = wire.fields.iter().map(|(name, value)| Header { key: name, value: Some(value.as_bytes()) });
    std::iter::once(kind).chain(fields).fold(headers, OwnedHeaders::insert)
}

/// The outcomes of a call as they come in, and where each key stopped.
pub(super) struct Book<'a> {
    batch: &'a [Outgoing],
    outcomes: Vec<Option<Outcome>>,
    stopped: HashMap<(&'a str, &'a str), usize>,
}

impl<'a> Book<'a> {
    fn new(batch: &'a [Outgoing]) -> Self {
        Self { batch, outcomes: vec![None; batch.len()], stopped: HashMap::new() }
    }

    fn lane(&self, place: usize) -> Option<(&'a str, &'a str)> {
        let message = &self.batch[place].message;
        Some((message.topic.as_str(), message.key.as_deref()?))
    }

    pub(super) fn settle(&mut self, place: usize, outcome: Outcome) {
        if outcome != Outcome::Confirmed
            && let Some(lane) = self.lane(place)
        {
            let first = self.stopped.entry(lane).or_insert(place);
            *first = place.min(*first);
        }
        self.outcomes[place] = Some(outcome);
    }

    fn is_open(&self, place: usize) -> bool {
        self.outcomes[place].is_none()
    }

    /// Whether one before it, of its key, was not confirmed.
    fn is_blocked(&self, place: usize) -> bool {
        !self.stopped.is_empty()
            && self
                .lane(place)
                .is_some_and(|lane| self.stopped.get(&lane).is_some_and(|first| *first < place))
    }

    pub(super) fn close(self) -> Vec<Outcome> {
        let unknown = || Outcome::Unconfirmed { error: "Kafka gave no report of it".to_owned() };
        self.outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(unknown)).collect()
    }
}

#[cfg(test)]
mod tests {
    use message::Message;

    use super::*;

    fn outgoing(key: &str, seq: i64) -> Outgoing {
        Outgoing::new(Message::new("orders", "1").key(key), seq)
    }

    #[test]
    fn a_key_stops_after_its_first_failure_and_not_before_it() {
        let batch = [outgoing("a", 0), outgoing("a", 1), outgoing("b", 2), outgoing("a", 3)];
        let mut book = Book::new(&batch);
        book.settle(1, Outcome::Rejected { error: "no".to_owned() });
        let blocked: Vec<_> = (0..4).map(|place| book.is_blocked(place)).collect();
        assert_eq!(blocked, [false, false, false, true]);
        assert!(book.is_open(0));
        let closed = book.close();
        assert!(matches!(closed[0], Outcome::Unconfirmed { .. }), "nobody spoke of it: {closed:?}");
    }

    #[test]
    fn a_message_weighs_no_less_than_kafka_says() {
        let message = Message::new("orders", vec![0; 100]).key("k").header("a", "b");
        let outgoing = Outgoing::new(message, 1);
        let wire = envelope::wire(&outgoing, EVENT);
        let bare: usize = wire.fields.iter().map(|(name, value)| name.len() + value.len()).sum();
        // A record of version 2: 61 bytes of batch, at most 5 for each of 7 numbers, 10 for the lengths of a header.
        assert!(weight(&wire, Some("k")) >= 100 + 1 + bare + 61 + 35);
    }
}
