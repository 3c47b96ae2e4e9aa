//! Everything that can happen, one step at a time: stateright asks for each state what may come next.

use message::{Event, State};
use stateright::{Model, Property};

use super::Faulty;
use super::bounds::{Bounds, Faults, MOST};
use super::bug::Bug;
use super::relay::{Lease, Outcome, Place, Relay};
use super::store::{Lane, Row, Rules, Seq, Store};
use super::witness::{Witness, properties};

/// The whole: the store, the relays' memories, the broker, and an onlooker who notices wrongs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    /// The database.
    pub store: Store,
    /// The processes.
    pub relays: Vec<Relay>,
    /// What the broker has of each message.
    pub broker: [Stored; MOST],
    /// Faults that may still happen.
    pub left: Faults,
    /// What was seen.
    pub witness: Witness,
}

/// What the broker's log has of one message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stored {
    /// One bit for each delivery number.
    pub deliveries: u8,
    /// One of them is there more than once.
    pub twice: bool,
}

impl Stored {
    /// Whether this delivery is in the log.
    pub fn has(&self, delivery: u32) -> bool {
        self.deliveries & (1 << delivery) != 0
    }

    fn add(&mut self, delivery: u32) {
        self.twice |= self.has(delivery);
        self.deliveries |= 1 << delivery;
    }
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// An application writes the next message.
    Append,
    /// A relay's beat takes a free lane.
    Take {
        /// Who.
        relay: u8,
        /// Which.
        lane: u8,
        /// Whether the relay hears of it.
        answered: bool,
    },
    /// A relay's beat renews a lease, or hears that it is lost.
    Renew {
        /// Who.
        relay: u8,
        /// Which.
        lane: u8,
    },
    /// A lease runs out.
    Expire {
        /// Which.
        lane: u8,
    },
    /// A relay gives a lane back.
    Release {
        /// Who.
        relay: u8,
        /// Which.
        lane: u8,
    },
    /// A relay dies; another starts in its place.
    Crash {
        /// Who.
        relay: u8,
    },
    /// A relay settles the batch in its hand, if there is one, and claims the next, in one transaction.
    Turn {
        /// Who.
        relay: u8,
        /// Of which lane and channel.
        place: Place,
        /// Whether it claims: not while it is draining.
        claims: bool,
        /// Whether the relay hears of it.
        answered: bool,
    },
    /// A relay publishes the next message in its hand.
    Publish {
        /// Who.
        relay: u8,
        /// Of which lane and channel.
        place: Place,
        /// What the broker answers.
        outcome: Outcome,
    },
    /// A relay knows that its lease is over and sends no more of its batch.
    GiveBack {
        /// Who.
        relay: u8,
        /// Of which lane and channel.
        place: Place,
    },
    /// The wait of a failed message is over.
    Due {
        /// Which.
        seq: Seq,
    },
    /// An operator sends a Dead message again.
    Requeue {
        /// Which.
        seq: Seq,
    },
    /// An operator gives a Dead message up.
    Discard {
        /// Which.
        seq: Seq,
    },
    /// An operator deletes a record.
    Delete {
        /// Which.
        seq: Seq,
    },
}

/// The protocol within bounds, as it is or with a fault planted.
#[derive(Clone, Debug)]
pub struct Protocol {
    /// How much of everything there is.
    pub bounds: Bounds,
    rules: Rules,
}

impl Protocol {
    /// The protocol as it is.
    pub fn sound(bounds: Bounds) -> Self {
        Self::new(bounds, None)
    }

    /// The protocol with one fault.
    pub fn with(bug: Bug) -> Self {
        Self::new(bug.bounds(), Some(bug))
    }

    fn new(bounds: Bounds, bug: Option<Bug>) -> Self {
        let rules = Rules {
            hold_failed: bounds.ordered,
            hold_dead: bounds.ordered && bounds.hold_dead,
            batch: usize::from(bounds.batch),
            drain: 1,
            bug,
        };
        Self { bounds, rules }
    }

