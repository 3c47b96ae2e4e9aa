//! Telling a message that brings its handler down from a handler that is down.
//!
//! An endpoint that answers 503, or dies under a request, looks the same in both cases; so does a statement that the
//! database cannot use. If the handler were always
//! believed, one such message would be the probe for ever and hold up all others; if the message were blamed, an
//! outage would cost attempts. So the other messages have to tell. One that was answered like this [`SUSPECT`] times in
//! a row is a suspect: probes are then made with others. One that was answered like this [`PASSED`] times more, with
//! another message handled before each of them, is to blame: it costs one attempt, as a failure of its own would. From
//! then on it is believed to be the one at fault unless another message is answered like this too.
//!
//! While nobody's message is handled, nobody is to blame; only past `give_up_after`, when there was no other message
//! to tell, does a suspect pay. Finding nobody at all (no connection, no program) never counts.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use message::MessageId;
use store::{Arrival, Handled};

use crate::handler::Ran;

/// Answers in a row that make a message a suspect.
const SUSPECT: u32 = 3;

/// Times that others pass it before it is to blame. An overloaded endpoint that turns away nine requests of ten
/// would otherwise wear out the attempts of messages that are as good as any.
const PASSED: u32 = 5;

/// Messages that are remembered. Those of an outage are few: one in each worker's hands, then one with each probe.
const REMEMBERED: usize = 1_000;

/// What is known of the messages of a group that could not be handled.
#[derive(Debug, Default)]
pub(crate) struct Suspects(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// How often the handler ran.
    runs: u64,
    /// How many messages the handler has dealt with.
    handled: u64,
    /// Whether a message that was never to blame was struck since.
    down: bool,
    struck: HashMap<MessageId, Struck>,
}

#[derive(Debug)]
struct Struck {
    strikes: u32,
    /// Strikes before which another message had been handled since the one before.
    passed: u32,
    since: Instant,
    last: Instant,
    /// `handled` at the last strike.
    handled: u64,
    /// It was to blame before.
    blamed: bool,
}

impl Suspects {
    /// What to conclude of a message from what its handler said.
    pub(crate) fn weigh(&self, id: MessageId, ran: Ran, give_up_after: Duration) -> Handled {
        let mut inner = self.inner();
        inner.runs += 1;
        match ran {
            Ran { handled: Handled::Unavailable { error }, reached: true } => {
                match inner.strike(id, Instant::now(), give_up_after) {
                    Some(why) => Handled::Retry { error: format!("{why}: {error}"), after: None },
                    None => Handled::Unavailable { error },
                }
            }
            Ran { handled: handled @ Handled::Unavailable { .. }, .. } => handled,
            Ran { handled, reached } => {
                inner.struck.remove(&id);
                // A message that failed proves nothing: a handler that hangs fails all of them.
                if reached && matches!(handled, Handled::Done | Handled::Dead { .. }) {
                    inner.handled += 1;
                    inner.down = false;
                }
                handled
            }
        }
    }

    /// How often the handler ran; what it says is known by then.
    pub(crate) fn runs(&self) -> u64 {
        self.inner().runs
    }

    /// Whether any of these could not be handled before.
    pub(crate) fn knows_any(&self, ids: &[MessageId]) -> bool {
        let inner = self.inner();
        !inner.struck.is_empty() && ids.iter().any(|id| inner.struck.contains_key(id))
    }

    /// Whether there is any suspect, so that a probe with one message might always be with that one.
    pub(crate) fn any(&self) -> bool {
        self.inner().struck.values().any(Struck::is_suspect)
    }

    pub(crate) fn is_suspect(&self, arrival: &Arrival) -> bool {
        self.inner().struck.get(&arrival.message.id).is_some_and(Struck::is_suspect)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("nothing panics while it holds the suspects")
    }
}

