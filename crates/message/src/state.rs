//! The states of a message and the one function that decides what may follow what.
//!
//! ```text
//!             claim              confirmed
//!  Pending ──────────► InFlight ───────────► Sent ──┐ unacknowledged
//!     ▲  ▲             │  │  │                      │ (delivery + 1)
//!     │  └─ released ──┘  │  └── failed ─► Failed ──┼──► claim when due
//!     │                   │ rejected, gave up,      │
//!     │    requeued       ▼ limit reached           │
//!     ├────────────────── Dead ── discarded ──► gone│
//!     └─────────────────────────────────────────────┘
//! ```
//!
//! Stores write what [`step`] returns, the models explore it, and the conformance suite compares every
//! store against it. A transition that is not here does not exist.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Where a message is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Status {
    /// Written, not yet sent.
    Pending,
    /// Claimed by a relay that is publishing it.
    InFlight,
    /// The broker has confirmed it.
    Sent,
    /// It failed and waits for its next attempt.
    Failed,
    /// Quarantined for a person to look at.
    Dead,
}

impl Status {
    /// All five, in the order of a life.
    pub const ALL: [Self; 5] = [Self::Pending, Self::InFlight, Self::Sent, Self::Failed, Self::Dead];

    /// The word shown to people and programs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::InFlight => "InFlight",
            Self::Sent => "Sent",
            Self::Failed => "Failed",
            Self::Dead => "Dead",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Status {
    type Err = UnknownStatus;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|status| status.as_str().eq_ignore_ascii_case(text))
            .ok_or_else(|| UnknownStatus(text.to_owned()))
    }
}

/// Not one of the five.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a status: use Pending, InFlight, Sent, Failed or Dead")]
pub struct UnknownStatus(pub String);

/// What decides the future of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    /// Where it is.
    pub status: Status,
    /// Where it returns to when a relay gives it back: Pending or Failed while InFlight, else `status`.
    pub rest: Status,
    /// Failures of the message itself, towards its limit.
    pub attempts: u32,
    /// Relays that died while they held it.
    pub crashes: u32,
    /// Rises with every deliberate new delivery and never falls: brokers that recognise
    /// duplicates must not swallow a redelivery that somebody asked for.
    pub delivery: u32,
}

/// Something that happens to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A relay takes it.
    Claim,
    /// The broker has it.
    Confirmed,
    /// It failed; at `max_attempts` failures it is Dead.
    Failed {
        /// Attempts it has in all.
        max_attempts: u32,
    },
    /// It can never be sent.
    Rejected,
    /// It has waited for an unreachable destination longer than its route allows.
    GaveUp,
    /// The relay gives it back untouched: draining, or the destination is down.
    Released,
    /// The relay that held it lost its lease without a word.
    Orphaned,
    /// Nobody acknowledged it in time.
    Unacknowledged,
    /// A consumer group says that it is done with it.
    Acknowledged,
    /// A person sends it again, as it is or mended.
    Requeued,
    /// A person gives it up.
    Discarded,
    /// A person deletes the record.
    Deleted,
    /// Retention removes it.
    Expired,
}

/// What becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Next {
    /// It goes on.
    State(State),
    /// The record is removed.
    Gone,
}

/// This event cannot happen to a message in this status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message that is {status} cannot be {}", event.name())]
pub struct Refused {
    /// Where the message is.
    pub status: Status,
    /// What was asked.
    pub event: Event,
}

impl Event {
    /// The past participle used in messages to people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Claim => "claimed",
            Self::Confirmed => "confirmed",
            Self::Failed { .. } => "failed",
            Self::Rejected => "rejected",
            Self::GaveUp => "given up",
            Self::Released => "released",
            Self::Orphaned => "orphaned",
            Self::Unacknowledged => "redelivered",
            Self::Acknowledged => "acknowledged",
            Self::Requeued => "requeued",
            Self::Discarded => "discarded",
            Self::Deleted => "deleted",
            Self::Expired => "expired",
        }
    }
}

impl State {
    /// A message just written.
    pub const NEW: Self =
        Self { status: Status::Pending, rest: Status::Pending, attempts: 0, crashes: 0, delivery: 0 };

    /// Crashes after which a message travels in a batch of its own, so that if it is the one that
    /// brings relays down, it takes nobody with it.
    pub const CRASHES_BEFORE_ALONE: u32 = 2;

    /// Crashes after which it is Dead: three of them happened while it was alone.
    pub const CRASHES_BEFORE_DEAD: u32 = Self::CRASHES_BEFORE_ALONE + 3;

    /// Whether it must be the only one in its batch.
    pub fn travels_alone(&self) -> bool {
        self.crashes >= Self::CRASHES_BEFORE_ALONE
    }

    /// The message as an acknowledgement finds it. One that rests after a relay had it may have been sent all the same:
    /// that nobody answered proves nothing. `erred`: what went wrong last is on record.
    pub fn perhaps_sent(self, erred: bool) -> Self {
        let tried = erred || self.attempts > 0 || self.crashes > 0;
        match self.status {
            Status::Pending | Status::Failed if tried => {
                Self { status: Status::InFlight, rest: self.status, ..self }
            }
            _ => self,
        }
    }

    fn at(self, status: Status) -> Self {
        Self { status, rest: status, ..self }
    }
}

