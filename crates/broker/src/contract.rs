//! What every broker's publisher and subscriber keep true, as numbered rules.

mod browse;
mod finish;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use message::Message;
pub use message::{Finding, Health};

pub use browse::{Browse, See, Seen, Span};
pub use finish::{Beside, FinishTogether, SubscribeTogether, Unfinished};

/// A message on its way out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// The message: the same one that was claimed, whoever else looks at it.
    pub message: Arc<Message>,
    /// Its place in the producer's order; travels with it.
    pub seq: i64,
    /// Which deliberate delivery this is: part of the id by which the broker recognises duplicates.
    pub delivery: u32,
    /// How it is written down for those who read it.
    pub format: Format,
}

impl Outgoing {
    /// A first delivery in Postrider's own format.
    pub fn new(message: impl Into<Arc<Message>>, seq: i64) -> Self {
        Self { message: message.into(), seq, delivery: 0, format: Format::default() }
    }
}

/// How a message looks on the wire.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// The payload as it is; everything else in the broker's own headers, properties or attributes.
    #[default]
    Native,
    /// CloudEvents 1.0, binary mode: the payload as it is, the attributes in headers.
    CloudEvents {
        /// The `source` of the events.
        source: Arc<str>,
    },
    /// CloudEvents 1.0, structured mode: one JSON object with the payload in it.
    CloudEventsStructured {
        /// The `source` of the events.
        source: Arc<str>,
    },
}

/// What became of one message of a publish, named by what the relay does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The broker has it and will keep it.
    Confirmed,
    /// Not stored; this one may succeed later, after at least this long. Spends an attempt.
    Deferred {
        /// Why, for people.
        error: String,
        /// What the broker asked for.
        after: Option<Duration>,
    },
    /// The destination is down: nobody's message is to blame, and none spends an attempt.
    Unreachable {
        /// Why, for people.
        error: String,
    },
    /// Perhaps stored: the answer never came. Sent again with the same id. Spends an attempt from the second time on, and
    /// only where the destination answers others.
    Unconfirmed {
        /// Why, for people.
        error: String,
    },
    /// This message can never be stored there.
    Rejected {
        /// Why, for people.
        error: String,
    },
    /// No message can be stored there until somebody changes a setting.
    Misconfigured {
        /// Why, for people.
        error: String,
    },
    /// Not tried: an earlier message of its topic and key was not confirmed, or the time of the call was over before its
    /// turn came.
    Held,
}

impl Outcome {
    /// Why it is not confirmed, for people.
    pub fn error(&self) -> Option<&str> {
        match self {
            Self::Confirmed => None,
            Self::Deferred { error, .. }
            | Self::Unreachable { error }
            | Self::Unconfirmed { error }
            | Self::Rejected { error }
            | Self::Misconfigured { error } => Some(error),
            Self::Held => Some("it was not tried"),
        }
    }

    /// The same of something that failed before anything was sent.
    #[cfg(any(feature = "embedded", feature = "kafka"))]
    pub(crate) fn before_sending(self) -> Self {
        match self {
            Self::Unconfirmed { error } => Self::Unreachable { error },
            outcome => outcome,
        }
    }
}

/// What a broker promises; the relay and the configuration read it and ask for no more. By default nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guarantees {
    /// Messages of one topic and key are received in the order in which they were stored.
    pub key_order: bool,
    /// Several messages of one key may be in one `publish`: see rule 3.
    pub ordered_batches: bool,
    /// Each group of subscribers gets every message; otherwise all share one queue for each topic.
    pub groups: bool,
    /// The late acknowledgement of a member that lost its messages is refused; otherwise it may finish them although
    /// another member has them by now.
    pub fenced: bool,
    /// Bytes of payload at most.
    pub max_payload: Option<usize>,
    /// Messages in one `publish` at most.
    pub max_batch: usize,
    /// How long the broker itself recognises a message that is sent twice.
    pub deduplication: Option<Duration>,
    /// What survives: for people, in the contract of a route.
    pub durability: &'static str,
    /// What that needs of the broker itself: for people, in the contract of a route.
    pub needs: &'static [&'static str],
}