impl Inner {
    /// Counts a strike. Says why the message is to blame, if it is.
    fn strike(&mut self, id: MessageId, now: Instant, give_up_after: Duration) -> Option<&'static str> {
        if self.struck.len() >= REMEMBERED && !self.struck.contains_key(&id) {
            // The one that was not seen for longest has most likely been handled by another member of the group.
            let stale = self.struck.iter().min_by_key(|(_, struck)| struck.last).map(|(id, _)| *id);
            stale.map(|id| self.struck.remove(&id));
        }
        let handled = self.handled;
        let new = Struck { strikes: 0, passed: 0, since: now, last: now, handled, blamed: false };
        let struck = self.struck.entry(id).or_insert(new);
        struck.strikes = struck.strikes.saturating_add(1);
        struck.passed += u32::from(handled > struck.handled);
        (struck.handled, struck.last) = (handled, now);
        if struck.passed >= PASSED || (struck.blamed && !self.down) {
            *struck = Struck { strikes: 0, passed: 0, since: now, last: now, handled, blamed: true };
            return Some("others are handled and this one is not");
        }
        self.down |= !struck.blamed;
        let given_up = struck.is_suspect() && now - struck.since >= give_up_after;
        given_up.then_some("for longer than give_up_after")
    }
}

impl Struck {
    fn is_suspect(&self) -> bool {
        self.strikes >= SUSPECT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn down(reached: bool) -> Ran {
        Ran { handled: Handled::Unavailable { error: "503".to_owned() }, reached }
    }

    fn done() -> Ran {
        Ran { handled: Handled::Done, reached: true }
    }

    fn blames(handled: &Handled) -> bool {
        matches!(handled, Handled::Retry { .. })
    }

    #[test]
    fn a_message_is_to_blame_when_others_pass_it_again_and_again() {
        let (suspects, poison) = (Suspects::default(), MessageId::new());
        for _ in 0..SUSPECT {
            assert!(!suspects.any());
            assert!(!blames(&suspects.weigh(poison, down(true), DAY)));
        }
        assert!(suspects.any());
        for passed in 1..=PASSED {
            assert!(!blames(&suspects.weigh(poison, down(true), DAY)), "nobody passed since");
            suspects.weigh(MessageId::new(), done(), DAY);
            assert_eq!(blames(&suspects.weigh(poison, down(true), DAY)), passed == PASSED);
        }
        assert!(!suspects.any(), "others need not be asked about it again");
        assert!(blames(&suspects.weigh(poison, down(true), DAY)), "it holds up nobody a second time");
        suspects.weigh(MessageId::new(), down(true), DAY);
        assert!(!blames(&suspects.weigh(poison, down(true), DAY)), "now the handler is down for others too");
    }

    #[test]
    fn a_message_that_is_handled_after_all_is_no_suspect() {
        let (suspects, id) = (Suspects::default(), MessageId::new());
        for _ in 0..2 * PASSED {
            for _ in 0..SUSPECT {
                suspects.weigh(MessageId::new(), done(), DAY);
                assert!(!blames(&suspects.weigh(id, down(true), DAY)));
            }
            suspects.weigh(id, done(), DAY);
            assert!(!suspects.any());
        }
    }

    #[test]
    fn an_outage_blames_nobody_however_long_it_lasts() {
        let (suspects, ids) = (Suspects::default(), [MessageId::new(), MessageId::new()]);
        suspects.weigh(ids[0], down(true), DAY);
        // It was in hand when the outage began.
        suspects.weigh(MessageId::new(), done(), DAY);
        for id in ids.iter().cycle().take(10_000) {
            assert!(!blames(&suspects.weigh(*id, down(true), DAY)));
        }
    }

    #[test]
    fn finding_nobody_there_never_counts() {
        let (suspects, id) = (Suspects::default(), MessageId::new());
        for _ in 0..100 {
            suspects.weigh(MessageId::new(), done(), DAY);
            assert!(!blames(&suspects.weigh(id, down(false), DAY)));
        }
        assert!(!suspects.any());
    }

    #[test]
    fn past_the_horizon_a_message_that_nobody_could_tell_from_an_outage_pays() {
        let (suspects, id) = (Suspects::default(), MessageId::new());
        let blamed = (1..=SUSPECT).map(|_| blames(&suspects.weigh(id, down(true), Duration::ZERO)));
        assert_eq!(blamed.filter(|blamed| *blamed).count(), 1, "and not before it is a suspect");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let suspects = Suspects::default();
        for _ in 0..2 * REMEMBERED {
            suspects.weigh(MessageId::new(), down(true), DAY);
        }
        assert_eq!(suspects.inner().struck.len(), REMEMBERED);
    }
}
