//! The messages of a time, each in a few bytes: found by id, marked as they are met.

use chrono::{DateTime, Utc};
use message::MessageId;
use store::Record;
use uuid::Uuid;

/// Groups whose acknowledgements are noted in a line; those of later ones are known by their marks alone.
const NOTED: usize = u32::BITS as usize;

/// The time of what never was.
const NEVER: i64 = i64::MIN;

/// A message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    /// Bytes: they need no more room than they have.
    id: [u8; 16],
    /// Milliseconds.
    written_at: i64,
    sent_at: i64,
    /// A number for its key; 0 without one.
    pub(crate) key: u64,
    pub(crate) topic: u32,
    /// The groups that it is for, and those that have acknowledged it: a bit each.
    asked: u32,
    acknowledged: u32,
    /// Which deliveries lie in the broker: a bit each, the last for all from the 31st on.
    deliveries: u32,
    /// One of them lies there more than once.
    pub(crate) repeated: bool,
}

impl Line {
    /// What the store knows of a message.
    pub(crate) fn of(record: &Record, topic: u32, groups: &[String]) -> Self {
        let bits = |names: &mut dyn Iterator<Item = &str>| {
            names.fold(0, |bits, name| bits | groups.iter().position(|group| group == name).map_or(0, bit))
        };
        // Where nobody need acknowledge it, as on routes that send at most once, all who listen should have it all the same.
        let asked = record.ack_groups.as_ref().filter(|asked| !asked.is_empty());
        Self {
            id: *record.message.id.0.as_bytes(),
            written_at: record.written_at.timestamp_millis(),
            sent_at: record.sent_at.map_or(NEVER, |at| at.timestamp_millis()),
            key: record.message.key.as_deref().map_or(0, |key| number(&record.message.topic, key)),
            topic,
            asked: asked.map_or(u32::MAX, |asked| bits(&mut asked.iter().map(String::as_str))),
            acknowledged: bits(&mut record.acknowledgements.iter().map(|done| done.group.as_str())),
            deliveries: 0,
            repeated: false,
        }
    }

    /// What a broker knows of a message that never was in the store.
    pub(crate) fn past_the_store(id: MessageId, stored_at: DateTime<Utc>, topic: u32) -> Self {
        let at = stored_at.timestamp_millis();
        Self {
            id: *id.0.as_bytes(),
            written_at: at,
            sent_at: at,
            key: 0,
            topic,
            asked: u32::MAX,
            acknowledged: 0,
            deliveries: 0,
            repeated: false,
        }
    }

    pub(crate) fn id(&self) -> MessageId {
        MessageId(Uuid::from_bytes(self.id))
    }

    pub(crate) fn written_at(&self) -> DateTime<Utc> {
        time(self.written_at).unwrap_or_default()
    }

    pub(crate) fn sent_at(&self) -> Option<DateTime<Utc>> {
        time(self.sent_at)
    }

    /// Whether it lies in the broker.
    pub(crate) fn is_there(&self) -> bool {
        self.deliveries != 0
    }

    /// It is for the group of this number.
    pub(crate) fn asks(&self, group: usize) -> bool {
        group >= NOTED || self.asked & bit(group) != 0
    }

    /// The group of this number has acknowledged it.
    pub(crate) fn acknowledged_by(&self, group: usize) -> bool {
        self.acknowledged & bit(group) != 0
    }

    /// One more copy lies in the broker.
    pub(crate) fn meet(&mut self, delivery: u32) {
        let delivery = 1 << delivery.min(u32::BITS - 1);
        self.repeated |= self.deliveries & delivery != 0;
        self.deliveries |= delivery;
    }
}

fn bit(group: usize) -> u32 {
    if group < NOTED { 1 << group } else { 0 }
}

fn time(millis: i64) -> Option<DateTime<Utc>> {
    if millis == NEVER { None } else { DateTime::from_timestamp_millis(millis) }
}

