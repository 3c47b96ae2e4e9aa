//! A relay's memory. A crash empties it, and it may be out of date whenever the relay acts on it.

use super::log::{Messages, Senders};

/// How far a relay has got with its claim of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Claim {
    /// It has none.
    None,
    /// It is written, and those before it are read.
    Read {
        /// Of those, who is not fenced yet.
        unfenced: Senders,
        /// What the notes of the others name.
        noted: Messages,
    },
    /// The store was asked: messages may be sent.
    Good,
}

/// A batch that was claimed from the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hand {
    /// The lease under which it was.
    pub epoch: u8,
    /// Its messages, without those that somebody else has settled.
    pub messages: Messages,
}

/// What a relay knows of one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Seat {
    /// The lease that it believes to hold.
    pub lease: Option<u8>,
    /// The sender's claim.
    pub claim: Claim,
    /// Who claimed the lane before it, and whose claims may have to be removed.
    pub formers: Senders,
    /// Of those, who had no other lane when the claims were read. Only who removes notes by that remembers it.
    pub alone: Senders,
    /// The batch in hand.
    pub hand: Option<Hand>,
    /// The claim was withdrawn, and the lease is about to be given back.
    pub leaving: bool,
}

/// What one relay process remembers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Relay {
    /// Its sender, once it needs one.
    pub sender: Option<u8>,
    /// In the log, and perhaps not settled.
    pub open: Messages,
    /// The messages of its transaction.
    pub sending: Messages,
    /// By lane.
    pub seats: Vec<Seat>,
    /// Senders that it has thrown away. Only who ignores them remembers them.
    pub thrown: Senders,
}

impl Seat {
    /// There is no claim any more, or none that counts.
    pub(super) fn unclaim(&mut self) {
        self.claim = Claim::None;
        self.formers = 0;
        self.alone = 0;
    }
}

impl Relay {
    /// Just started.
    pub(super) fn new(lanes: u8) -> Self {
        let seat = Seat { lease: None, claim: Claim::None, formers: 0, alone: 0, hand: None, leaving: false };
        Self { sender: None, open: 0, sending: 0, seats: vec![seat; usize::from(lanes)], thrown: 0 }
    }

    pub(super) fn seat(&self, lane: u8) -> &Seat {
        &self.seats[usize::from(lane)]
    }

    pub(super) fn seat_mut(&mut self, lane: u8) -> &mut Seat {
        &mut self.seats[usize::from(lane)]
    }

    /// What of a lane's batch has to be sent.
    pub(super) fn unsent(&self, lane: u8) -> Messages {
        self.seat(lane).hand.map_or(0, |hand| hand.messages & !self.open)
    }

    /// Whether messages of a lane can be sent, as far as the relay knows.
    pub(super) fn may_send(&self, lane: u8) -> bool {
        let seat = self.seat(lane);
        seat.claim == Claim::Good && seat.lease.is_some() && self.unsent(lane) != 0
    }

    /// Whether a lane's batch has only to be settled.
    pub(super) fn may_settle(&self, lane: u8) -> bool {
        self.seat(lane).hand.is_some() && self.unsent(lane) == 0
    }

    /// The lease is over. Of the batch remains what is on its way.
    pub(super) fn lose(&mut self, lane: u8) {
        let sending = self.sending;
        let seat = self.seat_mut(lane);
        seat.lease = None;
        seat.leaving = false;
        if seat.claim != Claim::Good {
            seat.unclaim();
        }
        if seat.hand.is_some_and(|hand| hand.messages & sending == 0) {
            seat.hand = None;
        }
    }

    /// Nobody knows how the transaction ended, or the sender is fenced: it is thrown away with all it knew.
    pub(super) fn throw_away(&mut self, remembers: bool) {
        if let Some(sender) = self.sender.take()
            && remembers
        {
            self.thrown |= 1 << sender;
        }
        self.open = 0;
        self.sending = 0;
        for seat in &mut self.seats {
            seat.unclaim();
            if seat.lease.is_none() {
                seat.hand = None;
            }
        }
    }
}
