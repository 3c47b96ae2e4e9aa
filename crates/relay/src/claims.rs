//! A second claim on each message beside its lane: a lock and a count of attempts that others can see.
//!
//! The lane's lease decides who may write to the store; it frees the messages of a dead relay as soon as somebody takes
//! the lane. Some destinations must not see a message again that soon: with claims, an attempt that nobody settled
//! keeps its message for as long as its lock lasts, and counts as an attempt wherever the relay died.
//!
//! ```text
//!  turn ─► exchange ──────────────────────────────► publish ─► turn: settle ─► exchange: give back
//!  claim   locked: its attempt is counted, it is sent                          sent, dead: lock and count go
//!          not locked: it failed, until the lock ends                          failed: the lock goes
//!                                                                              released: the lock and its count go
//! ```
//!
//! The number of failures in the store and the count beside the lock say together what became of an attempt. A count
//! that is higher belongs to an attempt that nobody settled: its worker died, or lost its lane. One that is not
//! higher was settled, and whatever is left of its lock means nothing.

#[cfg(feature = "redis")]
pub mod redis;

use std::time::Duration;

use async_trait::async_trait;
use message::MessageId;
use store::BatchId;

/// An attempt that a relay wants to make.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Of which message.
    pub id: MessageId,
    /// Who wants it: the open batch that has the message.
    pub owner: BatchId,
    /// Which deliberate delivery of the message this is. What was claimed for an earlier one is void.
    pub delivery: u32,
    /// Its failures so far, by the store.
    pub attempts: u32,
}

/// Whether it may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The message is locked, and the attempt counted.
    Locked,
    /// An earlier attempt was never settled.
    Held {
        /// Whose attempt, when that is known.
        owner: Option<BatchId>,
        /// How long its lock lasts. None when that is over, and only its count is left.
        rest: Option<Duration>,
    },
}

/// An attempt whose outcome the store knows.
#[derive(Clone, Copy, Debug)]
pub struct Over {
    /// Of which message.
    pub id: MessageId,
    /// Whose attempt.
    pub owner: BatchId,
    /// How it ended.
    pub end: End,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With the message's life: it is Sent or Dead.
    Finished,
    /// In vain: it is tried again.
    Failed,
    /// Before it began: nothing was spent.
    Released,
}

/// Locks messages and counts their attempts.
///
/// # Contract
/// 1. A message whose lock is held is not locked again before the lock ends, unless the store has settled that
///    attempt (`attempts` says so) or the lock is of an earlier delivery.
/// 2. The count outlives the lock. An attempt that was counted and never settled is [`Answer::Held`] until the store
///    has counted it too.
/// 3. What is over is given back only for its owner: a lock or count that has another by now stays.
/// 4. An exchange can be repeated: what was given back stays so.
#[async_trait]
pub trait Claims: Send + Sync {
    /// Gives back what is `over`, then locks what is `wanted`. One answer for each wanted, in order.
    ///
    /// # Errors
    /// When nobody knows what was done: say why, for people.
    ///
    /// # Cancel safety
    /// An exchange that is dropped may have happened.
    async fn exchange(&self, over: &[Over], wanted: &[Wanted]) -> Result<Vec<Answer>, String>;
}
