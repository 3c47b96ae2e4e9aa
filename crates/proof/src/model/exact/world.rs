//! The store, the log and the relays' memories, and what each step does to them.

use super::bounds::{Bounds, Faults};
use super::bug::Bug;
use super::log::{Log, Messages, Transaction};
use super::protocol::{Action, Protocol};
use super::relay::{Claim, Hand, Relay};

/// A lane, as the store knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    /// Rises when it changes hands.
    pub epoch: u8,
    /// Whose it is, as long as the lease lasts.
    pub owner: Option<u8>,
}

/// The whole: the store, the log, the relays' memories. Relays and senders are sorted, as their names mean nothing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    /// Leases.
    pub lanes: Vec<Lane>,
    /// What the store knows to be sent.
    pub settled: Messages,
    /// Kafka.
    pub log: Log,
    /// The processes.
    pub relays: Vec<Relay>,
    /// Faults that may still happen.
    pub left: Faults,
}

impl World {
    pub(super) fn new(bounds: &Bounds) -> Self {
        Self {
            lanes: vec![Lane { epoch: 0, owner: None }; usize::from(bounds.lanes)],
            settled: 0,
            log: Log::default(),
            relays: vec![Relay::new(bounds.lanes); usize::from(bounds.relays)],
            left: bounds.faults,
        }
    }

    /// Whether a lease is good in the eyes of the store.
    pub(super) fn stands(&self, lane: u8, epoch: u8) -> bool {
        let row = &self.lanes[usize::from(lane)];
        row.epoch == epoch && row.owner.is_some()
    }

    pub(super) fn free(&self, lane: u8) -> bool {
        self.lanes[usize::from(lane)].owner.is_none()
    }

    /// Whether nobody renews the lane's lease any more: its end is then a matter of time.
    pub(super) fn unattended(&self, lane: u8) -> bool {
        let row = &self.lanes[usize::from(lane)];
        row.owner.is_some_and(|owner| self.relays[usize::from(owner)].seat(lane).lease != Some(row.epoch))
    }

    fn memory(&mut self, relay: u8) -> &mut Relay {
        &mut self.relays[usize::from(relay)]
    }

    fn take(&mut self, relay: u8, lane: u8) {
        let row = &mut self.lanes[usize::from(lane)];
        *row = Lane { epoch: row.epoch + 1, owner: Some(relay) };
        let epoch = row.epoch;
        self.memory(relay).seat_mut(lane).lease = Some(epoch);
    }

    fn claim(&mut self, protocol: &Protocol, relay: u8, lane: u8) {
        let sender = self.relays[usize::from(relay)].sender.unwrap_or_else(|| self.log.sender());
        self.memory(relay).sender = Some(sender);
        if !protocol.has(Bug::ClaimWrittenAfterReading) {
            self.log.claim(lane, sender);
        }
        self.read(protocol, relay, lane);
    }

    fn read(&mut self, protocol: &Protocol, relay: u8, lane: u8) {
        let memory = &self.relays[usize::from(relay)];
        let Some(sender) = memory.sender else { return };
        let others = self.log.before(lane, sender).filter(|other| memory.thrown & 1 << other == 0);
        let mut others: Vec<u8> = others.filter(|other| *other != sender).collect();
        if protocol.has(Bug::OnlyTheLatestIsFenced) {
            others.drain(..others.len().saturating_sub(1));
        }
        let unfenced = others.iter().fold(0, |all, other| all | 1 << other);
        let early = protocol.has(Bug::NoteReadBeforeFencing);
        let notes = others.iter().filter(|_| early).map(|other| self.log.of(*other).note);
        let noted = notes.fold(0, |all, note| all | note) & protocol.of(lane);
        let many = |other: &u8| self.log.claims.iter().filter(|claim| claim.1 == *other).count() > 1;
        let alone = others.iter().filter(|other| protocol.has(Bug::NoteRemovedEarly) && !many(other));
        let alone = alone.fold(0, |all, other| all | 1 << other);
        let settled = self.settled;
        let seat = self.memory(relay).seat_mut(lane);
        seat.claim = Claim::Read { unfenced, noted };
        seat.formers = unfenced;
        seat.alone = alone;
        if protocol.has(Bug::BatchAskedForBeforeFencing)
            && let Some(hand) = &mut seat.hand
        {
            hand.messages &= !settled;
        }
    }

