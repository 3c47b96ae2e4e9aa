//! For the operator: what lies in a broker, beside its consumers.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use message::MessageId;

use super::ReceiveError;

/// A stretch of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// From this moment on.
    pub since: DateTime<Utc>,
    /// Up to this one, and without it.
    pub until: DateTime<Utc>,
}

/// A message as it lies in a broker. Only what tells it from others: payloads of a whole log would fill the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Which message.
    pub id: MessageId,
    /// Its place in the producer's order; absent for messages that others produced.
    pub seq: Option<i64>,
    /// Which deliberate delivery this is.
    pub delivery: u32,
    /// When the broker stored it, by its own clock.
    pub stored_at: DateTime<Utc>,
    /// A group made it of another message, in a transaction of the broker: it never was in an outbox. Only brokers with
    /// [`SubscribeTogether`](super::SubscribeTogether) have such messages.
    pub made: bool,
}

impl Seen {
    /// The header of a message that a group made, with the id of the message of which it was made.
    pub const MADE_OF: &'static str = "made-of";
}

/// What is told of each message that is seen.
pub type See<'a> = &'a mut (dyn FnMut(Seen) + Send);

/// Reads what lies in a broker without being one of its consumers, for `postrider reconcile`.
///
/// # Contract
/// 1. Nothing changes: no group is made, joined or moved, nothing is acknowledged, no topic is made, and nothing of the reader
///    stays at the broker.
/// 2. Every message of the topic that was stored within the span is shown once for each time that it lies there. What is
///    stored or removed while it is read may be shown or not.
/// 3. The answer is a moment since which the broker has removed nothing of the topic by itself; none when it never has.
/// 4. A topic that is not there has no messages.
#[async_trait]
pub trait Browse: Send + Sync {
    /// Shows what was stored of `topic` within `span`, and answers since when the broker has kept everything.
    ///
    /// # Cancel safety
    /// Safe: what the reader has at the broker ends by itself.
    async fn browse(
        &self,
        topic: &str,
        span: Span,
        see: See<'_>,
    ) -> Result<Option<DateTime<Utc>>, ReceiveError>;
}
