//! What a comparison found, for people and programs.

use chrono::{DateTime, Utc};
use message::MessageId;
use serde::Serialize;

/// What the sides say of the messages of a time.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReconcileView {
    /// From when on.
    pub since: DateTime<Utc>,
    /// Up to when.
    pub until: DateTime<Utc>,
    /// Nothing is missing, extra or duplicate, and of everything at least a part of the time could be compared.
    pub agrees: bool,
    /// What was written.
    pub outbox: OutboxCounts,
    /// Each broker.
    pub brokers: Vec<BrokerComparison>,
    /// Each group.
    pub groups: Vec<GroupComparison>,
}

/// What the store has of the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OutboxCounts {
    /// Messages written, and still kept.
    pub written: u64,
    /// Of these, sent.
    pub sent: u64,
    /// On their way or waiting for another try.
    pub unsent: u64,
    /// Given up.
    pub dead: u64,
}

/// The store and a broker.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BrokerComparison {
    /// The broker's name.
    pub broker: String,
    /// Where it is.
    pub url: String,
    /// What could not be compared, and why.
    pub notes: Vec<String>,
    /// Each topic that goes there.
    pub topics: Vec<TopicComparison>,
    /// Copies of messages that lie there.
    pub stored: u64,
    /// Sent, and not there.
    pub missing: Difference,
    /// There, and not in the store.
    pub extra: Difference,
    /// There more than once.
    pub duplicate: Difference,
}

/// How much of a topic is compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TopicComparison {
    /// The topic's name.
    pub topic: String,
    /// From when on both sides keep everything: the comparison begins here.
    pub from: DateTime<Utc>,
    /// Whether that is within the time, or nothing was there to compare.
    pub compared: bool,
}

/// What was sent and what a group has done.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupComparison {
    /// The group's name.
    pub group: String,
    /// The broker it listens at.
    pub broker: String,
    /// From when on both sides keep everything: the comparison begins here.
    pub from: DateTime<Utc>,
    /// Whether that is within the time, or nothing was there to compare.
    pub compared: bool,
    /// Messages sent to it.
    pub sent: u64,
    /// Of these, done.
    pub processed: u64,
    /// Kept in its inbox for a later try or a person.
    pub kept: u64,
    /// On their way, and not for long.
    pub waiting: u64,
    /// Not done, and it cannot get them any more.
    pub missing: Difference,
    /// Not done, although later ones are, or for too long.
    pub straggling: Difference,
}

/// Messages of one kind: how many, and the first of them.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    /// How many.
    pub count: u64,
    /// Some of them, the oldest first.
    pub messages: Vec<DifferenceView>,
}

/// A message on which two sides disagree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DifferenceView {
    /// Which.
    pub message_id: MessageId,
    /// Its topic.
    pub topic: String,
    /// When it was written.
    pub written_at: Option<DateTime<Utc>>,
    /// When it was sent.
    pub sent_at: Option<DateTime<Utc>>,
    /// When the broker stored it.
    pub stored_at: Option<DateTime<Utc>>,
    /// What is known of it beside that.
    pub why: Option<&'static str>,
}

impl DifferenceView {
    fn at(&self) -> Option<DateTime<Utc>> {
        self.stored_at.or(self.sent_at).or(self.written_at)
    }
}

impl Difference {
    /// Counts a message, and keeps it while it is among the `show` oldest.
    pub(crate) fn note(&mut self, show: usize, view: impl FnOnce() -> DifferenceView) {
        self.count += 1;
        let view = view();
        let place = self.messages.partition_point(|known| known.at() <= view.at());
        if place < show {
            self.messages.insert(place, view);
            self.messages.truncate(show);
        }
    }
}

impl ReconcileView {
    /// Topics and groups of which nothing could be compared, for people.
    pub fn uncompared(&self) -> Vec<String> {
        let topics = self.brokers.iter().flat_map(|broker| {
            let unknown = broker.topics.iter().filter(|topic| !topic.compared);
            unknown.map(|topic| format!("the topic `{}` in the broker {}", topic.topic, broker.broker))
        });
        let groups = self.groups.iter().filter(|group| !group.compared);
        topics.chain(groups.map(|group| format!("the group {}", group.group))).collect()
    }

    /// How many messages are missing, extra and duplicate.
    pub fn differences(&self) -> [u64; 3] {
        let sum = |count: &dyn Fn(&BrokerComparison) -> u64| self.brokers.iter().map(count).sum::<u64>();
        let by_groups: u64 = self.groups.iter().map(|group| group.missing.count).sum();
        [
            sum(&|broker| broker.missing.count) + by_groups,
            sum(&|broker| broker.extra.count),
            sum(&|broker| broker.duplicate.count),
        ]
    }
}
