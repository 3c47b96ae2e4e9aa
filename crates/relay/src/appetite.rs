//! How much a train claims at once for a broker: more while a backlog waits and the broker is quick, less when it is slow.
//!
//! A large batch spreads the cost of a turn with the store and of the broker's answer over many messages. It also keeps
//! its first message unsettled until the last is answered, and after a crash all of it is sent again. So what a batch
//! may take is a time, and its size follows from it.

use std::time::Duration;

/// What a broker gets at first.
const FIRST: usize = 500;

/// A batch that is back sooner may be twice as large next time.
const QUICK: Duration = Duration::from_millis(100);

/// One that took longer must be half as large.
const SLOW: Duration = Duration::from_millis(400);

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Appetite {
    now: usize,
    most: usize,
}

impl Appetite {
    /// Of `most` messages at most.
    pub(crate) fn new(most: usize) -> Self {
        let most = most.max(1);
        Self { now: FIRST.min(most), most }
    }

    /// Messages in the next batch at most.
    pub(crate) fn limit(self) -> usize {
        self.now
    }

    /// So many messages took so long.
    pub(crate) fn learn(&mut self, messages: usize, took: Duration) {
        if took > SLOW {
            self.now = (self.now / 2).max(FIRST.min(self.most));
        } else if took < QUICK && messages >= self.now / 2 {
            self.now = (self.now * 2).min(self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 3_000;

    fn after(batches: &[(usize, Duration)]) -> usize {
        let mut appetite = Appetite::new(MOST);
        batches.iter().for_each(|(messages, took)| appetite.learn(*messages, *took));
        appetite.limit()
    }

    #[test]
    fn full_batches_that_are_quick_grow_up_to_the_limit() {
        assert_eq!(after(&[(500, QUICK / 2)]), 1_000);
        assert_eq!(
            after(&[(500, QUICK / 2); 10]),
            MOST - MOST % 1_000,
            "what is claimed is half of it at least"
        );
        assert_eq!(
            after(&[(500, QUICK / 2), (1_000, QUICK / 2), (2_000, QUICK / 2), (3_000, QUICK / 2)]),
            MOST
        );
    }

    #[test]
    fn without_a_backlog_and_at_a_middling_pace_nothing_changes() {
        assert_eq!(after(&[(10, QUICK / 2); 10]), FIRST);
        assert_eq!(after(&[(500, QUICK); 10]), FIRST);
    }

    #[test]
    fn slow_batches_shrink_and_never_below_the_first() {
        let grown = [(500, QUICK / 2), (1_000, QUICK / 2)];
        assert_eq!(after(&[grown[0], grown[1], (2_000, SLOW * 2)]), 1_000);
        assert_eq!(after(&[(500, SLOW * 2); 10]), FIRST);
    }

    #[test]
    fn a_limit_below_the_first_is_kept() {
        let mut appetite = Appetite::new(100);
        appetite.learn(100, QUICK / 2);
        assert_eq!(appetite.limit(), 100);
        appetite.learn(100, SLOW * 2);
        assert_eq!(appetite.limit(), 100);
    }
}
