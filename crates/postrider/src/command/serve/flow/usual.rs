//! How many messages flow, how many usually do, and whether that is suddenly less.
//!
//! A window is divided into steps. What the last window brought is compared with the mean of what came before it, in which
//! a step of long ago weighs less: so a flow that changes slowly is usual after a while, and one that stops is not. Nor is a
//! backlog that is worked off, at the start of a process or later.

use std::collections::VecDeque;
use std::time::Duration;

/// Steps of a window.
pub(super) const STEPS: u32 = 10;

/// Steps after which the mean has forgotten most of what was before: an hour, for windows of five minutes.
const MEMORY: u32 = 12 * STEPS;

/// Steps that the mean must have taken in before anything is usual: three windows then lie behind the present one, and the
/// first window of all before them.
const LEARNED: u32 = 2 * STEPS + 1;

/// What is more than so many times the mean is a backlog that is worked off, and counts as that many times the mean.
const MOST: f64 = 3.0;

/// Messages in a usual window at least: of fewer, half of them stay away by chance.
const LEAST: f64 = 10.0;

/// One flow, looked at once in each step.
#[derive(Debug)]
pub(super) struct Flow {
    /// The share by which it must fall.
    drop: f64,
    window: Duration,
    /// The total at the last step.
    total: u64,
    /// What each step of the window brought, and of the one before it, the oldest first.
    steps: VecDeque<u64>,
    /// Steps that were seen, up to the first that is learned of.
    seen: u32,
    /// The mean of a step, over the windows before the present one.
    usual: f64,
    learned: u32,
    dropped: bool,
}

/// What has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// It is suddenly less.
    Dropped,
    /// It is as usual again, or what is usual has become so little.
    Back,
}

impl Flow {
    pub(super) fn new(window: Duration, drop: f64) -> Self {
        Self {
            drop,
            window,
            total: 0,
            steps: VecDeque::new(),
            seen: 0,
            usual: 0.0,
            learned: 0,
            dropped: false,
        }
    }

    /// A step has passed, and there have been `total` messages ever.
    pub(super) fn step(&mut self, total: u64) -> Option<Change> {
        self.steps.push_back(total.saturating_sub(self.total));
        self.total = total;
        if self.steps.len() > 2 * STEPS as usize {
            self.steps.pop_front();
        }
        self.seen += 1;
        // The first window is not learned of: what waited while nobody was there comes at once.
        if self.seen >= 3 * STEPS {
            self.seen = 3 * STEPS;
            self.learn(self.steps.iter().take(STEPS as usize).sum::<u64>() as f64 / f64::from(STEPS));
        }
        let (now, usual) = (self.in_window(), self.usual * f64::from(STEPS));
        let known = self.learned >= LEARNED && usual >= LEAST;
        let dropped = match self.dropped {
            false => known && now < usual * (1.0 - self.drop),
            // Half of the way back is enough, so that it does not come and go.
            true => known && now < usual * (1.0 - self.drop / 2.0),
        };
        let change = match (self.dropped, dropped) {
            (false, true) => Some(Change::Dropped),
            (true, false) => Some(Change::Back),
            _ => None,
        };
        self.dropped = dropped;
        change
    }

    /// Takes in what a step brought, by the mean of a window: a flow that comes in batches is not one of bursts.
    fn learn(&mut self, before: f64) {
        self.learned = (self.learned + 1).min(MEMORY);
        let most = (self.usual * MOST).max(LEAST / f64::from(STEPS));
        self.usual += match before > most && self.learned > 1 {
            // However little was learned yet, a backlog does not weigh more.
            true => (most - self.usual) / f64::from(MEMORY),
            // Every step weighs the same until there are enough to forget some.
            false => (before - self.usual) / f64::from(self.learned),
        };
    }

    /// Messages a minute, in the last window.
    pub(super) fn now(&self) -> f64 {
        self.a_minute(self.in_window())
    }

    /// Messages a minute, usually; nothing while that is not known.
    pub(super) fn usual(&self) -> Option<f64> {
        (self.learned >= LEARNED).then(|| self.a_minute(self.usual * f64::from(STEPS)))
    }

    pub(super) fn dropped(&self) -> bool {
        self.dropped
    }