    fn fence(&mut self, protocol: &Protocol, relay: u8, lane: u8, sender: u8) {
        if !protocol.has(Bug::NobodyIsFenced) {
            self.log.fence(sender);
        }
        let early = protocol.has(Bug::NoteReadBeforeFencing);
        let note = if early { 0 } else { self.log.of(sender).note & protocol.of(lane) };
        if let Claim::Read { unfenced, noted } = &mut self.memory(relay).seat_mut(lane).claim {
            *unfenced &= !(1 << sender);
            *noted |= note;
        }
    }

    fn ask(&mut self, protocol: &Protocol, relay: u8, lane: u8) {
        let settled = self.settled;
        let memory = self.memory(relay);
        let seat = memory.seat_mut(lane);
        let Claim::Read { noted, .. } = seat.claim else { return };
        seat.claim = Claim::Good;
        let asks = !protocol.has(Bug::BatchNotAskedFor) && !protocol.has(Bug::BatchAskedForBeforeFencing);
        if let Some(hand) = seat.hand.as_mut().filter(|_| asks) {
            hand.messages &= !settled;
        }
        memory.open |= noted & !settled;
        if let Some(sender) = memory.sender
            && protocol.has(Bug::ClaimWrittenAfterReading)
        {
            self.log.claim(lane, sender);
        }
    }

    fn send(&mut self, protocol: &Protocol, relay: u8, lanes: u8) {
        let memory = &self.relays[usize::from(relay)];
        let Some(sender) = memory.sender else { return };
        let chosen = (0..protocol.bounds.lanes).filter(|lane| lanes & 1 << lane != 0);
        let messages = chosen.fold(0, |all, lane| all | memory.unsent(lane));
        let open = if protocol.has(Bug::NoteWithoutTheOpen) { 0 } else { memory.open };
        if self.log.send(sender, messages, open | messages) {
            self.memory(relay).sending = messages;
        } else {
            self.throw_away(protocol, relay);
        }
    }

    fn hear(&mut self, protocol: &Protocol, relay: u8) {
        let Some(sender) = self.memory(relay).sender else { return };
        if self.log.of(sender).transaction != Transaction::Landed {
            self.throw_away(protocol, relay);
            return;
        }
        self.log.forget(sender);
        let memory = self.memory(relay);
        memory.open |= memory.sending;
        memory.sending = 0;
    }

    fn abort(&mut self, relay: u8) {
        let Some(sender) = self.memory(relay).sender else { return };
        self.log.abort(sender);
        let memory = self.memory(relay);
        memory.sending = 0;
        for seat in memory.seats.iter_mut().filter(|seat| seat.lease.is_none()) {
            seat.hand = None;
        }
    }

    fn throw_away(&mut self, protocol: &Protocol, relay: u8) {
        if let Some(sender) = self.memory(relay).sender {
            self.log.forget(sender);
        }
        self.memory(relay).throw_away(protocol.has(Bug::OwnFormerClaimsIgnored));
    }

    fn crash(&mut self, protocol: &Protocol, relay: u8) {
        self.throw_away(protocol, relay);
        *self.memory(relay) = Relay::new(protocol.bounds.lanes);
    }

