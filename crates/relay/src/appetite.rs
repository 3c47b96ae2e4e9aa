//! How much a train claims at once for a broker: more while a backlog waits and the broker is quick, less when it is slow.
//!
//! A large batch spreads the cost of a turn with the store and of the broker's answer over many messages. It also keeps
//! its first message unsettled until the last is answered, and after a crash all of it is sent again. So what a batch
//! may take is a time, and its size follows from it.

use std::time::Duration;

/// What a broker gets at first.
const FIRST: usize = 500;

/// A batch that was claimed, sent and answered sooner may be twice as large next time.
const QUICK: Duration = Duration::from_millis(100);

/// One that took longer must be as much smaller.
const SLOW: Duration = Duration::from_millis(400);

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Appetite {
    now: usize,
    first: usize,
    most: usize,
}

impl Appetite {
    /// Of `most` messages at most.
    pub(crate) fn new(most: usize) -> Self {
        let most = most.max(1);
        let first = FIRST.min(most);
        Self { now: first, first, most }
    }

    /// Messages in the next batch at most.
    pub(crate) fn limit(self) -> usize {
        self.now
    }

    /// So many messages were sent, and claiming and sending took so long.
    pub(crate) fn learn(&mut self, sent: usize, took: Duration) {
        if took > SLOW {
            let share = SLOW.as_secs_f64() / took.as_secs_f64();
            self.now = ((self.now as f64 * share) as usize).max(self.first);
        } else if sent < self.now / 4 {
            // No more was there, no more had room, or the broker took no more.
            self.now = (self.now / 2).max(self.first);
        } else if took < QUICK && sent >= self.now / 2 {
            self.now = (self.now * 2).min(self.most);
        }
    }

    /// There is no backlog.
    pub(crate) fn rest(&mut self) {
        self.now = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 3_000;
    const SOON: Duration = Duration::from_millis(50);
    const MIDDLING: Duration = Duration::from_millis(200);

    fn after(batches: &[(usize, Duration)]) -> usize {
        let mut appetite = Appetite::new(MOST);
        batches.iter().for_each(|(sent, took)| appetite.learn(*sent, *took));
        appetite.limit()
    }

    #[test]
    fn full_batches_that_are_quick_grow_up_to_the_limit() {
        assert_eq!(after(&[(500, SOON)]), 1_000);
        assert_eq!(after(&[(500, SOON), (1_000, SOON), (2_000, SOON), (3_000, SOON)]), MOST);
    }

    #[test]
    fn at_a_middling_pace_nothing_changes() {
        assert_eq!(after(&[(500, SOON), (1_000, MIDDLING), (1_000, MIDDLING)]), 1_000);
    }

    #[test]
    fn a_slow_batch_makes_the_next_one_as_much_smaller_and_never_smaller_than_the_first() {
        let grown = [(500, SOON), (1_000, SOON)];
        assert_eq!(after(&[grown[0], grown[1], (2_000, SLOW * 2)]), 1_000);
        assert_eq!(after(&[grown[0], grown[1], (2_000, SLOW * 100)]), FIRST);
    }

    #[test]
    fn it_shrinks_where_little_is_sent_and_rests_without_a_backlog() {
        let grown = [(500, SOON), (1_000, SOON), (2_000, SOON)];
        assert_eq!(after(&[grown[0], grown[1], grown[2], (10, SOON)]), MOST / 2);
        let mut appetite = Appetite::new(MOST);
        appetite.learn(500, SOON);
        appetite.rest();
        assert_eq!(appetite.limit(), FIRST);
    }

    #[test]
    fn a_limit_below_the_first_is_kept() {
        let mut appetite = Appetite::new(100);
        appetite.learn(100, SOON);
        assert_eq!(appetite.limit(), 100);
        appetite.learn(100, SLOW * 2);
        assert_eq!(appetite.limit(), 100);
    }
}
