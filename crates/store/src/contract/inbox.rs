//! For the consuming side: doing the work of a message once.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use message::{Message, MessageId, RetryPolicy};
use uuid::Uuid;

use super::Seq;
use super::inspect::{Page, Paged};
use crate::Error;

/// A message as it came from a broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The message.
    pub message: Message,
    /// Its place in the producer's order, when the broker carried it.
    pub seq: Option<Seq>,
    /// Which deliberate delivery this is.
    pub delivery: u32,
}

/// Work that the store itself can do in the transaction of the mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Nothing but the mark.
    Mark,
    /// One SQL statement with the parameters `:id :topic :type :key :payload :headers :occurred_at :seq :group`.
    Sql(String),
    /// A piece of Lua for a store on Redis, which sees the message in the table `message`: `message.id`, `.topic`,
    /// `.type`, `.key`, `.payload`, `.headers`, `.occurred_at`, `.seq` and `.group`. Redis does not undo what a script
    /// wrote before it failed: it must look before it writes.
    Script(String),
}

/// How a consumer group treats what it receives.
#[derive(Clone, Debug)]
pub struct InboxRules {
    /// The wait between tries, and the number of tries after which a message is Dead.
    pub retry: RetryPolicy,
    /// Later messages of a parked one's key wait behind it.
    pub ordered: bool,
    /// They go on waiting while it is Dead.
    pub hold_dead: bool,
    /// Write the acknowledgement in the same transaction: this store is the producer's too.
    pub acknowledge: bool,
}

impl Default for InboxRules {
    /// Ten tries, order by key, a Dead message holds its key, acknowledged in this store.
    fn default() -> Self {
        Self { retry: RetryPolicy::default(), ordered: true, hold_dead: true, acknowledge: true }
    }
}

/// What a handler says of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handled {
    /// Its work is done.
    Done,
    /// This message failed; try it again after its backoff, or after `after` if that is longer.
    Retry {
        /// Why, for people.
        error: String,
        /// The least wait the handler asked for.
        after: Option<Duration>,
    },
    /// This message can never succeed.
    Dead {
        /// Why, for people.
        error: String,
    },
    /// The handler cannot work at all now: no message is to blame and none spends an attempt.
    Unavailable {
        /// Why, for people.
        error: String,
    },
}

/// What became of an arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Receipt {
    /// Its work and its mark are committed.
    Done,
    /// It had been done before; nothing was done again.
    Duplicate,
    /// It is kept in the inbox for a later try, or behind another of its key: the broker may forget it.
    Parked {
        /// Why.
        error: String,
    },
    /// It is kept in the inbox for a person: the broker may forget it.
    Dead {
        /// Why.
        error: String,
    },
    /// The handler could not work: nothing was kept and the broker must deliver it again.
    Unavailable {
        /// Why.
        error: String,
    },
    /// Another worker is at it: the broker must deliver it again unless that one finishes.
    Busy,
    /// It failed, and nobody keeps it: the broker may forget it. Only [`Forgetful`](crate::Forgetful) says so.
    Lost {
        /// Why.
        error: String,
    },
}

/// The right to work on a message outside the store's transaction, for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reservation {
    /// Work on it and [conclude](Inbox::conclude) with this token.
    Granted(Uuid),
    /// Nothing to do; this is what became of it.
    Settled(Receipt),
}

/// A message kept in the inbox.
#[derive(Clone, Debug)]
pub struct Parked {
    /// The group it is parked for.
    pub group: String,
    /// The message.
    pub arrival: Arrival,
    /// Failures so far.
    pub attempts: u32,
    /// When it is tried again; `None` when it waits behind another of its key, or for a person.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// Waits for a person.
    pub dead: bool,
    /// The last failure.
    pub error: String,
}

/// A message that a group has done.
#[derive(Clone, Debug)]
pub struct Processed {
    /// A cursor for paging.
    pub position: i64,
    /// Which.
    pub id: MessageId,
    /// On which topic it came.
    pub topic: String,
    /// Of which key.
    pub key: Option<String>,
    /// Its place in the producer's order.
    pub seq: Option<Seq>,
    /// When.
    pub processed_at: DateTime<Utc>,
}

/// How a group is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InboxCounts {
    /// Messages done.
    pub processed: u64,
    /// Arrivals recognised as done before.
    pub duplicates: u64,
    /// Messages kept for a later try.
    pub parked: u64,
    /// Messages kept for a person.
    pub dead: u64,
}

/// How much a group remembers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remembered {
    /// Ids that are kept to recognise duplicates.
    pub ids: u64,
    /// The space that they take with their indexes, about; none when the server does not say.
    pub bytes: Option<u64>,
}

