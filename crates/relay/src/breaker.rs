//! A failing destination is not a failing message: while one is down, nothing is claimed for it.
//!
//! A breaker belongs to a broker (it cannot be reached), to a topic (nothing could be stored there), or to the claims,
//! without which nothing is sent. Open,
//! it lets single messages through now and then, one for each topic and train, as probes; one that is confirmed
//! closes it, slowly, so that a destination that has just come back is not run over by the backlog.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

/// The wait before the first probe; doubled after each one in vain.
const FIRST_PROBE: Duration = Duration::from_millis(500);

/// The longest wait between probes: a destination that is back must not wait long.
const LAST_PROBE: Duration = Duration::from_secs(15);

/// A breaker that nobody had a message for in this long is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// How long a topic may be misconfigured before its messages are Dead.
const PATIENCE: Duration = Duration::from_secs(60);

/// Messages let through at first when a destination is back; four times more after each success.
const SLOW_START: usize = 16;

/// What a breaker guards.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Destination {
    Broker(String),
    Topic(String),
    Claims,
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broker(name) => write!(f, "broker {name}"),
            Self::Topic(name) => write!(f, "topic {name}"),
            Self::Claims => f.write_str("claims"),
        }
    }
}

/// A breaker as an operator sees it.
#[derive(Clone, Debug)]
pub struct BreakerView {
    /// The broker, the topic, or `claims`.
    pub destination: String,
    /// Closed off; else it is coming back.
    pub open: bool,
    /// Nothing could be stored there until somebody changes a setting; else it cannot be reached.
    pub misconfigured: bool,
    /// Since when.
    pub since: SystemTime,
    /// What it last said.
    pub error: String,
}

#[derive(Debug)]
struct Breaker {
    since: Instant,
    since_wall: SystemTime,
    error: String,
    state: State,
    failures: u32,
    /// Messages have waited past their limit: let many through to find out which.
    expiring: bool,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Nothing passes until then, and single messages after it.
    Open { until: Instant },
    /// Coming back: so many pass in a turn.
    Returning { limit: usize },
}

/// All breakers of a relay that are not closed.
#[derive(Debug, Default)]
pub(crate) struct Breakers(Mutex<BTreeMap<Destination, Breaker>>);

/// What a train may claim right now.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gates(BTreeMap<Destination, usize>);

impl Gates {
    /// How many messages may pass to this destination.
    pub(crate) fn limit(&self, destination: &Destination) -> usize {
        self.0.get(destination).copied().unwrap_or(usize::MAX)
    }
}

