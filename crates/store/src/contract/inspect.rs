//! For the operator: looking, and mending.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use message::{Message, MessageId, State, Status};

use super::Seq;
use crate::Error;

/// All that is known of a message.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its place in the order of writing.
    pub seq: Seq,
    /// The message.
    pub message: Message,
    /// Where it is in its life.
    pub state: State,
    /// When it was written, by the store's clock.
    pub written_at: DateTime<Utc>,
    /// When it is tried again.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// While it is InFlight: until when its relay may work on it.
    pub locked_until: Option<DateTime<Utc>>,
    /// The last failure.
    pub last_error: Option<String>,
    /// When the broker confirmed it.
    pub sent_at: Option<DateTime<Utc>>,
    /// Why it is Dead.
    pub dead_reason: Option<String>,
    /// It waits behind an earlier message of its key.
    pub held: bool,
    /// The groups that must acknowledge it.
    pub ack_groups: Option<Vec<String>>,
    /// Who has.
    pub acknowledgements: Vec<Acknowledgement>,
}

impl Record {
    /// It is Sent, `group` must acknowledge it, and has not.
    pub fn waits_for(&self, group: &str) -> bool {
        let asked = self.ack_groups.iter().flatten().any(|name| name == group);
        let done = self.acknowledgements.iter().any(|done| done.group == group);
        self.state.status == Status::Sent && asked && !done
    }
}

/// A group said that it is done with a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acknowledgement {
    /// Which group.
    pub group: String,
    /// When, by the store's clock.
    pub at: DateTime<Utc>,
}

/// A try in vain.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// When, by the store's clock.
    pub at: DateTime<Utc>,
    /// What became of it: "failed", "dead" or "released".
    pub outcome: String,
    /// Why.
    pub error: String,
}

/// Something an operator did.
#[derive(Clone, Debug)]
pub struct AuditEntry {
    /// A cursor for paging.
    pub position: i64,
    /// When.
    pub at: DateTime<Utc>,
    /// Who.
    pub actor: String,
    /// What: "requeue", "edit", "discard", "delete" …
    pub action: String,
    /// To which message.
    pub message: Option<MessageId>,
    /// What it was before, and what after, as JSON.
    pub detail: String,
}

/// A key whose later messages wait.
#[derive(Clone, Debug)]
pub struct Hold {
    /// Its topic.
    pub topic: String,
    /// The key.
    pub key: String,
    /// The message that they wait for.
    pub id: Option<MessageId>,
    /// Where that one is.
    pub status: Option<Status>,
}

/// Which messages to show or to act on.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// In one of these; all when empty.
    pub statuses: Vec<Status>,
    /// Of this topic.
    pub topic: Option<String>,
    /// Of this key.
    pub key: Option<String>,
    /// That this group must acknowledge.
    pub group: Option<String>,
    /// That are Sent and that this group has not acknowledged.
    pub unacknowledged_by: Option<String>,
}

/// Which part of a list.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// The `next` of the page before.
    pub after: Option<i64>,
    /// Items at most.
    pub limit: usize,
    /// From the newest to the oldest.
    pub newest_first: bool,
}

/// A part of a list.
#[derive(Clone, Debug)]
pub struct Paged<T> {
    /// The items.
    pub items: Vec<T>,
    /// Where the next page starts; `None` at the end. A page may be short, even empty, and still have a
    /// next one: a call looks at a bounded number of rows.
    pub next: Option<i64>,
}

/// How many messages are where, and what has happened so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Written and not taken.
    pub pending: u64,
    /// In a relay's hands.
    pub in_flight: u64,
    /// Waiting for another attempt.
    pub failed: u64,
    /// Confirmed, and still kept.
    pub sent: u64,
    /// Quarantined now.
    pub dead: u64,
    /// Of the oldest message that is not sent.
    pub oldest_age: Option<Duration>,
    /// Confirmations ever.
    pub publish_success_total: u64,
    /// Tries in vain ever.
    pub publish_failure_total: u64,
    /// Messages that ever became Dead.
    pub dead_total: u64,
    /// Acknowledgements ever.
    pub acknowledged_total: u64,
    /// From writing to confirmation.
    pub write_to_sent: Latency,
    /// From confirmation to acknowledgement.
    pub sent_to_acknowledged: Latency,
}

/// A histogram of waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// How many waits were at most as long as each of [`Latency::BOUNDS`], and, last, longer.
    pub counts: Vec<u64>,
    /// All waits together.
    pub sum: Duration,
}

impl Latency {
    /// The upper bounds in milliseconds.
    pub const BOUNDS: [u64; 14] =
        [1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 5_000, 30_000, 300_000, 3_600_000];

    /// Another wait.
    pub fn note(&mut self, wait: Duration) {
        self.counts.resize(Self::BOUNDS.len() + 1, 0);
        self.counts[Self::bucket(wait)] += 1;
        self.sum += wait;
    }