/// What `event` makes of a message in `state`.
///
/// # Errors
/// [`Refused`] when the event cannot happen in that status: nothing must be written then.
pub fn step(state: State, event: Event) -> Result<Next, Refused> {
    use Status::{Dead, Failed, InFlight, Pending, Sent};

    let next = match (state.status, event) {
        (Pending | Failed, Event::Claim) => State { status: InFlight, rest: state.status, ..state },

        (InFlight, Event::Confirmed) => state.at(Sent),
        (InFlight, Event::Failed { max_attempts }) => {
            let attempts = state.attempts.saturating_add(1);
            let status = if attempts >= max_attempts { Dead } else { Failed };
            State { attempts, ..state }.at(status)
        }
        (InFlight, Event::Rejected) => State { attempts: state.attempts.saturating_add(1), ..state }.at(Dead),
        (InFlight, Event::GaveUp) => state.at(Dead),
        (InFlight, Event::Released) => state.at(state.rest),
        (InFlight, Event::Orphaned) => {
            let crashes = state.crashes.saturating_add(1);
            let status = if crashes >= State::CRASHES_BEFORE_DEAD { Dead } else { state.rest };
            State { crashes, ..state }.at(status)
        }

        (InFlight | Sent, Event::Acknowledged) => state,
        (Sent, Event::Unacknowledged) => again(state),
        (Dead, Event::Requeued) => again(state),

        (Dead, Event::Discarded)
        | (Pending | Failed | Dead | Sent, Event::Deleted)
        | (Sent | Dead, Event::Expired) => return Ok(Next::Gone),

        (status, event) => return Err(Refused { status, event }),
    };
    Ok(Next::State(next))
}

/// A fresh start under a new delivery number: the old attempts belong to the old delivery.
fn again(state: State) -> State {
    State { attempts: 0, crashes: 0, delivery: state.delivery.saturating_add(1), ..state }.at(Status::Pending)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EVENTS: [Event; 13] = [
        Event::Claim,
        Event::Confirmed,
        Event::Failed { max_attempts: 3 },
        Event::Rejected,
        Event::GaveUp,
        Event::Released,
        Event::Orphaned,
        Event::Unacknowledged,
        Event::Acknowledged,
        Event::Requeued,
        Event::Discarded,
        Event::Deleted,
        Event::Expired,
    ];

    /// The table of requirement A2, written a second time by hand.
    fn allowed(from: Status, to: Option<Status>) -> bool {
        use Status::*;
        matches!(
            (from, to),
            (Pending, Some(InFlight))
                | (InFlight, Some(Sent | Failed | Dead | Pending | InFlight))
                | (Failed, Some(InFlight))
                | (Sent, Some(Sent | Pending))
                | (Dead, Some(Pending))
                | (Pending | Failed | Dead | Sent, None)
        )
    }

    #[test]
    fn only_the_transitions_of_the_requirements_exist() {
        for status in Status::ALL {
            for rest in [Status::Pending, Status::Failed] {
                let rest = if status == Status::InFlight { rest } else { status };
                for event in EVENTS {
                    let state = State { status, rest, attempts: 1, crashes: 0, delivery: 0 };
                    let to = match step(state, event) {
                        Ok(Next::State(next)) => Some(next.status),
                        Ok(Next::Gone) => None,
                        Err(refused) => {
                            assert_eq!((refused.status, refused.event), (status, event));
                            continue;
                        }
                    };
                    assert!(allowed(status, to), "{status} must not become {to:?} by {event:?}");
                }
            }
        }
    }

    #[test]
    fn the_last_attempt_is_dead_and_the_one_before_is_not() {
        let state =
            |attempts| State { status: Status::InFlight, rest: Status::Failed, attempts, ..State::NEW };
        let after = |attempts| match step(state(attempts), Event::Failed { max_attempts: 10 }) {
            Ok(Next::State(next)) => next,
            other => panic!("{other:?}"),
        };
        assert_eq!((after(8).status, after(8).attempts), (Status::Failed, 9));
        assert_eq!((after(9).status, after(9).attempts), (Status::Dead, 10));
    }

    #[test]
    fn a_crash_is_not_an_attempt_and_five_crashes_are_dead() {
        let mut state = State::NEW;
        for crash in 1..=State::CRASHES_BEFORE_DEAD {
            for event in [Event::Claim, Event::Orphaned] {
                let Ok(Next::State(next)) = step(state, event) else { panic!("{event:?} refused") };
                state = next;
            }
            assert_eq!((state.crashes, state.attempts), (crash, 0));
            assert_eq!(state.travels_alone(), crash >= 2);
            assert_eq!(state.status == Status::Dead, crash == 5);
        }
    }

    #[test]
    fn a_released_message_is_what_it_was() {
        for rest in [Status::Pending, Status::Failed] {
            let before = State { attempts: 4, crashes: 1, delivery: 2, ..State::NEW.at(rest) };
            let Ok(Next::State(held)) = step(before, Event::Claim) else { panic!("claim refused") };
            assert_eq!(step(held, Event::Released), Ok(Next::State(before)));
        }
    }

    proptest! {
        #[test]
        fn no_sequence_of_events_leaves_the_table_or_lowers_an_epoch(
            events in prop::collection::vec(prop::sample::select(EVENTS.to_vec()), 0..200),
        ) {
            let mut state = State::NEW;
            for event in events {
                match step(state, event) {
                    Ok(Next::State(next)) => {
                        prop_assert!(allowed(state.status, Some(next.status)));
                        prop_assert!(next.delivery >= state.delivery);
                        prop_assert!(next.rest == next.status || next.status == Status::InFlight);
                        prop_assert!(matches!(next.rest, Status::Pending | Status::Failed) || next.status != Status::InFlight);
                        prop_assert!(next.attempts <= 3);
                        prop_assert!(next.crashes <= State::CRASHES_BEFORE_DEAD);
                        prop_assert!(next.attempts < 3 || next.status != Status::Failed);
                        state = next;
                    }
                    Ok(Next::Gone) => prop_assert!(allowed(state.status, None)),
                    Err(_) => {}
                }
            }
        }
    }
}