    fn work(&self, world: &World, relay: u8, lane: u8, actions: &mut Vec<Action>) {
        let memory = &world.relays[usize::from(relay)];
        let lease = memory.epoch(lane);
        for place in self.places(lane) {
            match memory.hand(place) {
                Some(hand) if hand.next().is_some() => {
                    actions.push(Action::Publish { relay, place, outcome: Outcome::Confirmed });
                    if lease != Some(hand.epoch) {
                        actions.push(Action::GiveBack { relay, place });
                    }
                }
                None if lease.is_none() => {}
                _ => actions.push(Action::Turn { relay, place, claims: lease.is_some(), answered: true }),
            }
        }
        actions.push(match lease {
            Some(_) => Action::Renew { relay, lane },
            None => Action::Take { relay, lane, answered: true },
        });
    }

    /// A lane's batches go by these.
    fn places(&self, lane: u8) -> impl Iterator<Item = Place> + use<> {
        (0..self.bounds.channels).map(move |channel| (lane, channel))
    }

    fn mishaps(&self, world: &World, relay: u8, lane: u8, actions: &mut Vec<Action>) {
        let left = world.left;
        let memory = &world.relays[usize::from(relay)];
        let lease = memory.epoch(lane);
        if left.lost > 0 && lease.is_none() {
            actions.push(Action::Take { relay, lane, answered: false });
        }
        if left.releases > 0 && lease.is_some() && memory.is_idle(lane) {
            actions.push(Action::Release { relay, lane });
        }
        for place in self.places(lane) {
            let hand = memory.hand(place);
            let done = hand.is_none_or(|hand| hand.next().is_none());
            if left.failures > 0 && !done {
                let outcomes = self.bounds.trouble.iter();
                actions.extend(outcomes.map(|outcome| Action::Publish { relay, place, outcome: *outcome }));
            }
            if left.lost > 0 && done && (lease.is_some() || hand.is_some()) {
                actions.push(Action::Turn { relay, place, claims: lease.is_some(), answered: false });
            }
            if left.releases > 0 && lease.is_some() && done && hand.is_some() {
                actions.push(Action::Turn { relay, place, claims: false, answered: true });
            }
        }
    }
}

impl Faulty for Protocol {
    fn helpful(&self, world: &World) -> Vec<Action> {
        let mut actions = Vec::new();
        if world.store.rows.len() < self.bounds.keys.len() {
            actions.push(Action::Append);
        }
        for lane in 0..self.bounds.lanes {
            if world.unattended(lane) {
                actions.push(Action::Expire { lane });
            }
            for relay in 0..self.bounds.relays {
                self.work(world, relay, lane, &mut actions);
            }
        }
        let waiting = world.store.messages().filter(|(_, row)| row.waits && !row.ready);
        actions.extend(waiting.map(|(seq, _)| Action::Due { seq }));
        actions
    }

    fn harmful(&self, world: &World, actions: &mut Vec<Action>) {
        let left = world.left;
        for relay in 0..self.bounds.relays {
            if left.crashes > 0 {
                actions.push(Action::Crash { relay });
            }
            for lane in 0..self.bounds.lanes {
                self.mishaps(world, relay, lane, actions);
            }
        }
        if left.pauses > 0 {
            actions.extend(
                (0..self.bounds.lanes)
                    .filter(|lane| !world.unattended(*lane))
                    .map(|lane| Action::Expire { lane }),
            );
        }
        if left.mends > 0 {
            for (seq, _) in world.store.messages() {
                actions.extend([Action::Requeue { seq }, Action::Discard { seq }, Action::Delete { seq }]);
            }
        }
    }
}

impl World {
    fn new(bounds: &Bounds) -> Self {
        let keys = bounds.keys.iter().map(|key| usize::from(*key) + 1).max().unwrap_or_default();
        let mut world = Self {
            store: Store {
                rows: Vec::new(),
                lanes: vec![Lane { epoch: 0, owner: None, expired: false }; usize::from(bounds.lanes)],
                batches: Vec::new(),
                holds: vec![None; keys],
                channels: bounds.channels,
            },
            relays: vec![Relay::new(bounds.lanes, bounds.channels); usize::from(bounds.relays)],
            broker: [Stored::default(); MOST],
            left: bounds.faults,
            witness: Witness::default(),
        };
        for _ in 0..bounds.written {
            world.append(bounds);
        }
        world
    }

