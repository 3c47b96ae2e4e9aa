//! What an onlooker who sees everything notices, and the properties that must hold.
//!
//! The onlooker shares no code with the store: it knows who owns a lane, what the broker has, and the table of
//! allowed transitions written once more by hand.

use message::{State, Status};
use stateright::{Model, Property};

use super::Faulty;
use super::bounds::MOST;
use super::relay::Outcome;
use super::store::{Batch, Row, Seq, Store};
use super::world::{Action, Protocol, Stored, World};

/// Wrongs that show in a step, not in a state, and the little memory that is needed to see them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Witness {
    /// The highest epoch of each lane so far.
    epochs: [u8; MOST],
    /// Messages that their followers may pass, because they were Dead on a route that skips.
    passed: [bool; MOST],
    /// An epoch fell or came twice.
    repeated: bool,
    /// A lane was taken from an owner whose lease stood.
    stolen: bool,
    /// Somebody who does not own the lane, or does not mean this batch, opened or closed it.
    foreign: bool,
    /// The transition function refused what store or relay asked of it.
    pub(super) refused: bool,
    /// A message changed in a way that the table does not have.
    illegal: bool,
    /// A message is gone and nobody removed it.
    vanished: bool,
    /// A message reached the broker before an earlier one of its key.
    overtaken: bool,
}

impl Witness {
    pub(super) fn epoch(&mut self, lane: u8, epoch: u8) {
        let highest = &mut self.epochs[usize::from(lane)];
        self.repeated |= epoch <= *highest;
        *highest = epoch.max(*highest);
    }

    pub(super) fn taken(&mut self, free: bool) {
        self.stolen |= !free;
    }

    /// A batch was opened or closed. `meant` is the batch that the relay had in mind.
    pub(super) fn touched(&mut self, owner: bool, meant: u8, batch: &Batch) {
        self.foreign |= !owner || batch.id != meant;
    }

    /// The broker is about to store a message.
    pub(super) fn storing(&mut self, store: &Store, broker: &[Stored], seq: Seq, key: u8) {
        let new = |seq: Seq| broker[usize::from(seq) - 1].deliveries == 0;
        let passes = |earlier: Seq| new(earlier) && !self.passed[usize::from(earlier) - 1];
        self.overtaken |= new(seq) && earlier(store, seq, key).any(|(earlier, _)| passes(earlier));
    }

    /// Compares the store before and after a step.
    pub(super) fn compare(&mut self, before: &Store, after: &Store, action: Action, skips: bool) {
        for (seq, row) in before.messages() {
            let (was, is) = (before.status(seq), after.status(seq));
            self.illegal |= was != is && !was.is_some_and(|was| allowed(was, is));
            let removing = matches!(action, Action::Discard { .. } | Action::Delete { .. });
            match after.row(seq) {
                Some(now) => self.illegal |= now.state.delivery < row.state.delivery,
                None => self.vanished |= !removing,
            }
            self.passed[usize::from(seq) - 1] |= skips && is == Some(Status::Dead);
        }
    }
}

/// The table of requirement A2 as people read it: who may become what.
fn allowed(was: Status, is: Option<Status>) -> bool {
    use Status::{Dead, Failed, InFlight, Pending, Sent};
    match is {
        Some(InFlight) => matches!(was, Pending | Failed),
        Some(Sent | Failed) => was == InFlight,
        Some(Dead) => was == InFlight,
        Some(Pending) => matches!(was, InFlight | Dead),
        None => was != InFlight,
    }
}

fn earlier(store: &Store, seq: Seq, key: u8) -> impl Iterator<Item = (Seq, &Row)> {
    store.messages().take_while(move |(earlier, _)| *earlier < seq).filter(move |(_, row)| row.key == key)
}

type Must = Property<Protocol>;

/// Everything that must always hold, and everything that must be possible.
pub(super) fn properties(protocol: &Protocol) -> Vec<Must> {
    let mut properties = vec![
        Must::always("a message is in one open batch at most", |_, world| one_batch(world)),
        Must::always("only the owner of a lane opens and closes its batches", |_, world| {
            !world.witness.foreign
        }),
        Must::always("epochs only rise", |_, world| !world.witness.repeated),
        Must::always("no lane is taken from a living owner", |_, world| !world.witness.stolen),
        Must::always("nobody asks for a transition that does not exist", |_, world| !world.witness.refused),
        Must::always("every change is in the table of transitions", |_, world| !world.witness.illegal),
        Must::always("what is Sent is with the broker", |_, world| sent_is_stored(world)),
        Must::always("nothing vanishes unless a person removes it", |_, world| !world.witness.vanished),
        Must::always("a message that must travel alone does", |_, world| alone(world)),
        Must::always("who cannot be sent waits for something that comes", |_, world| waits(world)),
        Must::always("without further faults everything ends Sent or Dead", goes_on),
        Must::always("no message is claimed before its wait is over", |_, world| {
            world.store.messages().all(|(seq, row)| !row.waits || !world.store.flies(seq))
        }),
    ];
    if protocol.bounds.ordered {
        properties.extend([
            Must::always("no message is claimed before an earlier one of its key", |_, world| {
                in_order(world)
            }),
            Must::always("no message is published before an earlier one of its key", |_, world| {
                !world.witness.overtaken
            }),
            Must::always("a hold has a holder or is being drained", |_, world| holders(world)),
            Must::sometimes("a follower is parked", |_, world| {
                world.store.messages().any(|(_, row)| row.held)
            }),
        ]);
    }
    let faults = protocol.bounds.faults;
    if faults.crashes + faults.pauses == 0 {
        properties.push(Must::always("where nobody crashed no message is blamed for it", |_, world| {
            !any(world, |row| row.state.crashes > 0)
        }));
    }
    properties.extend(possible(protocol));
    properties
}

