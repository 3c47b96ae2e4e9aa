//! When to try again, and when to stop.

use std::time::Duration;

use rand::Rng;
use serde::Serialize;

/// Exponential backoff with jitter on top, bounded in attempts and in time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RetryPolicy {
    /// The least wait after the first failure; each later one waits twice as long.
    pub first: Duration,
    /// The least wait never grows past this.
    pub cap: Duration,
    /// Failures of the message itself after which it is Dead.
    pub max_attempts: u32,
    /// Age after which even an outage, which spends no attempts, ends in Dead.
    pub give_up_after: Duration,
    /// Whether an unreachable destination spends attempts too.
    pub count_outages: bool,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            first: Duration::from_secs(1),
            cap: Duration::from_secs(60),
            max_attempts: 10,
            give_up_after: Duration::from_secs(3 * 24 * 60 * 60),
            count_outages: false,
        }
    }
}

impl RetryPolicy {
    /// Jitter is never less than this, or messages that failed together would return together.
    pub const LEAST_JITTER: Duration = Duration::from_millis(250);

    /// The least wait after failure number `attempt` (counted from 1).
    pub fn least_delay(&self, attempt: u32) -> Duration {
        let doublings = attempt.saturating_sub(1).min(31);
        self.first.saturating_mul(1 << doublings).min(self.cap)
    }

    /// The most that may be added to [`least_delay`](Self::least_delay).
    pub fn most_jitter(&self, attempt: u32) -> Duration {
        (self.least_delay(attempt) / 4).max(Self::LEAST_JITTER)
    }

    /// The wait after failure number `attempt`: the least delay, and jitter on top.
    pub fn delay(&self, attempt: u32, rng: &mut impl Rng) -> Duration {
        self.least_delay(attempt) + self.most_jitter(attempt).mul_f64(rng.random::<f64>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_least_delays_are_1_2_4_8_up_to_the_cap() {
        let policy = RetryPolicy::default();
        let seconds: Vec<_> = (1..=8).map(|n| policy.least_delay(n).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60]);
    }

    proptest! {
        #[test]
        fn a_delay_lies_between_its_least_and_its_least_plus_jitter(
            first in 1u64..10_000, cap in 1u64..600_000, attempt in 0u32..1_000, seed: u64,
        ) {
            let policy = RetryPolicy {
                first: Duration::from_millis(first),
                cap: Duration::from_millis(cap),
                ..RetryPolicy::default()
            };
            let delay = policy.delay(attempt, &mut <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(seed));
            let least = policy.least_delay(attempt);
            prop_assert!(least <= policy.cap);
            prop_assert!(delay >= least);
            prop_assert!(delay <= least + policy.most_jitter(attempt));
            prop_assert!(policy.most_jitter(attempt) >= RetryPolicy::LEAST_JITTER);
        }

        #[test]
        fn a_later_attempt_never_waits_less_at_least(attempt in 1u32..100) {
            let policy = RetryPolicy::default();
            prop_assert!(policy.least_delay(attempt + 1) >= policy.least_delay(attempt));
            prop_assert!(policy.most_jitter(attempt + 1) >= policy.most_jitter(attempt));
        }
    }
}
