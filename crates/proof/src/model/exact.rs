//! A model of how messages get into Kafka's log exactly once, explored to the last state.
//!
//! # The protocol
//! 1. Each relay sends under a transactional id that nobody had before it: its **sender**.
//! 2. A sender sends messages of a lane only after it wrote a **claim** of the lane into the log, read the claims before it,
//!    fenced every sender that has one, read the last **note** of each, and asked the store which of the messages that
//!    they name, and of those in the batch in hand, are settled.
//! 3. What is noted and not settled is **open**: it is in the log, and is settled without being sent.
//! 4. The messages of a transaction and one note are committed together. The note names them and all that is open.
//! 5. What was committed is open until its settlement has succeeded. One that was refused changes nothing.
//! 6. A sender whose transaction ended nobody knows how, or that is fenced, is thrown away with all it knew.
//! 7. A relay withdraws its claim of a lane when nothing of the lane is open. Until it is certain that the claim is gone, the
//!    sender does not claim the lane again.
//! 8. The claim of a fenced sender is removed when nothing that it left is open, and its note with its last claim.
//!
//! What of this is needed is shown by [`Bug`]: without it a message is in the log twice.
//!
//! # What is one step here
//! Writing a claim and reading those before it: who claims later fences this sender whatever it reads. Fencing and reading the
//! note: a fenced sender writes no other. Sending and asking for the commit: as long as the commit has not arrived, a fence
//! aborts both.
//!
//! Not modelled: a change of the number of lanes, messages that are requeued, claims and notes that Kafka loses.

mod bounds;
mod bug;
mod log;
mod protocol;
mod relay;
mod same;
mod witness;
mod world;

use super::{Explored, circle, shortest, visit};

pub use bounds::{Bounds, Faults};
pub use bug::Bug;
pub use protocol::{Action, Protocol};
pub use world::World;

/// Visits every state within `bounds`.
pub fn explore(bounds: Bounds, threads: usize) -> Explored<Action> {
    visit(bounds.name, Protocol::sound(bounds), threads)
}

/// Plants `bug` and answers the property that shows it, with the fewest steps that do.
pub fn hunt(bug: Bug) -> Option<(&'static str, Vec<Action>)> {
    shortest(|| Protocol::with(bug))
}

/// Looks in every state within `bounds` for a circle of steps none of which is a fault. Answers how many states it
/// looked at.
///
/// # Errors
/// A state of the circle.
pub fn always_ends(bounds: Bounds) -> Result<usize, Box<World>> {
    circle::search(&Protocol::sound(bounds))
}