/// Doing the work of each message once.
///
/// # Contract
/// 1. Of any number of arrivals of one id in a group, however parallel, one is [`Receipt::Done`]; all later
///    ones are [`Receipt::Duplicate`] for as long as ids are kept.
/// 2. The work, the mark and (with `acknowledge`) the acknowledgement are one transaction: all or none.
/// 3. A message that failed leaves no trace of its work; it is parked with its payload before the broker
///    may forget it, and is tried again when its wait is over.
/// 4. With `ordered`, while a message of a topic and key is parked, later ones of it are parked behind it
///    and are done after it, in order; nobody's [`unpark`](Self::unpark) lets one pass another. In one call of
///    [`process`](Self::process), what follows a `Busy` one of its topic and key is `Busy` too. More than that a reservation
///    does not say of a key: which messages are earlier is known only to who has them in order. Whoever calls brings a
///    message with the earlier ones of its key that are not finished, or after them, and keeps the order of those that one or
///    several [`reserve`](Self::reserve)s grant to it; a broker's partitions see to it that nobody else has them.
/// 5. At the limit of its attempts, or when the handler says so, a message is Dead and stays with its error.
/// 6. `Unavailable` changes nothing: no mark, no attempt.
/// 7. A reservation ends with its lease; a conclusion with a token that is no longer valid changes nothing
///    and answers [`Receipt::Busy`]. With a valid one, `Done` is Done whatever happened to its key meanwhile:
///    the work cannot be undone.
/// 8. An id that returns with other content is not a duplicate: it is Dead, with that reason. The inbox keeps one
///    message under an id: if it keeps one already, parked or Dead, that one stays as it is, and what came is
///    refused with the same receipt.
/// 9. `check` says beforehand whether `process` can do some work.
/// 10. `remembered` counts the ids that are kept, and no longer those that were forgotten, whoever called. It reads
///     what was counted before, not the ids. Their space is an estimate: of a table that all groups share, the group's
///     part by its number of ids.
#[async_trait]
pub trait Inbox: Send + Sync {
    /// Whether this store can do `work`. [`Error::Unavailable`] when something that it needs is not there yet.
    ///
    /// # Errors
    /// Says what is wrong with it and what to do.
    async fn check(&self, work: &Work) -> Result<(), Error>;

    /// Does `work` for each arrival in the transaction of its mark. After the first `Unavailable` the rest are not tried, but
    /// for those of other keys that a store works on at the same time. One receipt each, in order.
    async fn process(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        work: &Work,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error>;

    /// Reserves arrivals for a handler that cannot share the store's transaction. One answer each, in order.
    async fn reserve(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        lease: Duration,
        rules: &InboxRules,
    ) -> Result<Vec<Reservation>, Error>;

    /// Says what the handler did with reserved arrivals. One receipt each, in order.
    async fn conclude(
        &self,
        group: &str,
        conclusions: Vec<(Arrival, Uuid, Handled)>,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error>;

    /// Parked messages whose wait is over, at the head of their keys. They stay parked until done.
    async fn due(&self, group: &str, limit: usize) -> Result<Vec<Arrival>, Error>;

    /// What the group has done, newest first.
    async fn processed(&self, group: &str, page: Page) -> Result<Paged<Processed>, Error>;

    /// What is parked or Dead in the inbox of the group.
    async fn parked(&self, group: &str, page: Page) -> Result<Paged<Parked>, Error>;

    /// Gives a Dead or parked message of the inbox a fresh start: its attempts are forgotten and it is tried now,
    /// or, while an earlier one of its key holds it back, in its turn.
    async fn unpark(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error>;

    /// Gives up a Dead or parked message of the inbox; what waited behind it goes on. If the message was written to
    /// this store, the group has acknowledged it: its producer need not wait. The audit keeps what it said.
    async fn drop_parked(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error>;

    /// How the group is doing, without a scan.
    async fn inbox_counts(&self, group: &str) -> Result<InboxCounts, Error>;

    /// How much the group remembers, without a scan.
    async fn remembered(&self, group: &str) -> Result<Remembered, Error>;

    /// Forgets ids older than `keep`, a bounded number at a time, and reservations that have ended. Answers how
    /// many ids; none are left to forget when that is 0.
    ///
    /// `keep` is remembered for the group, and each call also forgets what other groups no longer keep: a group
    /// whose consumer is gone for good does not leave its ids behind.
    async fn forget_ids(&self, group: &str, keep: Duration) -> Result<u64, Error>;
}
