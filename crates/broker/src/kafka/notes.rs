//! What senders of transactions keep in Kafka of themselves: who took which lanes, and what was sent.
//!
//! ```text
//!  partition 0   claims   line/lane/sender/number   where its notes are; there while it may send of that lane
//!  the others    notes    sender.half               the note of its last transaction, committed with it
//! ```
//!
//! It is one compacted topic. Claims are in no transaction: their order is that of the log, and whoever wrote one sees
//! all that were written before. A sender that takes a lane again writes another claim: the end of the old one may come
//! late.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rdkafka::Message as _;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::BorrowedMessage;
use rdkafka::types::RDKafkaErrorCode as Code;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio::time::Instant;
use uuid::Uuid;

use super::client::Aside;
use super::partition::Spot;
use super::producer::{Call, Record};
use super::topics::rest;
use super::{Inner, error};
use crate::{Line, Outcome};

/// The topic.
const NOTES: &str = "postrider-notes";

/// Where the claims are.
const CLAIMS: i32 = 0;

/// Between two looks at how far others have committed.
const PAUSE: Duration = Duration::from_millis(5);

/// Notes that are read at first, from the end; as long as none is the sender's, eight times as many before them.
const LAST: i64 = 64;

/// The notes and claims of a line.
#[derive(Clone)]
pub(super) struct Notes {
    client: ClientConfig,
    pub(super) topic: String,
    /// Partitions that it has.
    count: i32,
    line: String,
}

/// A record of the topic: where, its key, and what it says; nothing takes it out.
type Entry = (i32, String, Option<String>);

/// Another sender.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Other {
    /// Where its notes are.
    partition: i32,
    /// Its claims.
    pub(super) claims: BTreeSet<Claim>,
}

/// A lane, and which claim of its sender on any lane it is.
pub(super) type Claim = (u16, u32);

impl Notes {
    /// Looks the topic up, and makes it if it is missing and may be made.
    pub(super) async fn find(inner: &Inner, line: &Line, until: Instant) -> Result<Self, Outcome> {
        let topic = inner.topic(NOTES);
        let found = inner.topics.find_notes(&topic, until).await;
        let count = found.map_err(|trouble| error::outcome(trouble.code, trouble.text))?;
        let line = format!("{}{}.{}", inner.config.prefix, line.store, line.broker);
        Ok(Self { client: inner.config.client(), topic, count, line })
    }

    /// Under which id a half of a sender begins transactions.
    pub(super) fn transactional_id(&self, sender: Uuid, half: usize) -> String {
        format!("postrider.{}.{}", self.line, self.key(sender, half))
    }

    /// The key of its notes.
    pub(super) fn key(&self, sender: Uuid, half: usize) -> String {
        format!("{sender}.{half}")
    }

    /// Where the notes of a new sender are.
    pub(super) fn partition(&self, sender: Uuid) -> i32 {
        match self.count.unsigned_abs() {
            0 | 1 => CLAIMS,
            count => 1 + (sender.as_u128() % u128::from(count - 1)) as i32,
        }
    }

    /// That `sender` may send of a lane.
    pub(super) fn claim(&self, claim: Claim, sender: Uuid) -> Entry {
        let (partition, key, _) = self.no_claim(claim, sender);
        (partition, key, Some(self.partition(sender).to_string()))
    }

    /// That it may not any more, by this claim.
    pub(super) fn no_claim(&self, (lane, number): Claim, sender: Uuid) -> Entry {
        (CLAIMS, format!("{}/{lane}/{sender}/{number}", self.line), None)
    }

    /// That nobody has to read its notes any more.
    pub(super) fn no_notes(&self, sender: Uuid, other: &Other) -> [Entry; 2] {
        [0, 1].map(|half| (other.partition, self.key(sender, half), None))
    }

    /// Writes what is in no transaction.
    pub(super) async fn keep(&self, inner: &Inner, entries: &[Entry], until: Instant) -> Result<(), Outcome> {
        let line = inner.line().map_err(|error| Outcome::Unreachable { error })?;
        let call = Call::new(entries.len());
        let spots: Vec<Spot<'_>> = entries.iter().map(|(partition, ..)| (&*self.topic, *partition)).collect();
        let record = |number: usize, ticket| {
            let (partition, key, value) = &entries[number];
            let record =
                Record::with_opaque_to(&self.topic, ticket).partition(*partition).key(key.as_bytes());
            match value {
                Some(value) => record.payload(value.as_bytes()),
                None => record,
            }
        };
        line.hand_over_all(&call, &spots, record, until).await;
        if !line.finish(&call, until).await {
            inner.discard(&line);
        }
        match call.reported().into_iter().find_map(Result::err) {
            None => Ok(()),
            Some(code) => {
                inner.topics.forget(&self.topic);
                Err(error::outcome(code, format!("topic `{}`: {code}", self.topic)).before_sending())
            }
        }
    }

