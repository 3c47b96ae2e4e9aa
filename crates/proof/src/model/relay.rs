//! A relay's memory: what it believes to hold, and the batches in its hands.
//!
//! A relay acts on this alone. Whatever it believes may be out of date: it may have been paused for any time
//! between two actions, and a crash empties it.

use message::{Event, Next, State, Status, step};

use super::bug::Bug;
use super::store::{Rules, Seq};

/// What the broker says of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Stored.
    Confirmed,
    /// Not stored; try later. Spends an attempt.
    Deferred,
    /// Stored, but the answer was lost. Spends an attempt.
    Unconfirmed,
    /// Never.
    Rejected,
    /// Not stored: the destination is down. Spends nothing.
    Unreachable,
}

impl Outcome {
    /// All that is not well.
    pub const TROUBLE: [Self; 4] = [Self::Deferred, Self::Unconfirmed, Self::Rejected, Self::Unreachable];

    /// Whether the broker has the message now.
    pub fn stored(self) -> bool {
        matches!(self, Self::Confirmed | Self::Unconfirmed)
    }
}

/// What the relay asks the store to write of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verdict {
    /// The broker has it.
    Sent,
    /// It is tried again.
    Failed,
    /// It is quarantined.
    Dead,
    /// It is what it was.
    Released,
}

/// A message in hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Item {
    /// Which.
    pub seq: Seq,
    /// Whose order it keeps.
    pub key: u8,
    /// InFlight, as it was claimed.
    pub state: State,
    /// Once it is known.
    pub verdict: Option<Verdict>,
}

/// Where a batch is from and where it goes: a lane and a channel.
pub(crate) type Place = (u8, u8);

/// A batch in hand.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hand {
    /// Its record in the store.
    pub batch: u8,
    /// The lease under which it was taken.
    pub epoch: u8,
    /// In the order in which they must be sent.
    pub items: Vec<Item>,
}

/// A lease as a relay remembers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lease {
    /// Its epoch.
    pub epoch: u8,
    /// A turn had no answer: the store may have an open batch of ours that we know nothing of.
    pub doubted: bool,
}

/// What one relay process remembers, by lane.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Relay {
    /// The leases that it believes to hold.
    pub leases: Vec<Option<Lease>>,
    /// The batches that it publishes, by lane and channel.
    pub hands: Vec<Vec<Option<Hand>>>,
}

impl Hand {
    pub(super) fn new(batch: u8, epoch: u8) -> Self {
        Self { batch, epoch, items: Vec::new() }
    }

    pub(super) fn add(&mut self, rules: &Rules, seq: Seq, key: u8, state: State) {
        let verdict = rules.has(Bug::SentBeforeItIsPublished).then_some(Verdict::Sent);
        self.items.push(Item { seq, key, state, verdict });
    }

    /// The messages of the batch.
    pub fn seqs(&self) -> Vec<Seq> {
        self.items.iter().map(|item| item.seq).collect()
    }

    /// The next message to publish.
    pub fn next(&self) -> Option<&Item> {
        self.items.iter().find(|item| item.verdict.is_none())
    }

    /// Judges the next message. On an ordered route the later ones of its key are not sent after a failure.
    pub(super) fn judge(&mut self, rules: &Rules, max_attempts: u32, outcome: Outcome) {
        let Some(at) = self.items.iter().position(|item| item.verdict.is_none()) else { return };
        let item = &mut self.items[at];
        let verdict = match outcome {
            Outcome::Confirmed => Verdict::Sent,
            Outcome::Rejected => Verdict::Dead,
            Outcome::Unreachable if rules.has(Bug::NoAnswerIsSent) => Verdict::Sent,
            Outcome::Unreachable => Verdict::Released,
            Outcome::Deferred | Outcome::Unconfirmed => {
                match step(item.state, Event::Failed { max_attempts }) {
                    Ok(Next::State(next)) if next.status == Status::Failed => Verdict::Failed,
                    _ => Verdict::Dead,
                }
            }
        };
        item.verdict = Some(verdict);
        let key = item.key;
        if verdict == Verdict::Sent || !rules.hold_failed || rules.has(Bug::PublishesPastAFailure) {
            return;
        }
        for later in self.items[at + 1..].iter_mut().filter(|later| later.key == key) {
            later.verdict = Some(Verdict::Released);
        }
    }

    /// The lease is over before all was sent: the rest goes back.
    pub(super) fn give_back(&mut self) {
        for item in &mut self.items {
            item.verdict.get_or_insert(Verdict::Released);
        }
    }
}

impl Relay {
    /// Just started: it knows nothing.
    pub(super) fn new(lanes: u8, channels: u8) -> Self {
        let lanes = usize::from(lanes);
        Self { leases: vec![None; lanes], hands: vec![vec![None; usize::from(channels)]; lanes] }
    }

    /// The batch of this lane and channel.
    pub fn hand(&self, (lane, channel): Place) -> Option<&Hand> {
        self.hands[usize::from(lane)][usize::from(channel)].as_ref()
    }

    pub(super) fn hand_mut(&mut self, (lane, channel): Place) -> &mut Option<Hand> {
        &mut self.hands[usize::from(lane)][usize::from(channel)]
    }

    /// Nothing of the lane is on its way.
    pub fn is_idle(&self, lane: u8) -> bool {
        self.hands[usize::from(lane)].iter().all(Option::is_none)
    }

    /// The epoch under which it believes to hold the lane.
    pub fn epoch(&self, lane: u8) -> Option<u8> {
        self.leases[usize::from(lane)].map(|lease| lease.epoch)
    }

    /// What tells relays apart; which of them is called the first means nothing.
    pub(super) fn looks(&self) -> impl Ord + use<> {
        let hand = |hand: &Hand| (hand.batch, hand.items.iter().map(|item| item.verdict).collect::<Vec<_>>());
        let hands = self.hands.iter().flatten().map(|held| held.as_ref().map(hand)).collect::<Vec<_>>();
        (self.leases.clone(), hands)
    }
}