    fn settle(&mut self, protocol: &Protocol, relay: u8, lane: u8, answered: bool) {
        let Some(hand) = self.memory(relay).seat_mut(lane).hand.take() else { return };
        let stands = self.stands(lane, hand.epoch);
        if stands {
            self.settled |= hand.messages;
        }
        let memory = self.memory(relay);
        if stands && answered || !stands && protocol.has(Bug::FencedSettlementForgets) {
            memory.open &= !hand.messages;
        }
        // What became of it is for the next owner to see, which may be this relay.
        if (!stands || !answered) && memory.seat(lane).lease == Some(hand.epoch) {
            memory.lose(lane);
        }
    }

    fn withdraw(&mut self, protocol: &Protocol, relay: u8, lane: u8) {
        let memory = self.memory(relay);
        let Some(sender) = memory.sender else { return };
        let seat = memory.seat_mut(lane);
        seat.leaving = true;
        if !protocol.has(Bug::WithdrawnClaimStaysGood) {
            seat.unclaim();
        }
        if protocol.has(Bug::WithdrawalComesLate) {
            self.log.late.push((lane, sender));
        } else {
            self.log.remove(lane, sender);
        }
    }

    fn release(&mut self, relay: u8, lane: u8) {
        let seat = self.memory(relay).seat_mut(lane);
        seat.leaving = false;
        if let Some(epoch) = seat.lease.take()
            && self.stands(lane, epoch)
        {
            self.lanes[usize::from(lane)].owner = None;
        }
    }

    /// Takes a step. Faults are used up.
    pub(super) fn act(&mut self, protocol: &Protocol, action: Action) {
        match action {
            Action::Take(relay, lane) => self.take(relay, lane),
            Action::Lose(relay, lane) => self.memory(relay).lose(lane),
            Action::Expire(lane) => {
                self.left.pauses -= u8::from(!self.unattended(lane));
                self.lanes[usize::from(lane)].owner = None;
            }
            Action::Batch(relay, lane, size) => {
                let messages = protocol.batch(self, lane, size);
                let seat = self.memory(relay).seat_mut(lane);
                seat.hand = seat.lease.map(|epoch| Hand { epoch, messages });
            }
            Action::Claim(relay, lane) => {
                let lease = self.memory(relay).seat(lane).lease;
                self.left.blind -= u8::from(!lease.is_some_and(|epoch| self.stands(lane, epoch)));
                self.claim(protocol, relay, lane);
            }
            Action::Fence(relay, lane, sender) => self.fence(protocol, relay, lane, sender),
            Action::Ask(relay, lane) => self.ask(protocol, relay, lane),
            Action::Remove(relay, lane, sender) => {
                let seat = self.memory(relay).seat_mut(lane);
                seat.formers &= !(1 << sender);
                let alone = seat.alone & 1 << sender != 0;
                self.log.remove(lane, sender);
                if alone {
                    self.log.remove_note(sender);
                }
            }
            Action::Send(relay, lanes) => self.send(protocol, relay, lanes),
            Action::Land(sender) => self.log.land(sender),
            Action::Hear(relay) => self.hear(protocol, relay),
            Action::Abort(relay) => {
                self.left.aborts -= 1;
                self.abort(relay);
            }
            Action::GiveUp(relay) => {
                self.left.lost -= 1;
                if protocol.has(Bug::UnknownEndKeepsTheSender) {
                    self.abort(relay);
                } else {
                    self.throw_away(protocol, relay);
                }
            }
            Action::Settle(relay, lane, answered) => {
                self.left.lost -= u8::from(!answered);
                self.settle(protocol, relay, lane, answered);
            }
            Action::Withdraw(relay, lane) => {
                self.left.releases -= 1;
                self.withdraw(protocol, relay, lane);
            }
            Action::Late(lane, sender) => {
                self.log.late.retain(|claim| *claim != (lane, sender));
                self.log.remove(lane, sender);
            }
            Action::Release(relay, lane) => self.release(relay, lane),
            Action::Crash(relay) => {
                self.left.crashes -= 1;
                self.crash(protocol, relay);
            }
        }
    }
}
