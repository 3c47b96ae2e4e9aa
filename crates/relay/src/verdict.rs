//! From what the broker said to what the store writes.

use std::time::Duration;

use broker::Outcome;
use chrono::Utc;
use message::{Event, Next, RetryPolicy, Schedule, Status, step};
use store::{Claimed, Verdict};

use crate::Route;

/// What is known when a message is judged.
pub(crate) struct Circumstances<'a> {
    /// Its route; none takes its topic if there is none.
    pub(crate) route: Option<&'a Route>,
    /// It goes unanswered again and again while others of its destination are answered.
    pub(crate) blamed: bool,
    /// Its topic has been misconfigured for longer than anybody should wait.
    pub(crate) condemned: bool,
    /// The groups that must acknowledge its topic.
    pub(crate) groups: Vec<String>,
}

/// What is to be written about a message that is not sent now, whatever its destination is like: its time has not come, or
/// is over. Those behind it go on.
pub(crate) fn unsendable(claimed: &Claimed) -> Option<Verdict> {
    let dead = |reason: &str, error| {
        Some(Verdict::Dead { reason: reason.to_owned(), error, attempted: false, hold: false })
    };
    match claimed.message.schedule(Utc::now()) {
        Schedule::Now => None,
        Schedule::Later(wait) => Some(Verdict::Postponed { wait }),
        Schedule::Expired(at) => dead("Expired", format!("it was to be sent before {at}")),
        Schedule::Unreadable(header) => {
            dead("Unreadable", format!("the header `{header}` is not a time such as 2026-11-16T18:30:00Z"))
        }
    }
}

/// What is to be written about a message.
pub(crate) fn judge(claimed: &Claimed, outcome: Outcome, circumstances: Circumstances<'_>) -> Verdict {
    let default = RetryPolicy::default();
    let Circumstances { route, blamed, condemned, groups } = circumstances;
    let policy = route.map_or(&default, |route| &route.retry);
    let hold_dead = route.is_some_and(Route::holds_dead);
    let hold_failed = route.is_some_and(Route::holds_failed);
    match outcome {
        Outcome::Confirmed => Verdict::Sent { ack_groups: groups },
        Outcome::Held => Verdict::Released { error: None },
        Outcome::Rejected { error } => {
            Verdict::Dead { reason: format!("Rejected: {error}"), error, attempted: true, hold: hold_dead }
        }
        Outcome::Deferred { error, after } => fail(claimed, policy, error, after, hold_failed, hold_dead),
        Outcome::Unconfirmed { error } | Outcome::Unreachable { error } if blamed || policy.count_outages => {
            fail(claimed, policy, error, None, hold_failed, hold_dead)
        }
        Outcome::Unconfirmed { error } | Outcome::Unreachable { error } => {
            if waited(claimed) >= policy.give_up_after {
                let reason = format!("GaveUpAfter({:?}): the destination stayed down", policy.give_up_after);
                return Verdict::Dead { reason, error, attempted: false, hold: hold_dead };
            }
            Verdict::Released { error: Some(error) }
        }
        Outcome::Misconfigured { error } if condemned => Verdict::Dead {
            reason: format!("Misconfigured: {error}"),
            error,
            attempted: false,
            hold: hold_dead,
        },
        Outcome::Misconfigured { error } => Verdict::Released { error: Some(error) },
    }
}

/// How long it has been waiting for its destination: not before its time, and not since an earlier delivery.
fn waited(claimed: &Claimed) -> Duration {
    if claimed.state.delivery > 0 {
        return Duration::ZERO;
    }
    claimed.message.since_due(Utc::now()).map_or(claimed.age, |since| since.min(claimed.age))
}

fn fail(
    claimed: &Claimed,
    policy: &RetryPolicy,
    error: String,
    after: Option<Duration>,
    hold_failed: bool,
    hold_dead: bool,
) -> Verdict {
    let event = Event::Failed { max_attempts: policy.max_attempts };
    match step(claimed.state, event) {
        Ok(Next::State(next)) if next.status == Status::Failed => Verdict::Failed {
            error,
            retry_after: policy.delay(next.attempts, &mut rand::rng()).max(after.unwrap_or_default()),
            hold: hold_failed,
        },
        _ => Verdict::Dead {
            reason: format!("MaxAttempts({}) exceeded", policy.max_attempts),
            error,
            attempted: true,
            hold: hold_dead,
        },
    }
}