    /// Who else had claimed one of the lanes when `sender` made these `claims`, each with all its claims of now.
    pub(super) async fn others(
        &self,
        sender: Uuid,
        claims: &[Claim],
        until: Instant,
    ) -> Result<BTreeMap<Uuid, Other>, Outcome> {
        let claims: BTreeSet<Claim> = claims.iter().copied().collect();
        let read = move |notes: &Self| loop {
            let consumer = notes.consumer("read_uncommitted")?;
            let (begin, end) = consumer.fetch_watermarks(&notes.topic, CLAIMS, rest(until))?;
            let mut book = Claims::new(sender);
            notes.scan(&consumer, CLAIMS, begin..end, until, |record| {
                if let Some((claim, claimant)) = record.key().and_then(|key| notes.read_claim(key)) {
                    let partition = record.payload().and_then(|text| str::from_utf8(text).ok()?.parse().ok());
                    book.read(claim, claimant, partition);
                }
            })?;
            if claims.iter().all(|claim| book.before.contains_key(claim)) {
                return Ok(book.others(&claims));
            }
            // A new leader may be behind for a moment.
            if Instant::now() >= until {
                return Err(KafkaError::MessageConsumption(Code::OperationTimedOut));
            }
            std::thread::sleep(PAUSE);
        };
        self.look(until, read).await
    }

    fn read_claim(&self, key: &[u8]) -> Option<(Claim, Uuid)> {
        let rest = str::from_utf8(key).ok()?.strip_prefix(&self.line)?.strip_prefix('/')?;
        let (lane, rest) = rest.split_once('/')?;
        let (sender, number) = rest.split_once('/')?;
        Some(((lane.parse().ok()?, number.parse().ok()?), sender.parse().ok()?))
    }

    /// The last notes of a sender that is fenced: all of its transactions are decided.
    pub(super) async fn last(
        &self,
        sender: Uuid,
        other: &Other,
        until: Instant,
    ) -> Result<Vec<Vec<u8>>, Outcome> {
        let (partition, keys) = (other.partition, [0, 1].map(|half| self.key(sender, half)));
        let read = move |notes: &Self| {
            let all = notes.consumer("read_uncommitted")?;
            let (_, end) = all.fetch_watermarks(&notes.topic, partition, rest(until))?;
            let consumer = notes.consumer("read_committed")?;
            // Of others, transactions may be open, and what is behind them can be read only when they have ended.
            let begin = loop {
                let (begin, stable) = consumer.fetch_watermarks(&notes.topic, partition, rest(until))?;
                if stable >= end {
                    break begin;
                }
                if Instant::now() >= until {
                    return Err(KafkaError::MessageConsumption(Code::OperationTimedOut));
                }
                std::thread::sleep(PAUSE);
            };
            let (mut to, mut count) = (end, LAST);
            let mut last: [Option<Vec<u8>>; 2] = [None, None];
            while to > begin && last.iter().any(Option::is_none) {
                let from = begin.max(to - count);
                let mut found = [None, None];
                notes.scan(&consumer, partition, from..to, until, |record| {
                    if let Some(half) = keys.iter().position(|key| record.key() == Some(key.as_bytes())) {
                        found[half] = record.payload().map(<[u8]>::to_vec);
                    }
                })?;
                for (last, found) in last.iter_mut().zip(found) {
                    // What was found before is later.
                    *last = last.take().or(found);
                }
                (to, count) = (from, count * 8);
            }
            Ok(last.into_iter().flatten().collect())
        };
        self.look(until, read).await
    }

    fn consumer(&self, isolation: &str) -> KafkaResult<Aside<BaseConsumer>> {
        let mut client = self.client.clone();
        client.set("group.id", "postrider-notes").set("enable.auto.commit", "false");
        client.set("isolation.level", isolation).set("enable.partition.eof", "true");
        // The end of a partition is told when a fetch comes back with nothing.
        client.set("auto.offset.reset", "error").set("fetch.wait.max.ms", "10");
        Ok(Aside::new(client.create()?))
    }

