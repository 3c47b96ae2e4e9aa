//! Everything that can happen, one step at a time.

use stateright::{Model, Property};

use super::bounds::Bounds;
use super::bug::Bug;
use super::log::{Messages, Transaction, bits};
use super::relay::{Claim, Relay, Seat};
use super::witness::properties;
use super::world::World;
use crate::model::Faulty;

/// One step: the place of the relay, then the lane. Places change from step to step, see [`World`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A relay takes a free lane.
    Take(u8, u8),
    /// A relay hears that its lease of a lane is over.
    Lose(u8, u8),
    /// The lease of a lane runs out.
    Expire(u8),
    /// A relay claims a batch of a lane from the store, of so many messages.
    Batch(u8, u8, u8),
    /// A relay writes its claim of a lane into the log and reads those before it.
    Claim(u8, u8),
    /// A relay fences one who claimed the lane before, and reads its note.
    Fence(u8, u8, u8),
    /// A relay asks the store what of the notes and of its batch is settled.
    Ask(u8, u8),
    /// A relay removes the claim of one who claimed the lane before.
    Remove(u8, u8, u8),
    /// A relay sends its batches of some lanes, one bit each, in a transaction.
    Send(u8, u8),
    /// A commit of a sender is there.
    Land(u8),
    /// A relay hears how its transaction ended.
    Hear(u8),
    /// A relay aborts its transaction.
    Abort(u8),
    /// A relay waits no longer to hear how its transaction ended.
    GiveUp(u8),
    /// A relay settles its batch of a lane, and hears of it or not.
    Settle(u8, u8, bool),
    /// A relay withdraws its claim of a lane.
    Withdraw(u8, u8),
    /// A sender's claim of a lane is withdrawn when nobody waits for it any more.
    Late(u8, u8),
    /// A relay gives the lease of a lane back.
    Release(u8, u8),
    /// A relay dies; another starts in its place.
    Crash(u8),
}

/// The protocol within bounds, as it is or with a fault planted.
#[derive(Clone, Debug)]
pub struct Protocol {
    /// How much of everything there is.
    pub bounds: Bounds,
    bug: Option<Bug>,
}

impl Protocol {
    pub(super) fn sound(bounds: Bounds) -> Self {
        Self { bounds, bug: None }
    }

    pub(super) fn with(bug: Bug) -> Self {
        Self { bounds: bug.bounds(), bug: Some(bug) }
    }

    pub(super) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    pub(super) fn is_sound(&self) -> bool {
        self.bug.is_none()
    }

    /// The messages of a lane.
    pub(super) fn of(&self, lane: u8) -> Messages {
        let places = self.bounds.messages.iter().enumerate().filter(|(_, of)| **of == lane);
        places.fold(0, |all, (place, _)| all | 1 << place)
    }

    /// What of a lane is not settled.
    fn unsettled(&self, world: &World, lane: u8) -> Messages {
        self.of(lane) & !world.settled
    }

    /// The next `size` messages of a lane that are not settled.
    pub(super) fn batch(&self, world: &World, lane: u8, size: u8) -> Messages {
        let unsettled = self.unsettled(world, lane);
        let messages = (0..Messages::BITS).map(|place| unsettled & 1 << place).filter(|bit| *bit != 0);
        messages.take(usize::from(size)).sum()
    }

    /// Whether a relay may think of claiming a lane.
    fn may_claim(&self, seat: &Seat) -> bool {
        let needed = seat.hand.is_some() || self.bounds.ahead;
        seat.claim == Claim::None && !seat.leaving && needed
    }

    fn relays(&self) -> impl Iterator<Item = u8> + use<> {
        0..self.bounds.relays
    }

    /// What a relay can do about one lane.
    fn about(&self, world: &World, relay: u8, lane: u8, actions: &mut Vec<Action>) {
        let memory = &world.relays[usize::from(relay)];
        let seat = memory.seat(lane);
        match seat.lease {
            Some(epoch) if !world.stands(lane, epoch) => actions.push(Action::Lose(relay, lane)),
            Some(_) if seat.leaving => actions.push(Action::Release(relay, lane)),
            Some(_) if seat.hand.is_none() => {
                let most = self.unsettled(world, lane).count_ones().min(u32::from(self.bounds.batch));
                actions.extend((1..).take(most as usize).map(|size| Action::Batch(relay, lane, size)));
            }
            None if seat.hand.is_none() && world.free(lane) => actions.push(Action::Take(relay, lane)),
            _ => {}
        }
        match seat.claim {
            Claim::None
                if self.may_claim(seat) && seat.lease.is_some_and(|epoch| world.stands(lane, epoch)) =>
            {
                actions.push(Action::Claim(relay, lane));
            }
            Claim::Read { unfenced: 0, .. } => actions.push(Action::Ask(relay, lane)),
            Claim::Read { unfenced, .. } => {
                actions.extend(bits(unfenced).map(|sender| Action::Fence(relay, lane, sender)));
            }
            Claim::Good => {
                let done = |sender: &u8| {
                    let left = world.log.of(*sender).note & self.of(lane) & memory.open;
                    left == 0 || self.has(Bug::FormerClaimRemovedEarly)
                };
                let done = bits(seat.formers).filter(done);
                actions.extend(done.map(|sender| Action::Remove(relay, lane, sender)));
            }
            Claim::None => {}
        }
        if memory.may_settle(lane) {
            actions.push(Action::Settle(relay, lane, true));
        }
    }

