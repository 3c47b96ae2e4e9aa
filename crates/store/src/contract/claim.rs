//! For the relay: taking messages and saying what became of them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use message::{Message, State};
use uuid::Uuid;

use super::Seq;
use super::lanes::Lease;
use crate::Error;

/// The name of an open batch.
pub type BatchId = Uuid;

/// How the relay treats a topic right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopicRule {
    /// Where it goes: messages of different channels are in different batches, so that one can be settled while another
    /// is still on its way.
    pub channel: usize,
    /// How many messages of it may be claimed in a turn: none while its destination is down, one to probe it.
    pub take: usize,
    /// A failed message holds back the later ones of its key.
    pub hold_failed: bool,
    /// A Dead one does too.
    pub hold_dead: bool,
}

/// What to take.
#[derive(Clone)]
pub struct ClaimOrder {
    /// The lanes to take from. One with an open batch of a topic that may be taken yields nothing.
    pub leases: Vec<Lease>,
    /// Messages at most.
    pub limit: usize,
    /// Bytes at most; one message is always allowed.
    pub bytes: usize,
    /// How each topic is treated.
    pub rule: Arc<dyn Fn(&str) -> TopicRule + Send + Sync>,
}

/// Messages of one lane and channel, taken together.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Its record in the store.
    pub id: BatchId,
    /// Where its messages go, by the rules of their topics.
    pub channel: usize,
    /// The lease under which it was taken.
    pub lease: Lease,
    /// In the order in which they must be sent.
    pub messages: Vec<Claimed>,
}

/// A message in a relay's hands.
#[derive(Clone, Debug)]
pub struct Claimed {
    /// Its place in the order.
    pub seq: Seq,
    /// What to send.
    pub message: Arc<Message>,
    /// InFlight, and what it was before.
    pub state: State,
    /// The groups its writer named.
    pub ack_groups: Option<Vec<String>>,
    /// Since it was written, by the store's clock.
    pub age: Duration,
}

/// What became of one message of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The broker has it.
    Sent {
        /// The groups that must acknowledge it.
        ack_groups: Vec<String>,
    },
    /// It failed and is tried again.
    Failed {
        /// Why, for people.
        error: String,
        /// The wait before the next attempt.
        retry_after: Duration,
        /// Whether later messages of its key wait for it.
        hold: bool,
    },
    /// It is quarantined.
    Dead {
        /// The rule that killed it: "MaxAttempts(10) exceeded".
        reason: String,
        /// The last failure.
        error: String,
        /// Whether this was a failed attempt, to be counted as one.
        attempted: bool,
        /// Whether later messages of its key wait for a person.
        hold: bool,
    },
    /// It is what it was before, and its time has not come.
    Postponed {
        /// The wait before it is claimed again. Later messages of its key go on.
        wait: Duration,
    },
    /// It is what it was before.
    Released {
        /// Why, when the destination was tried in vain; that counts as a failed attempt in the metrics.
        error: Option<String>,
    },
}

/// The end of a batch.
#[derive(Clone, Debug)]
pub struct Settlement {
    /// Which batch.
    pub batch: BatchId,
    /// The lease under which it was taken.
    pub lease: Lease,
    /// One verdict for each of its messages.
    pub verdicts: Vec<(Seq, Verdict)>,
    /// Messages that are written with it, or not at all.
    pub beside: Vec<Message>,
}

/// What a turn did.
#[derive(Clone, Debug, Default)]
pub struct Turn {
    /// Settlements that came too late: another relay owns those lanes now, and nothing was written.
    pub fenced: Vec<BatchId>,
    /// The new batches, one for each lane and channel that had work.
    pub batches: Vec<Batch>,
    /// Whether the limits were reached, so that more is probably waiting.
    pub more: bool,
    /// When nothing was claimed: the wait until the first message is due again, if any waits.
    pub next_due: Option<Duration>,
}

/// Settling and claiming.
///
/// # Contract
/// 1. A message is in at most one open batch, and only its lane's owner can put it there.
/// 2. A settlement is written whole or not at all, and only under the lease of the lane's current owner and
///    for a batch that is still open; else the batch is named in [`Turn::fenced`] and nothing changes.
/// 3. Messages of one lane and channel are claimed in the order of `seq`, and a message is never claimed before
///    an earlier one of its topic and key that is not settled, whatever their channels were.
/// 4. On topics with `hold_failed`, later messages of a failed one's key wait until it is Sent; with
///    `hold_dead`, also while it is Dead. Released, they come in order before newer ones.
/// 5. A Failed or postponed message is not claimed before its wait is over.
/// 6. Nothing is claimed of a topic beyond its rule's `take`; such messages do not hide those of other topics.
/// 7. A message that [travels alone](State::travels_alone) is the only one in its batch.
/// 8. A claim is on disk before it is answered.
/// 9. Every verdict that reports a try in vain adds to the message's history of attempts.
/// 10. A batch has messages of one channel. A lane has any number of open batches; each keeps back its own topics
///     and, for as long as the order may take those, the lane.
/// 11. What a settlement carries [beside](Settlement::beside) it is written in its transaction. One whose id is taken is
///     there already, and left as it is.
#[async_trait]
pub trait Claim: Send + Sync {
    /// Settles `settlements` and takes what `order` allows, in one transaction.
    ///
    /// # Cancel safety
    /// A turn that was dropped may have happened: its batches are then orphans until the lease runs out.
    async fn turn(&self, settlements: Vec<Settlement>, order: Option<ClaimOrder>) -> Result<Turn, Error>;

    /// Waits until a message may have been written, in this process; a hint, never a promise.
    ///
    /// # Cancel safety
    /// Safe.
    async fn woken(&self);
}