    fn in_window(&self) -> f64 {
        self.steps.iter().rev().take(STEPS as usize).sum::<u64>() as f64
    }

    fn a_minute(&self, in_window: f64) -> f64 {
        in_window * 60.0 / self.window.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flow that is looked at, and all that it said.
    struct Seen {
        flow: Flow,
        total: u64,
        changes: Vec<Change>,
    }

    impl Seen {
        fn new() -> Self {
            let flow = Flow::new(Duration::from_secs(300), 0.5);
            Self { flow, total: 0, changes: Vec::new() }
        }

        /// So many steps with so many messages each.
        fn steps(&mut self, steps: u32, messages: u64) -> &mut Self {
            for _ in 0..steps {
                self.total += messages;
                self.changes.extend(self.flow.step(self.total));
            }
            self
        }
    }

    #[test]
    fn a_flow_that_stops_is_told_within_a_window_and_once() {
        let mut seen = Seen::new();
        seen.steps(60, 100);
        assert_eq!((seen.flow.now(), seen.flow.usual()), (200.0, Some(200.0)));
        seen.steps(5, 0);
        assert_eq!(seen.changes, [], "half of it is not yet less than half");
        seen.steps(1, 0);
        assert_eq!(seen.changes, [Change::Dropped]);
        assert!(seen.flow.dropped());
        seen.steps(20, 0).steps(20, 100);
        assert_eq!(seen.changes, [Change::Dropped, Change::Back]);
    }

    #[test]
    fn nothing_is_usual_before_three_windows_were_seen_beside_the_first_and_the_present_one() {
        let mut seen = Seen::new();
        seen.steps(30, 100).steps(19, 0);
        assert_eq!((seen.changes.as_slice(), seen.flow.usual()), ([].as_slice(), None));
        seen.steps(1, 0);
        assert_eq!(seen.changes, [Change::Dropped]);
    }

    #[test]
    fn a_backlog_that_drains_right_after_the_start_is_not_usual() {
        let mut seen = Seen::new();
        seen.steps(10, 100_000).steps(50, 100);
        assert_eq!((seen.changes.as_slice(), seen.flow.usual()), ([].as_slice(), Some(200.0)));
    }

    #[test]
    fn a_backlog_that_drains_later_does_not_make_its_end_a_drop() {
        for learned in [30, 50, 300] {
            let mut seen = Seen::new();
            seen.steps(learned, 100).steps(10, 100_000).steps(300, 100);
            assert_eq!(seen.changes, [], "after {learned} steps");
            seen.steps(10, 0);
            assert_eq!(seen.changes, [Change::Dropped], "and a drop is told all the same");
        }
    }

    #[test]
    fn a_flow_that_comes_in_batches_is_watched_as_any_other() {
        let mut seen = Seen::new();
        for _ in 0..100 {
            seen.steps(1, 500).steps(4, 0);
        }
        assert_eq!((seen.changes.as_slice(), seen.flow.usual()), ([].as_slice(), Some(200.0)));
        seen.steps(10, 0);
        assert_eq!(seen.changes, [Change::Dropped]);
    }

    #[test]
    fn a_flow_that_begins_after_a_silence_becomes_usual_in_the_end() {
        let mut seen = Seen::new();
        seen.steps(200, 0).steps(800, 100);
        assert!(seen.flow.usual().is_some_and(|usual| usual > 190.0), "{:?}", seen.flow.usual());
        assert_eq!(seen.changes, []);
    }

    #[test]
    fn what_changes_slowly_becomes_usual() {
        let mut seen = Seen::new();
        seen.steps(60, 1_000);
        for messages in (200..1_000).rev() {
            seen.steps(2, messages);
        }
        assert_eq!(seen.changes, []);
    }

    #[test]
    fn a_trickle_that_stays_away_by_chance_is_not_told() {
        let mut seen = Seen::new();
        // Five in a window.
        for _ in 0..50 {
            seen.steps(1, 1).steps(1, 0);
        }
        seen.steps(60, 0);
        assert_eq!(seen.changes, []);
    }

    #[test]
    fn what_has_stopped_for_good_is_usual_in_the_end() {
        let mut seen = Seen::new();
        seen.steps(200, 10).steps(1_000, 0);
        assert_eq!(seen.changes, [Change::Dropped, Change::Back]);
    }
}