/// A number that two keys hardly share.
fn number(topic: &str, key: &str) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    (topic, key).hash(&mut hasher);
    hasher.finish().max(1)
}

/// All messages of a time, sorted by id.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    lines: Vec<Line>,
    topics: Vec<String>,
}

impl Ledger {
    /// The number of a topic.
    pub(crate) fn topic(&mut self, name: &str) -> u32 {
        let place = self.topics.iter().position(|known| known == name).unwrap_or_else(|| {
            self.topics.push(name.to_owned());
            self.topics.len() - 1
        });
        u32::try_from(place).expect("nobody has four billion topics")
    }

    pub(crate) fn topics(&self) -> &[String] {
        &self.topics
    }

    pub(crate) fn name(&self, topic: u32) -> &str {
        self.topics.get(topic as usize).map_or("", String::as_str)
    }

    /// Adds a message, which [`sort`](Self::sort) puts in its place: nothing is found before.
    pub(crate) fn push(&mut self, line: Line) {
        self.lines.push(line);
    }

    /// Sorts what was added, where it lies. Of two with one id the one that was met stays.
    pub(crate) fn sort(&mut self) {
        self.lines.sort_unstable_by_key(|line| (line.id, !line.is_there(), line.topic));
        self.lines.dedup_by_key(|line| line.id);
    }

    /// Adds messages. One that was met already stays as it is.
    pub(crate) fn add(&mut self, lines: impl IntoIterator<Item = Line>) {
        self.lines.extend(lines);
        self.sort();
    }

    pub(crate) fn lines(&self) -> &[Line] {
        &self.lines
    }

    pub(crate) fn find(&self, id: MessageId) -> Option<usize> {
        self.lines.binary_search_by_key(id.0.as_bytes(), |line| line.id).ok()
    }

    /// A message with this id is in the ledger, of another topic: something that was made of it, or was given up, may have its
    /// id.
    pub(crate) fn is_elsewhere(&self, id: MessageId, topic: u32) -> bool {
        self.find(id).is_some_and(|place| self.lines[place].topic != topic)
    }

    /// A copy of this message lies in the broker. Answers whether the message is in the ledger.
    pub(crate) fn meet(&mut self, id: MessageId, delivery: u32) -> bool {
        let Some(place) = self.find(id) else { return false };
        self.lines[place].meet(delivery);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u128) -> MessageId {
        MessageId(Uuid::from_u128(number))
    }

    #[test]
    fn a_message_needs_no_more_than_64_bytes() {
        assert!(size_of::<Line>() <= 64, "{}", size_of::<Line>());
    }

    #[test]
    fn a_delivery_that_lies_there_twice_is_repeated_and_another_delivery_is_not() {
        let mut ledger = Ledger::default();
        let topic = ledger.topic("orders");
        ledger.add((1..=3).rev().map(|number| Line::past_the_store(id(number), Utc::now(), topic)));
        assert!(ledger.meet(id(1), 0) && ledger.meet(id(1), 1));
        assert!(ledger.meet(id(2), 5) && ledger.meet(id(2), 5));
        assert!(!ledger.meet(id(9), 0), "it is not in the ledger");
        let of = |number| ledger.lines()[ledger.find(id(number)).expect("it is there")];
        assert!(of(1).is_there() && !of(1).repeated);
        assert!(of(2).repeated);
        assert!(!of(3).is_there());
    }

    #[test]
    fn what_is_added_twice_is_one_message() {
        let mut ledger = Ledger::default();
        let topic = ledger.topic("orders");
        ledger.add([Line::past_the_store(id(1), Utc::now(), topic)]);
        ledger.meet(id(1), 0);
        ledger.add([Line::past_the_store(id(1), Utc::now(), topic)]);
        assert_eq!(ledger.lines().len(), 1);
        assert!(ledger.lines()[0].is_there(), "what was met stays met");
    }
}
