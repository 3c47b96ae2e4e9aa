//! Whose turn it is: how many requests are under way at once, how fast they follow each other, and when a destination
//! wants to be left alone.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep_until, timeout_at};

/// What a destination that was idle for a while may get at once.
const BURST: Duration = Duration::from_millis(100);

/// The longest time that all messages keep away because one was told to. Then another asks again.
const LONGEST_REST: Duration = Duration::from_secs(60);

/// The turns of one destination.
#[derive(Debug)]
pub(super) struct Turns {
    window: Semaphore,
    /// Between two requests.
    interval: Option<Duration>,
    times: Mutex<Times>,
}

#[derive(Debug)]
struct Times {
    /// When the next request may begin.
    next: Instant,
    /// Nothing is sent before.
    rest: Instant,
}

impl Turns {
    pub(super) fn new(concurrency: usize, rate: Option<f64>) -> Self {
        let now = Instant::now();
        Self {
            window: Semaphore::new(concurrency),
            interval: rate.map(|rate| Duration::from_secs_f64(1.0 / rate)),
            times: Mutex::new(Times { next: now, rest: now }),
        }
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().expect("nothing panics while it holds the times")
    }

    /// Waits for a turn, which lasts until it is dropped. `None` when there is none before `end`.
    pub(super) async fn take(&self, end: Instant) -> Option<SemaphorePermit<'_>> {
        let turn = timeout_at(end, self.window.acquire()).await.ok()?.ok()?;
        let Some(interval) = self.interval else { return Some(turn) };
        let begin = {
            let mut times = self.times();
            let begin = times.next.max(Instant::now().checked_sub(BURST).unwrap_or(times.next));
            // A turn that cannot be used is left to others.
            if begin > end {
                return None;
            }
            times.next = begin + interval;
            begin
        };
        sleep_until(begin).await;
        Some(turn)
    }

    /// The destination wants to be left alone for so long.
    pub(super) fn rest(&self, wait: Duration) {
        let mut times = self.times();
        times.rest = times.rest.max(Instant::now() + wait.min(LONGEST_REST));
    }

    /// How long it still wants to be left alone.
    pub(super) fn resting(&self) -> Option<Duration> {
        let rest = self.times().rest.checked_duration_since(Instant::now())?;
        (!rest.is_zero()).then_some(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(15)
    }

    #[tokio::test(start_paused = true)]
    async fn requests_follow_each_other_at_the_rate() {
        let turns = Turns::new(4, Some(10.0));
        let begun = Instant::now();
        for _ in 0..21 {
            drop(turns.take(soon()).await.expect("a turn"));
        }
        let took = begun.elapsed();
        assert!((Duration::from_millis(1_900)..=Duration::from_millis(2_010)).contains(&took), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_would_come_too_late_is_not_taken() {
        let turns = Turns::new(4, Some(1.0));
        let end = Instant::now() + Duration::from_millis(1_500);
        let mut taken = 0;
        while turns.take(end).await.is_some() {
            taken += 1;
        }
        assert_eq!(taken, 2);
        assert!(Instant::now() < end, "it is said at once");
        let full = Turns::new(1, None);
        let turn = full.take(soon()).await.expect("a turn");
        assert!(full.take(Instant::now() + Duration::from_secs(1)).await.is_none());
        drop(turn);
        assert!(full.take(soon()).await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_destination_is_left_alone_for_a_minute_at_most() {
        let turns = Turns::new(1, None);
        assert_eq!(turns.resting(), None);
        turns.rest(Duration::from_secs(7));
        turns.rest(Duration::from_secs(1));
        assert_eq!(turns.resting(), Some(Duration::from_secs(7)));
        turns.rest(Duration::from_secs(86_400));
        assert_eq!(turns.resting(), Some(LONGEST_REST));
        tokio::time::advance(LONGEST_REST).await;
        assert_eq!(turns.resting(), None);
    }
}