/// Sends messages.
///
/// # Contract
/// 1. One outcome per message, in the order given, whatever happens.
/// 2. [`Outcome::Confirmed`] means that the broker keeps the message through a crash of its own.
/// 3. With `ordered_batches`: messages of a topic and key are stored in the order given, and after one that was not
///    confirmed none of that topic and key is stored by the same call; those are [`Outcome::Held`].
/// 4. A message that is too large, or otherwise impossible, is `Rejected` by itself; the others are unharmed.
/// 5. Id, sequence, delivery, type, key, content type, headers and time arrive as they were sent.
/// 6. `publish` ends within the publisher's own time limit.
/// 7. A destination that does not exist, and is not to be made, is `Misconfigured`; other topics are unharmed.
/// 8. After the broker was away, the same publisher goes on: nobody has to open another.
/// 9. What [`once`](Publisher::once) answers sends no message twice by itself, whatever it hears or does not hear.
/// 10. A message that is sent twice within a time for which [`recognises`](Publisher::recognises) answers yes is stored once,
///    whoever set the broker up.
#[async_trait]
pub trait Publisher: Send + Sync {
    /// What the broker promises.
    fn guarantees(&self) -> Guarantees;

    /// The same, with nothing in it that sends a message again by itself; none where there is nothing of the kind
    /// anyway.
    fn once(&self) -> Option<Arc<dyn Publisher>> {
        None
    }

    /// Sends batches in transactions, where the broker has them.
    fn transactions(&self) -> Option<Arc<dyn Transactions>> {
        None
    }

    /// Whether the broker, as it is set up, recognises a message that is sent again within `horizon`. Where others may have
    /// set it up, it is asked; elsewhere the guarantees say.
    ///
    /// # Errors
    /// What to tell of messages that count on it: nothing of them must be sent.
    async fn recognises(&self, horizon: Duration) -> Result<(), Outcome> {
        match unrecognised(self.guarantees().deduplication, horizon) {
            None => Ok(()),
            Some(error) => Err(Outcome::Misconfigured { error }),
        }
    }

    /// Sends `batch` and waits for the broker's word on each message.
    ///
    /// # Cancel safety
    /// A call that is dropped may have stored any part of the batch.
    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome>;
}

/// Why a broker that recognises duplicates for `window` does not recognise all that is sent again within `horizon`.
pub(crate) fn unrecognised(window: Option<Duration>, horizon: Duration) -> Option<String> {
    let Some(window) = window else { return Some("recognises no message that is sent twice".to_owned()) };
    (window < horizon).then(|| {
        let (window, horizon) = (humantime::format_duration(window), humantime::format_duration(horizon));
        format!("recognises duplicates for {window}, and a message may be sent again for {horizon}")
    })
}

/// Whose transactions: those of one store, on their way to one broker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Line {
    /// A name that no other store has.
    pub store: String,
    /// The name of the broker in the configuration: two names of one server are two lines.
    pub broker: String,
}

/// Sends batches together with notes of them, both or neither. A sender takes the lanes of which it sends.
///
/// # Contract
/// 1. Once a sender took a lane, nothing that others who took it before have sent can still be stored: it is, or it never
///    will be. They store nothing any more, of any lane.
/// 2. `take` answers the last note that was stored of each of them, and perhaps earlier ones; of those who gave the lane
///    back, or were resolved, it need not.
/// 3. A batch and its note are seen together or not at all, by readers who read what is committed.
#[async_trait]
pub trait Transactions: Send + Sync {
    /// Another sender. It has no lane yet.
    ///
    /// # Errors
    /// What to tell of messages that wait for it: nothing was sent.
    async fn sender(&self, line: &Line) -> Result<Arc<dyn SendTogether>, Outcome>;
}

/// What writes the note of a batch: it is told which of its messages are in the transaction.
pub type WriteNote<'a> = &'a (dyn Fn(&[usize]) -> Vec<u8> + Send + Sync);

/// Sends batches, one after the other.
#[async_trait]
pub trait SendTogether: Send + Sync {
    /// Takes lanes from whoever has them, and answers the notes of those.
    ///
    /// # Errors
    /// What to tell of messages that wait for it: the lanes have to be taken again.
    ///
    /// # Cancel safety
    /// Others may have lost the lanes, and this one does not have them.
    async fn take(&self, lanes: &[u16]) -> Result<Vec<Vec<u8>>, Outcome>;

    /// What the notes of former owners say of these lanes is all settled: nobody has to read them again.
    fn resolve(&self, lanes: &[u16]);