fn possible(protocol: &Protocol) -> Vec<Must> {
    let (faults, trouble) = (protocol.bounds.faults, protocol.bounds.trouble);
    let mut properties = vec![Must::sometimes("everything is Sent", |protocol, world| {
        let sent = world.store.messages().filter(|(_, row)| row.state.status == Status::Sent);
        sent.count() == protocol.bounds.keys.len()
    })];
    let deadly =
        trouble.contains(&Outcome::Rejected) || u32::from(faults.failures) >= protocol.bounds.max_attempts;
    if deadly || u32::from(faults.crashes) >= State::CRASHES_BEFORE_DEAD {
        properties.push(Must::sometimes("a message is Dead", |_, world| {
            any(world, |row| row.state.status == Status::Dead)
        }));
    }
    if faults.crashes + faults.pauses > 0 {
        properties.extend([
            Must::sometimes("a new owner finds what the old one left", |_, world| {
                any(world, |row| row.state.crashes > 0)
            }),
            Must::sometimes("a message is stored twice", |_, world| {
                world.broker.iter().any(|stored| stored.twice)
            }),
        ]);
    }
    if faults.pauses > 0 {
        properties
            .push(Must::sometimes("a relay comes too late with its settlement", |_, world| late(world)));
    }
    if protocol.bounds.channels > 1 {
        properties.push(Must::sometimes("a lane has several open batches", |_, world| {
            world.store.batches.windows(2).any(|pair| pair[0].lane == pair[1].lane)
        }));
    }
    if faults.crashes >= 2 {
        properties.push(Must::sometimes("a message must travel alone", |_, world| {
            any(world, |row| row.state.travels_alone())
        }));
    }
    properties
}

fn any(world: &World, is: impl Fn(&Row) -> bool) -> bool {
    world.store.messages().any(|(_, row)| is(row))
}

fn one_batch(world: &World) -> bool {
    let mut seqs: Vec<Seq> =
        world.store.batches.iter().flat_map(|batch| batch.seqs.iter().copied()).collect();
    let all = seqs.len();
    seqs.sort_unstable();
    seqs.dedup();
    seqs.len() == all
}

fn sent_is_stored(world: &World) -> bool {
    world.store.messages().all(|(seq, row)| {
        row.state.status != Status::Sent || world.broker[usize::from(seq) - 1].has(row.state.delivery)
    })
}

fn alone(world: &World) -> bool {
    world.store.batches.iter().filter(|batch| batch.seqs.len() > 1).all(|batch| {
        batch.seqs.iter().all(|seq| world.store.row(*seq).is_none_or(|row| !row.state.travels_alone()))
    })
}

/// An unsettled message can be claimed, or waits for time to pass, or for the one that holds its key. Whoever is
/// marked as held has a hold that will let it go.
fn waits(world: &World) -> bool {
    world.store.messages().all(|(_, row)| {
        let unsettled = matches!(row.state.status, Status::Pending | Status::Failed);
        let hopes = row.ready || row.waits || row.held;
        let hold = world.store.holds[usize::from(row.key)].is_some();
        (!unsettled || hopes) && (!row.held || hold)
    })
}

/// Whatever is in a batch has no earlier one of its key outside: it was sent, or its followers may pass it and did
/// so before it was requeued. One that failed again is waited for again.
fn in_order(world: &World) -> bool {
    let excused = |seq: Seq, status| world.witness.passed[usize::from(seq) - 1] && status != Status::Failed;
    world.store.batches.iter().all(|batch| {
        batch.seqs.iter().enumerate().all(|(place, seq)| {
            let Some(row) = world.store.row(*seq) else { return true };
            earlier(&world.store, *seq, row.key).all(|(earlier, row)| {
                row.state.status == Status::Sent
                    || excused(earlier, row.state.status)
                    || batch.seqs[..place].contains(&earlier)
            })
        })
    })
}

fn holders(world: &World) -> bool {
    world.store.holds.iter().flatten().all(|hold| {
        hold.draining || world.store.row(hold.seq).is_some_and(|row| row.state.status != Status::Sent)
    })
}

fn late(world: &World) -> bool {
    let relays = world.relays.iter().flat_map(|relay| relay.hands.iter().flatten());
    relays
        .flatten()
        .any(|hand| hand.next().is_none() && world.store.batches.iter().all(|batch| batch.id != hand.batch))
}

/// Settled, or something can happen that is not a fault. Such steps make no circle (see [`super::always_ends`]), so
/// this says that everything ends well once faults cease.
fn goes_on(protocol: &Protocol, world: &World) -> bool {
    settled(world)
        || protocol.helpful(world).into_iter().any(|action| protocol.next_state(world, action).is_some())
}

/// Everything is Sent, Dead, or parked behind a Dead one that a person must look at.
pub(super) fn settled(world: &World) -> bool {
    world.store.batches.is_empty()
        && world.store.messages().all(|(_, row)| {
            let holder = world.store.holds[usize::from(row.key)].as_ref().map(|hold| hold.seq);
            let behind = holder.and_then(|seq| world.store.row(seq));
            matches!(row.state.status, Status::Sent | Status::Dead)
                || row.held && behind.is_some_and(|row| row.state.status == Status::Dead)
        })
}
