//! Worlds that need not be told apart.

use super::log::{Senders, Transaction, bits};
use super::relay::{Claim, Hand};
use super::world::World;

impl World {
    /// Worlds that differ only by the names of relays and senders are the same; senders that nobody can meet again are
    /// forgotten.
    pub(super) fn sort(&mut self) {
        let rank = |sender: u8| self.log.claims.iter().position(|claim| claim.1 == sender);
        let owned = |relay: usize| {
            let mut owners = self.lanes.iter().map(|lane| lane.owner);
            owners.position(|owner| owner.map(usize::from) == Some(relay))
        };
        let mut places: Vec<usize> = (0..self.relays.len()).collect();
        places.sort_by_cached_key(|place| {
            let relay = &self.relays[*place];
            let seats: Vec<_> =
                relay.seats.iter().map(|seat| (seat.lease, seat.hand, seat.leaving)).collect();
            (owned(*place), relay.sender.and_then(rank), relay.sender.is_some(), seats)
        });
        if !places.is_sorted() {
            self.relays = places.iter().map(|place| self.relays[*place].clone()).collect();
            for lane in &mut self.lanes {
                let place =
                    lane.owner.and_then(|owner| places.iter().position(|place| *place == usize::from(owner)));
                lane.owner = place.and_then(|place| u8::try_from(place).ok());
            }
        }
        self.rename();
    }

    /// Of epochs it matters only which is the last, and notes of what is settled say nothing to anybody.
    pub(super) fn simplify(&mut self) {
        for (lane, row) in (0..).zip(&mut self.lanes) {
            let last = |epoch: u8| u8::from(row.owner.is_some() && row.epoch == epoch);
            for seat in self.relays.iter_mut().map(|relay| relay.seat_mut(lane)) {
                seat.lease = seat.lease.map(last);
                seat.hand = seat.hand.map(|hand| Hand { epoch: last(hand.epoch), ..hand });
                if let Claim::Read { noted, .. } = &mut seat.claim {
                    *noted &= !self.settled;
                }
            }
            row.epoch = 1;
        }
        for sender in &mut self.log.senders {
            sender.note &= !self.settled;
            if let Transaction::Sent { note, .. } = &mut sender.transaction {
                *note &= !self.settled;
            }
        }
    }

    fn rename(&mut self) {
        let mut known: Vec<u8> = self.log.claims.iter().map(|claim| claim.1).collect();
        for relay in &self.relays {
            known.extend(relay.sender);
            known.extend(relay.seats.iter().flat_map(|seat| bits(seat.formers)));
        }
        known.extend(self.log.late.iter().map(|claim| claim.1));
        let asked = |sender: &u8| matches!(self.log.of(*sender).transaction, Transaction::Sent { .. });
        known.extend((0..).take(self.log.senders.len()).filter(asked));
        let mut names: Vec<u8> = Vec::new();
        for sender in known {
            if !names.contains(&sender) {
                names.push(sender);
            }
        }
        let name = |sender: u8| names.iter().position(|known| *known == sender);
        let one = |sender: u8| name(sender).and_then(|name| u8::try_from(name).ok());
        let set =
            |senders: Senders| bits(senders).filter_map(name).fold(0, |all: Senders, name| all | 1 << name);
        self.log.senders = names.iter().map(|sender| *self.log.of(*sender)).collect();
        for claim in self.log.claims.iter_mut().chain(&mut self.log.late) {
            claim.1 = one(claim.1).unwrap_or(claim.1);
        }
        for relay in &mut self.relays {
            relay.sender = relay.sender.and_then(one);
            relay.thrown = set(relay.thrown);
            for seat in &mut relay.seats {
                seat.formers = set(seat.formers);
                seat.alone = set(seat.alone);
                if let Claim::Read { unfenced, .. } = &mut seat.claim {
                    *unfenced = set(*unfenced);
                }
            }
        }
    }
}
