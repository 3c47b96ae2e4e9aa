//! A broker that breaks one rule on purpose, on top of a real one.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use broker::{
    Delivery, Guarantees, Line, Outcome, Outgoing, Position, Publisher, ReceiveError, SendTogether,
    Subscriber, Subscription, Transactions, WriteNote,
};
use message::MessageId;
use uuid::Uuid;

use super::Broker;

/// How a saboteur breaks a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// Outcomes come in the wrong order.
    ReversesOutcomes,
    /// Messages are confirmed and not stored.
    ConfirmsInWords,
    /// The last message of a call is stored first.
    StoresBackwards,
    /// What is said to be held is stored.
    StoresTheHeld,
    /// One impossible message takes the others of its call with it.
    RejectsTheBatch,
    /// Headers do not arrive.
    LosesHeaders,
    /// A publish never ends when the broker does not answer.
    WaitsForever,
    /// All groups are one.
    OneGroupForAll,
    /// What is delivered is done.
    AcknowledgesOnReceipt,
    /// The last message comes first.
    ReversesDeliveries,
    /// Members of a group do not know of each other.
    EachMemberItsOwnGroup,
    /// An acknowledgement does nothing.
    AcknowledgesNothing,
    /// An acknowledgement counts whoever gives it.
    AcknowledgesForOthers,
    /// What is given back does not come again.
    GivesBackNothing,
    /// A new group gets only what is published after it came.
    StartsAtTheEnd,
    /// A receive that is dropped takes its messages with it.
    LosesOnCancel,
    /// A closed member stays.
    ClosesInWords,
    /// A missing destination is the fault of the message.
    BlamesTheMessage,
    /// A broker that was away once stays away for this client.
    NeverComesBack,
    /// Messages that somebody works on go to another member too.
    LetsOthersHaveIt,
    /// What was not acknowledged when the broker went is gone.
    LosesOnRestart,
    /// What is sent again is another message.
    RecognisesNothing,
    /// Who takes a lane takes it from nobody.
    LeavesTheFormerOwner,
    /// Of all who had a lane, one is remembered.
    AnswersOneNote,
    /// A batch is stored without its note.
    SendsWithoutTheNote,
}

/// What saboteurs on several clients of one broker know together.
#[derive(Default)]
pub(super) struct Memory {
    struck: AtomicBool,
    published: Mutex<HashSet<MessageId>>,
    acknowledged: Mutex<HashSet<Position>>,
    /// Members that should have left.
    lingering: Mutex<Vec<Box<dyn Subscription>>>,
    /// Subscriptions were opened.
    subscribed: AtomicUsize,
    /// Messages were received.
    received: AtomicUsize,
    /// What members copy from each other, and the number of the one that received it.
    copies: Mutex<Vec<(usize, Delivery)>>,
}

impl Memory {
    /// Whether the rule was broken at least once.
    pub(super) fn struck(&self) -> bool {
        self.struck.load(Ordering::SeqCst)
    }

    /// Whether this is the rule to break; if so it counts as broken.
    fn breaks(&self, ours: Sabotage, sabotage: Sabotage) -> bool {
        let breaks = ours == sabotage;
        if breaks {
            self.struck.store(true, Ordering::SeqCst);
        }
        breaks
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while holding it")
}

/// The broker that breaks a rule.
pub(super) struct Saboteur {
    broker: Arc<dyn Broker>,
    sabotage: Sabotage,
    memory: Arc<Memory>,
}

impl Saboteur {
    pub(super) fn new(broker: Arc<dyn Broker>, sabotage: Sabotage, memory: Arc<Memory>) -> Self {
        Self { broker, sabotage, memory }
    }

    fn breaks(&self, sabotage: Sabotage) -> bool {
        self.memory.breaks(self.sabotage, sabotage)
    }

    /// Stores what the real broker held back.
    async fn store_held(&self, batch: &[Outgoing], outcomes: &[Outcome]) {
        for (outgoing, _) in batch.iter().zip(outcomes).filter(|(_, outcome)| **outcome == Outcome::Held) {
            if self.breaks(Sabotage::StoresTheHeld) {
                self.broker.publish(vec![outgoing.clone()]).await;
            }
        }
    }
}

#[async_trait]
impl Publisher for Saboteur {
    fn guarantees(&self) -> Guarantees {
        self.broker.guarantees()
    }

    fn transactions(&self) -> Option<Arc<dyn Transactions>> {
        let transactions = self.broker.transactions()?;
        let (broker, sabotage) = (Arc::clone(&self.broker), self.sabotage);
        Some(Arc::new(Together { transactions, broker, sabotage, memory: Arc::clone(&self.memory) }))
    }