    /// Gives back lanes of which everything that was sent is settled: who takes them next has to ask nobody. Where that
    /// cannot be done now, whoever takes them takes them from this one.
    async fn give_back(&self, lanes: &[u16]);

    /// Sends what of `batch` can be sent, and its note. What is in the transaction is all confirmed, or none of it. One call
    /// at a time, of lanes that it took.
    ///
    /// # Cancel safety
    /// A call that is dropped may have stored the transaction: another sender that takes the lanes will know.
    async fn publish(&self, batch: Vec<Outgoing>, note: WriteNote<'_>) -> Vec<Outcome>;

    /// Whether it can send another. If not, another sender has to take its lanes, and the notes say what was stored.
    fn is_good(&self) -> bool;
}

/// A message that came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The message.
    pub message: Message,
    /// Its place in the producer's order, when the broker carried it.
    pub seq: Option<i64>,
    /// Which deliberate delivery this is.
    pub delivery: u32,
    /// Where it was read; given back when it is done.
    pub position: Position,
}

/// The place of a delivery in its broker, meaningful to its own subscription only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position {
    /// Which partition of the subscription. Where a broker keeps no order, every delivery is a partition of its own.
    pub partition: u64,
    /// Where in it.
    pub offset: i64,
}

/// Why a subscription cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    /// Try again: the broker is down or busy.
    #[error("the broker cannot be reached: {0}")]
    Unreachable(String),
    /// Somebody has to change something first.
    #[error("the broker refuses: {0}")]
    Misconfigured(String),
}

/// Opens subscriptions.
#[async_trait]
pub trait Subscriber: Send + Sync {
    /// Joins `group` on `topics`. Several subscriptions of one group share the work.
    async fn subscribe(&self, group: &str, topics: &[String]) -> Result<Box<dyn Subscription>, ReceiveError>;

    /// Opens subscriptions that send what is made of their messages in one transaction, where the broker has them.
    fn together(&self) -> Option<Arc<dyn SubscribeTogether>> {
        None
    }
}

/// One member of a consumer group.
///
/// # Contract
/// 1. Each message of the topics reaches some member of each group, and again after a crash, until it is
///    acknowledged.
/// 2. Messages of one partition arrive in the order in which they were stored; with `key_order`, all of a key are in
///    one partition.
/// 3. While a member holds a partition, no other member of its group receives from it.
/// 4. Acknowledging a position finishes it and all before it in its partition; with `fenced`, a member that lost
///    the partition changes nothing by it, and without, it is no error.
/// 5. What was given back, and all after it in its partition, is delivered again.
/// 6. A new group starts at the oldest message that is kept.
/// 7. What a member has received stays with it for as long as it lives, however long the work takes.
/// 8. After the broker was away, the same subscription goes on or says [`ReceiveError::Unreachable`] so that another
///    is opened; nothing that was not acknowledged is lost by it.
#[async_trait]
pub trait Subscription: Send {
    /// Waits for messages, `max` at most.
    ///
    /// # Cancel safety
    /// Safe: what was not returned is returned by a later call.
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError>;

    /// These, and all before them in their partitions, are done.
    async fn acknowledge(&mut self, positions: &[Position]) -> Result<(), ReceiveError>;

    /// These, and all after them in their partitions, must come again.
    async fn give_back(&mut self, positions: &[Position]) -> Result<(), ReceiveError>;

    /// Leaves the group at once instead of when its leases run out.
    async fn close(self: Box<Self>);
}

/// Looks at a broker's own configuration, for `postrider doctor`.
#[async_trait]
pub trait Examine: Send + Sync {
    /// Connects and reports what is there, what is unsafe and what is missing. Changes nothing.
    async fn examine(&self, plan: &Plan) -> Vec<Finding>;
}

/// What somebody means to do with a broker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Topics that are published there.
    pub topics: Vec<String>,
    /// Groups that listen there, and to what.
    pub groups: Vec<(String, Vec<String>)>,
    /// Whether any of them counts on the order of keys.
    pub ordered: bool,
    /// How long a message may be sent again.
    pub horizon: Duration,
    /// How long the broker itself must recognise a message that is sent twice, where a promise rests on that.
    pub recognised: Option<Duration>,
    /// Bytes of the largest payload that is accepted for it.
    pub max_payload: usize,
}
