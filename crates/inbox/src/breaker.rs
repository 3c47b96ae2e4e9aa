//! When to try again something that is down, without asking a message to pay for it.
//!
//! While the breaker is open nothing is handled; then a single message tries whether the handler is back. All
//! tasks of a consumer share it, or the parked messages would keep hammering an endpoint that the others spare.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The wait after the first failure; it doubles with each one that follows.
const FIRST: Duration = Duration::from_millis(250);

/// The wait never grows past this, jitter aside.
const LONGEST: Duration = Duration::from_secs(30);

/// Waits that double up to [`LONGEST`], with up to a quarter of jitter on top.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    pub(crate) fn next(&mut self) -> Duration {
        let least = FIRST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        least + least.mul_f64(rand::random::<f64>() / 4.0)
    }

    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Whether the handler may be used.
#[derive(Debug, Default)]
pub(crate) struct Breaker(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    backoff: Backoff,
    open_until: Option<Instant>,
}

impl Breaker {
    /// The handler is down. Answers when it is tried next. Tasks that find out at the same time count once.
    pub(crate) fn trip(&self) -> Instant {
        let mut inner = self.inner();
        let now = Instant::now();
        match inner.open_until {
            Some(until) if until > now => until,
            _ => {
                let until = now + inner.backoff.next();
                inner.open_until = Some(until);
                until
            }
        }
    }

    /// The handler works.
    pub(crate) fn close(&self) {
        let mut inner = self.inner();
        inner.backoff.reset();
        inner.open_until = None;
    }

    /// Waits until the handler may be tried. `true`: with one message first.
    pub(crate) async fn ready(&self) -> bool {
        loop {
            let until = self.inner().open_until;
            match until {
                None => return false,
                Some(until) if until <= Instant::now() => return true,
                Some(until) => tokio::time::sleep_until(until.into()).await,
            }
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("nothing panics while it holds the breaker")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_from_a_quarter_second_to_half_a_minute() {
        let mut backoff = Backoff::default();
        for least in [250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000].map(Duration::from_millis)
        {
            let wait = backoff.next();
            assert!(wait >= least && wait <= least + least / 4, "{wait:?} for {least:?}");
        }
        backoff.reset();
        assert!(backoff.next() < Duration::from_millis(400));
    }

    #[tokio::test]
    async fn failures_seen_together_count_once_and_a_probe_comes_first() {
        let breaker = Breaker::default();
        assert!(!breaker.ready().await);
        let until = breaker.trip();
        assert_eq!(breaker.trip(), until);
        assert!(breaker.ready().await, "one message first");
        assert!(until <= Instant::now());
        breaker.close();
        assert!(!breaker.ready().await);
    }
}