impl Breakers {
    fn all(&self) -> MutexGuard<'_, BTreeMap<Destination, Breaker>> {
        self.0.lock().expect("nothing panics while it holds the breakers")
    }

    /// What may pass now.
    pub(crate) fn gates(&self, now: Instant) -> Gates {
        let mut all = self.all();
        all.retain(|_, breaker| !matches!(breaker.state, State::Open { until } if until + FORGOTTEN < now));
        let limit = |breaker: &Breaker| match breaker.state {
            State::Returning { limit } => limit,
            State::Open { until } if until > now => 0,
            State::Open { .. } if breaker.expiring => usize::MAX,
            State::Open { .. } => 1,
        };
        Gates(all.iter().map(|(destination, breaker)| (destination.clone(), limit(breaker))).collect())
    }

    /// The wait until the next probe is due. One that is due already waits for a message, not for time.
    pub(crate) fn next_probe(&self, now: Instant) -> Option<Duration> {
        let all = self.all();
        let waits = all.values().filter_map(|breaker| match breaker.state {
            State::Open { until } => until.checked_duration_since(now),
            State::Returning { .. } => None,
        });
        waits.filter(|wait| !wait.is_zero()).min()
    }

    /// The destination took a message.
    pub(crate) fn succeeded(&self, destination: &Destination) {
        let mut all = self.all();
        let Some(breaker) = all.get_mut(destination) else { return };
        let limit = match breaker.state {
            State::Returning { limit } => limit.saturating_mul(4),
            State::Open { .. } => {
                tracing::info!(%destination, down_for = ?breaker.since.elapsed(), "the destination is back");
                SLOW_START
            }
        };
        breaker.failures = 0;
        breaker.state = State::Returning { limit };
        if limit > 100_000 {
            all.remove(destination);
        }
    }

    /// The destination took nothing. `expired`: a message had waited past its limit.
    pub(crate) fn failed(&self, destination: &Destination, error: &str, expired: bool, now: Instant) {
        let mut all = self.all();
        let breaker = all.entry(destination.clone()).or_insert_with(|| {
            tracing::warn!(%destination, error, "the destination is down: nothing is claimed for it");
            Breaker {
                since: now,
                since_wall: SystemTime::now(),
                error: String::new(),
                state: State::Returning { limit: 0 },
                failures: 0,
                expiring: false,
            }
        });
        error.clone_into(&mut breaker.error);
        if matches!(breaker.state, State::Open { until } if until > now) && !expired {
            // Another train's probe failed a moment ago: that is the same news.
            return;
        }
        let wait = FIRST_PROBE.saturating_mul(1 << breaker.failures.min(16)).min(LAST_PROBE);
        let jitter = wait.mul_f64(rand::random::<f64>() / 4.0);
        breaker.failures = breaker.failures.saturating_add(1);
        breaker.expiring = expired;
        breaker.state = State::Open { until: if expired { now } else { now + wait + jitter } };
    }

    /// Whether a topic has been misconfigured for so long that its messages are Dead.
    pub(crate) fn condemned(&self, topic: &str, now: Instant) -> bool {
        self.all()
            .get(&Destination::Topic(topic.to_owned()))
            .is_some_and(|breaker| now.saturating_duration_since(breaker.since) >= PATIENCE)
    }

    pub(crate) fn views(&self) -> Vec<BreakerView> {
        let view = |(destination, breaker): (&Destination, &Breaker)| BreakerView {
            destination: destination.to_string(),
            open: !matches!(breaker.state, State::Returning { .. }),
            misconfigured: matches!(destination, Destination::Topic(_)),
            since: breaker.since_wall,
            error: breaker.error.clone(),
        };
        self.all().iter().map(view).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn down() -> (Breakers, Destination, Instant) {
        let (breakers, main, now) =
            (Breakers::default(), Destination::Broker("main".to_owned()), Instant::now());
        breakers.failed(&main, "refused", false, now);
        (breakers, main, now)
    }

    #[test]
    fn an_open_breaker_lets_single_messages_through_when_its_wait_is_over() {
        let (breakers, main, now) = down();
        assert_eq!(breakers.gates(now).limit(&main), 0);
        assert_eq!(breakers.gates(now + LAST_PROBE * 2).limit(&main), 1);
    }

    #[test]
    fn two_trains_that_fail_together_wait_once() {
        let (breakers, main, now) = down();
        let wait = breakers.next_probe(now);
        breakers.failed(&main, "refused", false, now);
        assert_eq!(breakers.next_probe(now), wait);
    }

    #[test]
    fn a_probe_that_finds_no_message_costs_no_turns_and_is_forgotten_in_the_end() {
        let (breakers, main, now) = down();
        assert_eq!(breakers.next_probe(now + LAST_PROBE * 2), None);
        assert_eq!(breakers.gates(now + LAST_PROBE * 2 + FORGOTTEN).limit(&main), usize::MAX);
        assert!(breakers.views().is_empty());
    }

    #[test]
    fn waits_between_probes_double_up_to_their_limit() {
        let (breakers, main, mut now) = down();
        let mut waits = Vec::new();
        for _ in 0..10 {
            waits.push(breakers.next_probe(now).expect("it is open"));
            now += LAST_PROBE * 2;
            breakers.failed(&main, "refused", false, now);
        }
        assert!(waits[0] >= FIRST_PROBE && waits[0] <= FIRST_PROBE.mul_f64(1.25));
        assert!(waits[9] >= LAST_PROBE && waits[9] <= LAST_PROBE.mul_f64(1.25));
        assert!(waits.windows(2).all(|pair| pair[1] >= pair[0].mul_f64(0.79)));
    }

    #[test]
    fn a_destination_that_is_back_starts_slowly_and_ends_unlimited() {
        let (breakers, main, now) = down();
        let mut limits = Vec::new();
        for _ in 0..9 {
            breakers.succeeded(&main);
            limits.push(breakers.gates(now).limit(&main));
        }
        assert_eq!(limits[0], SLOW_START);
        assert!(limits.windows(2).all(|pair| pair[1] >= pair[0]));
        assert_eq!(limits[8], usize::MAX);
        assert!(breakers.views().is_empty());
    }

    #[test]
    fn a_topic_is_condemned_after_a_minute_and_not_before() {
        let (breakers, now) = (Breakers::default(), Instant::now());
        let topic = Destination::Topic("t".to_owned());
        breakers.failed(&topic, "no route", false, now);
        assert!(!breakers.condemned("t", now + Duration::from_secs(59)));
        breakers.failed(&topic, "no route", false, now + Duration::from_secs(59));
        assert!(breakers.condemned("t", now + Duration::from_secs(60)));
    }
}
