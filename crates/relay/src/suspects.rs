//! Messages that went unanswered while their broker answered others.
//!
//! The first time may be the moment in which the broker went away, and then no message is to blame. One that goes
//! unanswered again, while others are answered again, is itself the reason, and spends attempts from then on.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard};

use store::Seq;

/// More than can be on the way: beyond that, most are long with other relays.
const MOST: usize = 100_000;

/// By broker.
#[derive(Debug, Default)]
pub(crate) struct Suspects(Mutex<HashMap<String, HashSet<Seq>>>);

impl Suspects {
    fn all(&self) -> MutexGuard<'_, HashMap<String, HashSet<Seq>>> {
        self.0.lock().expect("nothing panics while it holds the suspects")
    }

    /// A message went unanswered while others of its broker were answered. Answers whether it had done so before.
    pub(crate) fn again(&self, broker: &str, seq: Seq) -> bool {
        let mut all = self.all();
        let suspects = all.entry(broker.to_owned()).or_default();
        if suspects.len() >= MOST {
            suspects.clear();
        }
        !suspects.insert(seq)
    }

    /// The broker took it, or said why not.
    pub(crate) fn answered(&self, broker: &str, seq: Seq) {
        if let Some(suspects) = self.all().get_mut(broker) {
            suspects.remove(&seq);
        }
    }

    /// The broker is down: whatever went unanswered before that did so because of it.
    pub(crate) fn acquit(&self, broker: &str) {
        self.all().remove(broker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_to_blame_from_the_second_time_on() {
        let suspects = Suspects::default();
        assert!(!suspects.again("main", 7));
        assert!(suspects.again("main", 7));
        assert!(suspects.again("main", 7));
        assert!(!suspects.again("other", 7), "another broker is another story");
    }

    #[test]
    fn an_answer_and_an_outage_clear_a_message() {
        let suspects = Suspects::default();
        suspects.again("main", 7);
        suspects.answered("main", 7);
        assert!(!suspects.again("main", 7));
        suspects.acquit("main");
        assert!(!suspects.again("main", 7));
    }
}