    async fn recognises(&self, horizon: Duration) -> Result<(), Outcome> {
        self.broker.recognises(horizon).await
    }

    async fn publish(&self, mut batch: Vec<Outgoing>) -> Vec<Outcome> {
        if self.breaks(Sabotage::ConfirmsInWords) {
            return vec![Outcome::Confirmed; batch.len()];
        }
        for outgoing in &mut batch {
            let again = lock(&self.memory.published).contains(&outgoing.message.id);
            if again && self.breaks(Sabotage::RecognisesNothing) {
                outgoing.delivery += 1;
            }
        }
        if self.breaks(Sabotage::LosesHeaders) {
            batch.iter_mut().for_each(|outgoing| Arc::make_mut(&mut outgoing.message).headers.clear());
        }
        let backwards = batch.len() > 1 && self.breaks(Sabotage::StoresBackwards);
        if backwards {
            batch.reverse();
        }
        lock(&self.memory.published).extend(batch.iter().map(|outgoing| outgoing.message.id));
        let mut outcomes = self.broker.publish(batch.clone()).await;
        let unanswered =
            |outcome: &Outcome| matches!(outcome, Outcome::Unreachable { .. } | Outcome::Unconfirmed { .. });
        if let Some(Outcome::Misconfigured { error }) = outcomes.first().cloned()
            && self.breaks(Sabotage::BlamesTheMessage)
        {
            outcomes[0] = Outcome::Rejected { error };
        }
        // The case publishes twenty messages before the broker goes.
        if lock(&self.memory.published).len() > 20 && self.breaks(Sabotage::NeverComesBack) {
            let error = "it was away once".to_owned();
            outcomes.fill(Outcome::Unreachable { error });
        }
        if outcomes.iter().any(unanswered) && self.breaks(Sabotage::WaitsForever) {
            std::future::pending::<()>().await;
        }
        self.store_held(&batch, &outcomes).await;
        if backwards || (batch.len() > 1 && self.breaks(Sabotage::ReversesOutcomes)) {
            outcomes.reverse();
        }
        let rejected = outcomes.iter().find(|outcome| matches!(outcome, Outcome::Rejected { .. })).cloned();
        if let Some(rejected) = rejected
            && self.breaks(Sabotage::RejectsTheBatch)
        {
            outcomes.fill(rejected);
        }
        outcomes
    }
}

#[async_trait]
impl Subscriber for Saboteur {
    async fn subscribe(&self, group: &str, topics: &[String]) -> Result<Box<dyn Subscription>, ReceiveError> {
        let group = if self.breaks(Sabotage::OneGroupForAll) {
            "all".to_owned()
        } else if self.breaks(Sabotage::EachMemberItsOwnGroup) {
            Uuid::new_v4().to_string()
        } else {
            group.to_owned()
        };
        let missed = if self.breaks(Sabotage::StartsAtTheEnd) {
            lock(&self.memory.published).clone()
        } else {
            HashSet::new()
        };
        let number = self.memory.subscribed.fetch_add(1, Ordering::SeqCst);
        let subscription = self.broker.subscribe(&group, topics).await?;
        Ok(Box::new(Member {
            subscription,
            sabotage: self.sabotage,
            memory: Arc::clone(&self.memory),
            missed,
            number,
            // Another group is no way to get what others got, where all groups share one queue or a new one starts empty.
            copies: !self.broker.guarantees().groups || self.sabotage == Sabotage::LetsOthersHaveIt,
        }))
    }
}

/// Transactions that break a rule.
struct Together {
    transactions: Arc<dyn Transactions>,
    broker: Arc<dyn Broker>,
    sabotage: Sabotage,
    memory: Arc<Memory>,
}

#[async_trait]
impl Transactions for Together {
    async fn sender(&self, line: &Line) -> Result<Arc<dyn SendTogether>, Outcome> {
        let sender = self.transactions.sender(line).await?;
        let (broker, sabotage) = (Arc::clone(&self.broker), self.sabotage);
        Ok(Arc::new(Sender { sender, broker, sabotage, memory: Arc::clone(&self.memory) }))
    }
}

struct Sender {
    sender: Arc<dyn SendTogether>,
    broker: Arc<dyn Broker>,
    sabotage: Sabotage,
    memory: Arc<Memory>,
}

#[async_trait]
impl SendTogether for Sender {
    async fn take(&self, lanes: &[u16]) -> Result<Vec<Vec<u8>>, Outcome> {
        if self.memory.breaks(self.sabotage, Sabotage::LeavesTheFormerOwner) {
            return Ok(Vec::new());
        }
        let mut notes = self.sender.take(lanes).await?;
        if notes.len() > 1 && self.memory.breaks(self.sabotage, Sabotage::AnswersOneNote) {
            notes.truncate(1);
        }
        Ok(notes)
    }

