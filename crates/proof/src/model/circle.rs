//! Whether a world could go on for ever without a fault and without getting anywhere.
//!
//! The models show that in every state that is not settled some faultless step leads on. That means that all
//! ends well only if such steps never lead in a circle, and this looks for one.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use super::Faulty;

/// Looks for a circle of faultless steps among all states. Answers the number of states, or the circle's state.
pub(super) fn search<P: Faulty>(protocol: &P) -> Result<usize, Box<P::State>> {
    let mut search =
        Search { protocol, hasher: RandomState::new(), finished: HashMap::new(), roots: Vec::new() };
    search.roots.extend(protocol.init_states());
    while let Some(root) = search.roots.pop() {
        search.walk(root)?;
    }
    Ok(search.finished.len())
}

struct Search<'a, P: Faulty> {
    protocol: &'a P,
    hasher: RandomState,
    /// The states seen, by hash; `false` while the walk is still on a way that leads through them.
    finished: HashMap<u64, bool>,
    /// States that a fault leads to.
    roots: Vec<P::State>,
}

impl<P: Faulty> Search<'_, P> {
    fn walk(&mut self, world: P::State) -> Result<(), Box<P::State>> {
        let hash = self.hasher.hash_one(&world);
        match self.finished.insert(hash, false) {
            Some(true) => {
                self.finished.insert(hash, true);
                return Ok(());
            }
            Some(false) => return Err(Box::new(world)),
            None => {}
        }
        let mut faults = Vec::new();
        self.protocol.harmful(&world, &mut faults);
        self.roots.extend(faults.into_iter().filter_map(|fault| self.protocol.next_state(&world, fault)));
        for action in self.protocol.helpful(&world) {
            if let Some(next) = self.protocol.next_state(&world, action) {
                self.walk(next)?;
            }
        }
        self.finished.insert(hash, true);
        Ok(())
    }
}