    fn append(&mut self, bounds: &Bounds) {
        let key = bounds.keys[self.store.rows.len()];
        self.store.rows.push(Some(Row { state: State::NEW, key, ready: true, held: false, waits: false }));
    }

    /// Whether nobody renews the lane's lease any more: its end is then a matter of time.
    fn unattended(&self, lane: u8) -> bool {
        let row = &self.store.lanes[usize::from(lane)];
        row.owner.is_some_and(|owner| self.relays[usize::from(owner)].epoch(lane) != Some(row.epoch))
    }

    /// The smallest number that no batch has that anybody remembers: as good as a random one.
    fn fresh(&self) -> u8 {
        let hands = self
            .relays
            .iter()
            .flat_map(|relay| relay.hands.iter().flatten().flatten().map(|hand| hand.batch));
        let mut known: Vec<u8> = hands.chain(self.store.batches.iter().map(|batch| batch.id)).collect();
        known.sort_unstable();
        known.dedup();
        (0..)
            .zip(&known)
            .find(|(number, id)| number != *id)
            .map_or(u8::try_from(known.len()).expect("a model has a handful of batches"), |(number, _)| {
                number
            })
    }

    fn owns(&self, relay: u8, lane: u8, epoch: u8) -> bool {
        let row = &self.store.lanes[usize::from(lane)];
        row.owner == Some(relay) && row.epoch == epoch
    }

    fn take(&mut self, rules: &Rules, relay: u8, lane: u8, answered: bool) {
        if let Some(epoch) = self.store.take(rules, lane, relay, &mut self.witness)
            && answered
        {
            self.relays[usize::from(relay)].leases[usize::from(lane)] = Some(Lease { epoch, doubted: false });
        }
    }

    fn renew(&mut self, rules: &Rules, relay: u8, lane: u8) {
        let memory = &mut self.relays[usize::from(relay)];
        let idle = memory.is_idle(lane);
        let lease = &mut memory.leases[usize::from(lane)];
        // Nobody knows what a claim without an answer did: it is undone with the lease.
        if lease.as_ref().is_some_and(|lease| lease.doubted && idle) {
            return self.release(rules, relay, lane);
        }
        if lease.as_ref().is_some_and(|lease| self.store.stands(lane, lease.epoch)) {
            self.store.lanes[usize::from(lane)].expired = false;
        } else {
            *lease = None;
        }
    }

    fn turn(&mut self, rules: &Rules, relay: u8, place: Place, claims: bool, answered: bool) {
        let (r, lane) = (usize::from(relay), place.0);
        let hand = self.relays[r].hand(place).cloned();
        if let Some(hand) = &hand {
            let owner = self.owns(relay, lane, hand.epoch);
            if let Some(closed) = self.store.settle(rules, lane, hand, &mut self.witness) {
                self.witness.touched(owner, hand.batch, &closed);
            }
        }
        let mut claimed = None;
        if let Some(epoch) = self.relays[r].epoch(lane).filter(|_| claims) {
            let fresh = self.fresh();
            claimed = self.store.claim(rules, place, epoch, fresh, &mut self.witness);
            if let Some(batch) =
                claimed.as_ref().and(self.store.batches.iter().find(|batch| batch.id == fresh))
            {
                let owner = self.owns(relay, lane, epoch);
                self.witness.touched(owner, fresh, batch);
            }
        }
        if answered {
            *self.relays[r].hand_mut(place) = claimed;
        } else if let Some(lease) = &mut self.relays[r].leases[usize::from(lane)] {
            lease.doubted |= !rules.has(Bug::UnansweredClaimKeepsTheLane);
        }
    }

