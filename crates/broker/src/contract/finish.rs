//! Consume, transform, produce: what was received and what was made of it are one transaction of the broker.

use std::collections::BTreeSet;

use async_trait::async_trait;

use super::{Delivery, Outcome, Outgoing, Position, ReceiveError, Subscription};

/// Opens subscriptions that send what is made of their messages.
#[async_trait]
pub trait SubscribeTogether: Send + Sync {
    /// Joins `group` on `topics`, as [`Subscriber::subscribe`](super::Subscriber::subscribe) does.
    async fn subscribe(
        &self,
        group: &str,
        topics: &[String],
    ) -> Result<Box<dyn FinishTogether>, ReceiveError>;
}

/// One member of a consumer group whose work is the messages that it sends.
///
/// # Contract
/// 1. What `finish` finishes and what it sends are seen together or not at all, by readers who read what is committed and
///    by whoever has the partitions next.
/// 2. A member that does not have all of the partitions any more sends nothing and finishes nothing.
/// 3. After [`Unfinished::Refused`] and [`Unfinished::Undone`] nothing was stored, and everything is still with the
///    member: it may be finished again, or given back.
/// 4. After [`Unfinished::Over`] whoever subscribes next receives what was not finished, and nothing that was. Until the
///    broker knows which, it is received by nobody.
/// 5. Messages of a topic and key are stored in the order given.
/// 6. `finish` ends within the broker's own time limit, and what a member that died has left open is ended soon.
#[async_trait]
pub trait FinishTogether: Subscription {
    /// Waits for messages of other partitions than `held`, `max` at most.
    ///
    /// # Cancel safety
    /// Safe: what was not returned is returned by a later call.
    async fn receive_beside(&mut self, held: &BTreeSet<u64>, max: usize) -> Result<Beside, ReceiveError>;

    /// These, and all before them in their partitions, are done, and `made` is what they were done for.
    ///
    /// # Cancel safety
    /// A call that is dropped may have stored all of it: the subscription must be dropped too.
    async fn finish(&mut self, positions: &[Position], made: Vec<Outgoing>) -> Result<(), Unfinished>;
}

/// What a member hears that holds some partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beside {
    /// Messages of the others.
    Messages(Vec<Delivery>),
    /// The group waits for these: what was received of them should be finished or given back.
    Wanted(Vec<u64>),
}

/// Why nothing was finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfinished {
    /// Some of the messages cannot be sent. One outcome each, in the order given; for those that could be, it is
    /// [`Outcome::Held`].
    Refused(Vec<Outcome>),
    /// The broker did not take it now. Why, for people.
    Undone(String),
    /// The subscription cannot go on.
    Over(ReceiveError),
}