    /// Shows what is between two offsets.
    fn scan(
        &self,
        consumer: &BaseConsumer,
        partition: i32,
        offsets: std::ops::Range<i64>,
        until: Instant,
        mut see: impl FnMut(&BorrowedMessage<'_>),
    ) -> KafkaResult<()> {
        if offsets.is_empty() {
            return Ok(());
        }
        let mut assignment = TopicPartitionList::new();
        assignment.add_partition_offset(&self.topic, partition, Offset::Offset(offsets.start))?;
        consumer.assign(&assignment)?;
        loop {
            match consumer.poll(rest(until)) {
                Some(Ok(record)) if record.offset() >= offsets.end => return Ok(()),
                Some(Ok(record)) => {
                    see(&record);
                    if record.offset() + 1 == offsets.end {
                        return Ok(());
                    }
                }
                Some(Err(KafkaError::PartitionEOF(_))) => {
                    // A new leader may be behind for a moment.
                    let (_, end) = consumer.fetch_watermarks(&self.topic, partition, rest(until))?;
                    if end >= offsets.end {
                        return Ok(());
                    }
                }
                Some(Err(failed)) => return Err(failed),
                None => return Err(KafkaError::MessageConsumption(Code::OperationTimedOut)),
            }
        }
    }

    /// Looks at Kafka on a thread that may wait.
    async fn look<T: Send + 'static>(
        &self,
        until: Instant,
        look: impl Fn(&Self) -> KafkaResult<T> + Send + 'static,
    ) -> Result<T, Outcome> {
        let notes = self.clone();
        let looked = tokio::task::spawn_blocking(move || {
            loop {
                match look(&notes) {
                    // The topic was made a moment ago, and not everybody has heard of it.
                    Err(failed) if unsettled(&failed) && Instant::now() < until => std::thread::sleep(PAUSE),
                    looked => return looked,
                }
            }
        });
        looked.await.unwrap_or(Err(KafkaError::Canceled)).map_err(|failed| unavailable(&failed))
    }
}

/// The claims of a line, as they are read.
struct Claims {
    sender: Uuid,
    /// Of everybody else, and where their notes are.
    now: BTreeMap<(Uuid, Claim), i32>,
    /// By claim of `sender`, who else had claimed the lane before.
    before: BTreeMap<Claim, BTreeMap<Uuid, i32>>,
}

impl Claims {
    fn new(sender: Uuid) -> Self {
        Self { sender, now: BTreeMap::new(), before: BTreeMap::new() }
    }

    /// A claim, or its end.
    fn read(&mut self, claim: Claim, claimant: Uuid, partition: Option<i32>) {
        match (claimant == self.sender, partition) {
            (true, Some(_)) => {
                let others = self.now.iter().filter(|((_, (lane, _)), _)| *lane == claim.0);
                let others = others.map(|((other, _), partition)| (*other, *partition));
                self.before.insert(claim, others.collect());
            }
            (true, None) => drop(self.before.remove(&claim)),
            (false, Some(partition)) => drop(self.now.insert((claimant, claim), partition)),
            (false, None) => drop(self.now.remove(&(claimant, claim))),
        }
    }

    /// Who had claimed before these, with all claims of theirs.
    fn others(&self, claims: &BTreeSet<Claim>) -> BTreeMap<Uuid, Other> {
        let mut others: BTreeMap<Uuid, Other> = BTreeMap::new();
        for (other, partition) in claims.iter().flat_map(|claim| &self.before[claim]) {
            others.entry(*other).or_default().partition = *partition;
        }
        for (other, claim) in self.now.keys() {
            if let Some(other) = others.get_mut(other) {
                other.claims.insert(*claim);
            }
        }
        others
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

/// What messages are told that wait for transactions.
pub(super) fn unavailable(failed: &KafkaError) -> Outcome {
    let error = format!("no transaction can be had from Kafka: {}", error::text(failed));
    error::outcome(error::code(failed), error).before_sending()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_who_took_a_lane_before_are_known_and_those_after_or_gone_are_not() {
        let [me, gone, open, later] = [1, 2, 3, 4].map(Uuid::from_u128);
        let mut claims = Claims::new(me);
        for (claim, claimant, partition) in [
            ((0, 0), gone, Some(7)),
            ((0, 0), open, Some(8)),
            ((0, 0), gone, None),
            ((0, 0), me, Some(9)),
            ((0, 0), me, None),
            ((0, 1), me, Some(9)),
            ((1, 2), me, Some(9)),
            ((0, 0), later, Some(7)),
            ((5, 1), open, Some(8)),
        ] {
            claims.read(claim, claimant, partition);
        }
        let others = claims.others(&BTreeSet::from([(0, 1), (1, 2)]));
        let claims = BTreeSet::from([(0, 0), (5, 1)]);
        assert_eq!(others, BTreeMap::from([(open, Other { partition: 8, claims })]));
    }
}