    fn publish(&mut self, protocol: &Protocol, relay: u8, place: Place, outcome: Outcome) {
        let Some(mut hand) = self.relays[usize::from(relay)].hand_mut(place).take() else { return };
        if let Some(item) = hand.next().filter(|_| outcome.stored()) {
            self.witness.storing(&self.store, &self.broker, item.seq, item.key);
            self.broker[usize::from(item.seq) - 1].add(item.state.delivery);
        }
        hand.judge(&protocol.rules, protocol.bounds.max_attempts, outcome);
        *self.relays[usize::from(relay)].hand_mut(place) = Some(hand);
    }

    fn give_back(&mut self, relay: u8, place: Place) {
        if let Some(hand) = self.relays[usize::from(relay)].hand_mut(place) {
            hand.give_back();
        }
    }

    fn release(&mut self, rules: &Rules, relay: u8, lane: u8) {
        if let Some(lease) = self.relays[usize::from(relay)].leases[usize::from(lane)].take() {
            self.store.release(rules, lane, lease.epoch);
        }
    }

    /// Relays that differ only by their place are the same world.
    fn sort(&mut self) {
        let owned = |relay: usize| {
            let mut owners = self.store.lanes.iter().map(|lane| lane.owner);
            owners.position(|owner| owner.map(usize::from) == Some(relay))
        };
        let mut places: Vec<usize> = (0..self.relays.len()).collect();
        places.sort_by_cached_key(|place| (owned(*place), self.relays[*place].looks()));
        if places.is_sorted() {
            return;
        }
        self.relays = places.iter().map(|place| self.relays[*place].clone()).collect();
        for lane in &mut self.store.lanes {
            let place =
                lane.owner.and_then(|owner| places.iter().position(|place| *place == usize::from(owner)));
            lane.owner = place.and_then(|place| u8::try_from(place).ok());
        }
    }

    fn amend(&mut self, rules: &Rules, seq: Seq, event: Event) {
        if self.store.amend(rules, seq, event) {
            self.left.mends -= 1;
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

    /// Nothing, when the action changes nothing.
    fn next_state(&self, before: &World, action: Action) -> Option<World> {
        let mut world = before.clone();
        let rules = &self.rules;
        match action {
            Action::Append => world.append(&self.bounds),
            Action::Take { relay, lane, answered } => {
                world.left.lost -= u8::from(!answered);
                world.take(rules, relay, lane, answered);
            }
            Action::Renew { relay, lane } => world.renew(rules, relay, lane),
            Action::Expire { lane } => {
                world.left.pauses -= u8::from(!world.unattended(lane));
                world.store.lanes[usize::from(lane)].expired = true;
            }
            Action::Release { relay, lane } => {
                world.left.releases -= 1;
                world.release(rules, relay, lane);
            }
            Action::Crash { relay } => {
                world.left.crashes -= 1;
                world.relays[usize::from(relay)] = Relay::new(self.bounds.lanes, self.bounds.channels);
            }
            Action::Turn { relay, place, claims, answered } => {
                world.left.lost -= u8::from(!answered);
                world.turn(rules, relay, place, claims, answered);
            }
            Action::Publish { relay, place, outcome } => {
                world.left.failures -= u8::from(outcome != Outcome::Confirmed);
                world.publish(self, relay, place, outcome);
            }
            Action::GiveBack { relay, place } => world.give_back(relay, place),
            Action::Due { seq } => world.store.promote(seq),
            Action::Requeue { seq } => world.amend(rules, seq, Event::Requeued),
            Action::Discard { seq } => world.amend(rules, seq, Event::Discarded),
            Action::Delete { seq } => world.amend(rules, seq, Event::Deleted),
        }
        let same = world.store == before.store && world.relays == before.relays;
        if same && world.witness == before.witness {
            return None;
        }
        world.witness.compare(
            &before.store,
            &world.store,
            action,
            self.bounds.ordered && !self.bounds.hold_dead,
        );
        world.sort();
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties(self)
    }
}
