//! For the application: writing messages.

use async_trait::async_trait;
use message::{Invalid, Message, MessageId};

use crate::Error;

/// A message to write, and who must acknowledge it.
#[derive(Clone, Debug)]
pub struct NewMessage {
    /// The message.
    pub message: Message,
    /// The consumer groups that must acknowledge it. `None`: those configured for its topic when it is sent.
    pub ack_groups: Option<Vec<String>>,
    /// Makes the write happen once however often it is asked for.
    pub once: Option<Once>,
}

impl From<Message> for NewMessage {
    fn from(message: Message) -> Self {
        Self { message, ack_groups: None, once: None }
    }
}

/// A name under which a write happens once. It outlives the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Once {
    /// The name: an idempotency key of the caller's, or the id it chose.
    pub key: String,
    /// A digest of all that the caller asked for: the same key with another request is refused.
    pub fingerprint: [u8; 32],
}

/// What became of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Appended {
    /// It is stored.
    New(MessageId),
    /// It had been stored before under the same [`Once`] key, as this message.
    Repeated(MessageId),
}

/// Why one message of an append was turned away. The others are stored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Turned {
    /// The key was used for a different request.
    #[error(
        "the idempotency key was used before for a different request: use a new key, or repeat that request"
    )]
    KeyTaken,
    /// The id belongs to another message.
    #[error("another message has the id {0}: leave the id out to get a fresh one")]
    IdTaken(MessageId),
    /// No store could keep it.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

/// Writes messages in a transaction of the store's own.
///
/// Applications that have a transaction use the adapter for their driver instead (`sqlite::append`,
/// `sqlite::sqlx::append`), or plain SQL: only topic and payload are required.
///
/// # Contract
/// 1. When `append` returns, the messages survive a crash of the process and of the machine.
/// 2. Each message is stored or turned away by itself; one result each, in order.
/// 3. Of any number of appends with one [`Once`] key, one stores; the others with the same fingerprint
///    answer [`Appended::Repeated`] with its id, and those with another are turned away.
/// 4. Messages of one call get rising sequence numbers in the order given.
/// 5. A relay in the same process is woken.
#[async_trait]
pub trait Append: Send + Sync {
    /// Stores `messages`.
    ///
    /// # Cancel safety
    /// A call that is dropped may or may not have stored its messages; with [`Once`] it can be repeated.
    async fn append(&self, messages: Vec<NewMessage>) -> Result<Vec<Result<Appended, Turned>>, Error>;
}