    /// What a relay does about one lane without knowing better, or because somebody wishes it.
    fn mishaps(&self, world: &World, relay: u8, lane: u8, actions: &mut Vec<Action>) {
        let (left, memory) = (world.left, &world.relays[usize::from(relay)]);
        let seat = memory.seat(lane);
        let Some(epoch) = seat.lease else { return };
        let stands = world.stands(lane, epoch);
        if left.blind > 0 && self.may_claim(seat) && !stands {
            actions.push(Action::Claim(relay, lane));
        }
        if left.lost > 0 && memory.may_settle(lane) && stands {
            actions.push(Action::Settle(relay, lane, false));
        }
        let open = memory.open & self.of(lane) != 0 && !self.has(Bug::ReleasedWhileOpen);
        if left.releases > 0 && seat.claim == Claim::Good && seat.hand.is_none() && !open {
            actions.push(Action::Withdraw(relay, lane));
        }
    }

    /// What a relay can do about its transaction.
    fn transact(&self, world: &World, relay: u8, actions: &mut Vec<Action>) {
        let memory = &world.relays[usize::from(relay)];
        let Some(sender) = memory.sender else { return };
        if memory.sending == 0 {
            let ready = (0..self.bounds.lanes).filter(|lane| memory.may_send(*lane));
            let ready = ready.fold(0, |all, lane| all | 1 << lane);
            let choices = (1_u8..1 << self.bounds.lanes).filter(|lanes| lanes & !ready == 0);
            actions.extend(choices.map(|lanes| Action::Send(relay, lanes)));
            return;
        }
        if !matches!(world.log.of(sender).transaction, Transaction::Sent { .. }) {
            actions.push(Action::Hear(relay));
        }
    }
}

impl Faulty for Protocol {
    fn helpful(&self, world: &World) -> Vec<Action> {
        let mut actions = Vec::new();
        for relay in self.relays() {
            for lane in 0..self.bounds.lanes {
                self.about(world, relay, lane, &mut actions);
            }
            self.transact(world, relay, &mut actions);
        }
        for (sender, row) in (0..).zip(&world.log.senders) {
            if matches!(row.transaction, Transaction::Sent { .. }) {
                actions.push(Action::Land(sender));
            }
        }
        actions.extend(world.log.late.iter().map(|(lane, sender)| Action::Late(*lane, *sender)));
        let lanes = (0..self.bounds.lanes).filter(|lane| world.unattended(*lane));
        actions.extend(lanes.map(Action::Expire));
        actions
    }

    fn harmful(&self, world: &World, actions: &mut Vec<Action>) {
        let left = &world.left;
        for lane in 0..self.bounds.lanes {
            let row = &world.lanes[usize::from(lane)];
            if left.pauses > 0 && row.owner.is_some() && !world.unattended(lane) {
                actions.push(Action::Expire(lane));
            }
        }
        for relay in self.relays() {
            let memory = &world.relays[usize::from(relay)];
            if left.crashes > 0 && *memory != Relay::new(self.bounds.lanes) {
                actions.push(Action::Crash(relay));
            }
            if let Some(sender) = memory.sender.filter(|_| memory.sending != 0) {
                if left.aborts > 0 && matches!(world.log.of(sender).transaction, Transaction::Sent { .. }) {
                    actions.push(Action::Abort(relay));
                }
                if left.lost > 0 {
                    actions.push(Action::GiveUp(relay));
                }
            }
            for lane in 0..self.bounds.lanes {
                self.mishaps(world, relay, lane, actions);
            }
        }
    }
}

impl Model for Protocol {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.bounds)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        actions.extend(self.helpful(world));
        self.harmful(world, actions);
    }

    fn next_state(&self, before: &World, action: Action) -> Option<World> {
        let mut world = before.clone();
        world.act(self, action);
        world.simplify();
        world.sort();
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties(self)
    }
}