    fn resolve(&self, lanes: &[u16]) {
        self.sender.resolve(lanes);
    }

    async fn give_back(&self, lanes: &[u16]) {
        self.sender.give_back(lanes).await;
    }

    async fn publish(&self, batch: Vec<Outgoing>, note: WriteNote<'_>) -> Vec<Outcome> {
        if self.memory.breaks(self.sabotage, Sabotage::SendsWithoutTheNote) {
            let outcomes = self.broker.publish(batch).await;
            let stored = |place: &usize| outcomes[*place] == Outcome::Confirmed;
            drop(note(&(0..outcomes.len()).filter(stored).collect::<Vec<_>>()));
            return outcomes;
        }
        self.sender.publish(batch, note).await
    }

    fn is_good(&self) -> bool {
        self.sender.is_good()
    }
}

/// A member that breaks a rule.
struct Member {
    subscription: Box<dyn Subscription>,
    sabotage: Sabotage,
    memory: Arc<Memory>,
    /// What a group that starts at the end does not get.
    missed: HashSet<MessageId>,
    /// How many were there before it.
    number: usize,
    /// Whether it takes what others received.
    copies: bool,
}

impl Member {
    fn breaks(&self, sabotage: Sabotage) -> bool {
        self.memory.breaks(self.sabotage, sabotage)
    }

    /// What other members received, if the rule to break is that nobody else gets it.
    fn copied(&self) -> Vec<Delivery> {
        let ours = matches!(self.sabotage, Sabotage::EachMemberItsOwnGroup | Sabotage::LetsOthersHaveIt);
        if !ours || !self.copies {
            return Vec::new();
        }
        let mut copies = lock(&self.memory.copies);
        let taken = copies.extract_if(.., |(number, _)| *number != self.number);
        let taken: Vec<Delivery> = taken.map(|(_, delivery)| delivery).collect();
        if !taken.is_empty() {
            self.breaks(self.sabotage);
        }
        taken
    }

    fn gets(&self, delivery: &Delivery) -> bool {
        !self.missed.contains(&delivery.message.id)
            && !lock(&self.memory.acknowledged).contains(&delivery.position)
    }
}

#[async_trait]
impl Subscription for Member {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError> {
        let copied = self.copied();
        if !copied.is_empty() {
            return Ok(copied);
        }
        loop {
            let mut deliveries = self.subscription.receive(max).await?;
            if self.breaks(Sabotage::LosesOnCancel) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            deliveries.retain(|delivery| self.gets(delivery));
            // The case receives eight messages before the broker goes.
            let before = self.memory.received.fetch_add(deliveries.len(), Ordering::SeqCst);
            if before >= 8 && self.breaks(Sabotage::LosesOnRestart) {
                std::future::pending::<()>().await;
            }
            if deliveries.is_empty() {
                continue;
            }
            if self.copies {
                let received = deliveries.iter().map(|delivery| (self.number, delivery.clone()));
                lock(&self.memory.copies).extend(received);
            }
            if self.breaks(Sabotage::AcknowledgesOnReceipt) {
                let positions: Vec<_> = deliveries.iter().map(|delivery| delivery.position).collect();
                self.subscription.acknowledge(&positions).await?;
            }
            if deliveries.len() > 1 && self.breaks(Sabotage::ReversesDeliveries) {
                deliveries.reverse();
            }
            return Ok(deliveries);
        }
    }

    async fn acknowledge(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        if self.breaks(Sabotage::AcknowledgesNothing) {
            return Ok(());
        }
        if self.breaks(Sabotage::AcknowledgesForOthers) {
            lock(&self.memory.acknowledged).extend(positions);
        }
        self.subscription.acknowledge(positions).await
    }

    async fn give_back(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        if self.breaks(Sabotage::GivesBackNothing) {
            return Ok(());
        }
        self.subscription.give_back(positions).await
    }

    async fn close(self: Box<Self>) {
        if self.breaks(Sabotage::ClosesInWords) {
            lock(&self.memory.lingering).push(self.subscription);
            return;
        }
        self.subscription.close().await;
    }
}