    /// The index in `counts` for a wait.
    pub fn bucket(wait: Duration) -> usize {
        let millis = wait.as_nanos().div_ceil(1_000_000);
        Self::BOUNDS.iter().position(|bound| millis <= u128::from(*bound)).unwrap_or(Self::BOUNDS.len())
    }
}

/// Looking without touching.
///
/// # Contract
/// 1. No call scans the whole table: lists look at a bounded number of rows, counts are kept as they change.
/// 2. A message in an open batch is InFlight in every answer.
/// 3. `counts` agrees with the records whenever nothing is changing them.
/// 4. A store's identity is made with it, is the same for everybody who opens it, and is no other store's.
/// 5. `unsent` answers, of the messages it is asked for, those that are kept and not Sent, in the order of writing.
#[async_trait]
pub trait Inspect: Send + Sync {
    /// One message.
    async fn record(&self, id: MessageId) -> Result<Option<Record>, Error>;

    /// Messages by the order of writing.
    async fn list(&self, filter: &Filter, page: Page) -> Result<Paged<Record>, Error>;

    /// The tries in vain of a message, oldest first.
    async fn attempts(&self, id: MessageId) -> Result<Vec<Attempt>, Error>;

    /// Those of these messages that are kept here and not Sent.
    async fn unsent(&self, seqs: &[Seq]) -> Result<Vec<Seq>, Error>;

    /// A name that no other store has, for what is remembered of this one elsewhere.
    async fn identity(&self) -> Result<String, Error>;

    /// How many are where.
    async fn counts(&self) -> Result<Counts, Error>;

    /// Keys whose messages wait behind another.
    async fn holds(&self, limit: usize) -> Result<Vec<Hold>, Error>;

    /// What operators did, newest first.
    async fn audit(&self, page: Page) -> Result<Paged<AuditEntry>, Error>;
}

/// A mended message: what is `None` stays.
#[derive(Clone, Debug, Default)]
pub struct Edit {
    /// The new payload.
    pub payload: Option<Bytes>,
    /// Its media type.
    pub content_type: Option<String>,
    /// The new headers, all of them.
    pub headers: Option<BTreeMap<String, String>>,
}

/// What an acknowledgement did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acknowledged {
    /// It is the group's first.
    New,
    /// The group had acknowledged before.
    Repeated,
    /// There is no such message.
    Unknown,
    /// The message is where no acknowledgement can be: never sent.
    Refused(Status),
    /// The group is not among those that must acknowledge this message.
    NotAsked,
}

/// How long records are kept.
#[derive(Clone, Copy, Debug)]
pub struct Retention {
    /// Sent ones, from when they were sent. Those that somebody must still acknowledge stay.
    pub sent: Duration,
    /// Dead ones, from when they died. Those that hold a key, or wait behind one that does, stay.
    pub dead: Duration,
    /// Idempotency keys and derived ids.
    pub keys: Duration,
    /// What operators did.
    pub audit: Duration,
}

impl Default for Retention {
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(24 * 60 * 60);
        Self { sent: 7 * DAY, dead: 30 * DAY, keys: 7 * DAY, audit: 365 * DAY }
    }
}

/// Mending. Every action is audited in the transaction that does it.
///
/// # Contract
/// 1. What [`message::step`] refuses is refused here and changes nothing.
/// 2. No action touches a message in an open batch.
/// 3. Requeueing or discarding a Dead message that holds a key lets those behind it go, after it, in order.
/// 4. Acknowledging is idempotent, legal for what was or [may have been](message::State::perhaps_sent) sent, and never
///    lost by a settle that follows it.
/// 5. `redeliver` changes what is Sent and not acknowledged by the group, and nothing else. Meanwhile the message can be
///    acknowledged as before.
#[async_trait]
pub trait Amend: Send + Sync {
    /// Sends Dead messages again, each at the front of its key.
    async fn requeue(&self, id: MessageId, actor: &str) -> Result<(), Error>;

    /// Mends a Dead message and sends it again. The original is kept in the audit.
    async fn edit(&self, id: MessageId, edit: &Edit, actor: &str) -> Result<(), Error>;

    /// Gives up a Dead message.
    async fn discard(&self, id: MessageId, actor: &str) -> Result<(), Error>;

    /// Deletes a record that is not InFlight.
    async fn delete(&self, id: MessageId, actor: &str) -> Result<(), Error>;

    /// Records that groups are done with messages. One answer each, in order.
    async fn acknowledge(&self, done: Vec<(MessageId, String)>) -> Result<Vec<Acknowledged>, Error>;

    /// Sends a Sent message again because `group` has not acknowledged it, under a new delivery number; `why` is its last
    /// error from then on. Answers whether it was so.
    async fn redeliver(&self, id: MessageId, group: &str, why: &str) -> Result<bool, Error>;

    /// Removes what is older than `retention`, a bounded number at a time. Answers how many.
    async fn clean(&self, retention: &Retention) -> Result<u64, Error>;
}
