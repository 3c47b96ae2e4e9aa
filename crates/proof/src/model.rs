//! Models of the protocol between relays and store, explored to the last state.
//!
//! A model has a handful of relays, lanes and messages and a small number of faults, and stateright visits every
//! state that any order of events can reach. What becomes of a message is decided by [`message::step`], the very
//! function that production calls; the store's transactions and the relay's steps around it are written once
//! more, in miniature, beside an onlooker who knows what must never be seen. That the onlooker would see it is
//! shown by planting each of the faults of [`Bug`].
//!
//! How a message gets into Kafka's log exactly once is a model of its own, [`exact`].
//!
//! Not modelled: how many lanes a relay should have, a change of the number of lanes, acknowledgements.

mod bounds;
mod bug;
mod circle;
pub mod exact;
mod hold;
mod relay;
mod store;
mod witness;
mod world;

use std::fmt::{self, Debug};
use std::hash::Hash;
use std::time::{Duration, Instant};

use stateright::{Checker, HasDiscoveries, Model};

pub use bounds::{Bounds, Faults};
pub use bug::Bug;
pub use relay::Outcome;
pub use world::{Action, Protocol, World};

/// A model that tells faults from what happens anyway.
trait Faulty:
    Model<
        State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
        Action: Clone + Debug + PartialEq + Send + Sync + 'static,
    > + Send
    + Sync
    + 'static
{
    /// What may happen that is no fault.
    fn helpful(&self, world: &Self::State) -> Vec<Self::Action>;

    /// What may happen that is a fault, or somebody's wish.
    fn harmful(&self, world: &Self::State, actions: &mut Vec<Self::Action>);
}

/// The end of an exploration.
#[derive(Clone, Debug)]
pub struct Explored<A = Action> {
    /// Which bounds.
    pub name: &'static str,
    /// Different states.
    pub states: usize,
    /// How long it took.
    pub time: Duration,
    /// Properties that do not hold, each with the steps that show it.
    pub violations: Vec<(&'static str, Vec<A>)>,
    /// What should have been possible and was never seen.
    pub unseen: Vec<&'static str>,
}

impl<A> Explored<A> {
    /// Nothing was violated, and all that should be possible was seen.
    pub fn is_sound(&self) -> bool {
        self.violations.is_empty() && self.unseen.is_empty()
    }
}

impl<A: Debug> fmt::Display for Explored<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} states in {:.1?}", self.name, self.states, self.time)?;
        for (property, actions) in &self.violations {
            write!(f, "\n  violated: {property}")?;
            for action in actions {
                write!(f, "\n    {action:?}")?;
            }
        }
        for property in &self.unseen {
            write!(f, "\n  never seen: {property}")?;
        }
        Ok(())
    }
}

/// Visits every state within `bounds`.
pub fn explore(bounds: Bounds, threads: usize) -> Explored {
    visit(bounds.name, Protocol::sound(bounds), threads)
}

fn visit<P: Faulty>(name: &'static str, protocol: P, threads: usize) -> Explored<P::Action> {
    let started = Instant::now();
    // Not "all": that would end the exploration as soon as everything possible was seen once.
    let checker =
        protocol.checker().threads(threads).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let expected = checker.model().properties();
    let found = checker.discoveries();
    let (mut violations, mut unseen) = (Vec::new(), Vec::new());
    for property in expected {
        let path = found.get(property.name);
        match (property.expectation.discovery_is_failure(), path) {
            (true, Some(path)) => violations.push((property.name, path.clone().into_actions())),
            (false, None) => unseen.push(property.name),
            _ => {}
        }
    }
    Explored { name, states: checker.unique_state_count(), time: started.elapsed(), violations, unseen }
}

/// Plants `bug` and answers the property that shows it, with the fewest steps that do.
pub fn hunt(bug: Bug) -> Option<(&'static str, Vec<Action>)> {
    shortest(|| Protocol::with(bug))
}

fn shortest<P: Faulty>(protocol: impl Fn() -> P) -> Option<(&'static str, Vec<P::Action>)> {
    let mut shortest = shorter(protocol(), None)?;
    while let Some(found) = shorter(protocol(), Some(shortest.1.len())) {
        shortest = found;
    }
    Some(shortest)
}

/// A counterexample of fewer than `steps`.
fn shorter<P: Faulty>(protocol: P, steps: Option<usize>) -> Option<(&'static str, Vec<P::Action>)> {
    let mut builder = protocol.checker().finish_when(HasDiscoveries::AnyFailures);
    if let Some(steps) = steps {
        // It counts states, of which there is one more, and leaves out the last.
        builder = builder.target_max_depth(steps + 1);
    }
    let checker = builder.spawn_bfs().join();
    let found = checker.discoveries();
    let failures = checker.model().properties().into_iter();
    failures
        .filter(|property| property.expectation.discovery_is_failure())
        .filter_map(|property| Some((property.name, found.get(property.name)?.clone().into_actions())))
        .min_by_key(|(_, actions)| actions.len())
}

/// Looks in every state within `bounds` for a circle of steps none of which is a fault: relays could walk it for
/// ever and deliver nothing. Answers how many states it looked at.
///
/// # Errors
/// A state of the circle.
pub fn always_ends(bounds: Bounds) -> Result<usize, Box<World>> {
    circle::search(&Protocol::sound(bounds))
}
