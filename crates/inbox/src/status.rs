//! How a consumer is doing, for health checks and pages.
//!
//! Several things can be wrong at once (the broker is away and the handler's endpoint too). Each has its own
//! place here, so that the recovery of one never hides that another is still down.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use chrono::{DateTime, Utc};
use serde::Serialize;
use store::Receipt;

/// Whether a consumer works.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum Condition {
    /// It receives and handles.
    Running,
    /// Something that it needs is down. It tries again by itself; no message is lost and none is to blame.
    Paused {
        /// Since when.
        since: DateTime<Utc>,
        /// What is down, and how that showed.
        error: String,
    },
    /// Somebody has to change something. It still tries again by itself, seldom.
    Broken {
        /// What is wrong.
        error: String,
    },
}

/// How a consumer is doing. The counts are since it was started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Whether it works.
    pub condition: Condition,
    /// Messages that came from the broker.
    pub received: u64,
    /// Messages whose work was done.
    pub done: u64,
    /// Messages that had been done before.
    pub duplicates: u64,
    /// Times that a message was put aside for a later try.
    pub parked: u64,
    /// Messages put aside for a person.
    pub dead: u64,
    /// Messages that were not done and that nobody keeps: of a group which handles them at most once, or tries them once.
    pub lost: u64,
}

/// Watches a consumer from elsewhere; cheap to clone.
#[derive(Clone, Debug)]
pub struct Monitor(pub(crate) Arc<Board>);

impl Monitor {
    /// How the consumer is doing now.
    pub fn status(&self) -> Status {
        self.0.status()
    }
}

/// What a consumer depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    Broker,
    Store,
    Handler,
    /// That no message holds up those behind it.
    Message,
    Producer,
}

#[derive(Clone, Debug)]
struct Trouble {
    since: DateTime<Utc>,
    error: String,
    broken: bool,
}

/// Where the tasks of a consumer write how they are doing.
#[derive(Debug, Default)]
pub(crate) struct Board {
    troubles: Mutex<BTreeMap<Need, Trouble>>,
    received: AtomicU64,
    done: AtomicU64,
    duplicates: AtomicU64,
    parked: AtomicU64,
    dead: AtomicU64,
    lost: AtomicU64,
}

impl Board {
    /// `need` is not met now and is tried again.
    pub(crate) fn paused(&self, need: Need, error: impl Into<String>) {
        self.trouble(need, error.into(), false);
    }

    /// `need` is not met until somebody acts.
    pub(crate) fn broken(&self, need: Need, error: impl Into<String>) {
        self.trouble(need, error.into(), true);
    }

    /// `need` is met. Answers whether it was not.
    pub(crate) fn well(&self, need: Need) -> bool {
        self.troubles().remove(&need).is_some()
    }

    fn trouble(&self, need: Need, error: String, broken: bool) {
        let mut troubles = self.troubles();
        let since = troubles.get(&need).map_or_else(Utc::now, |trouble| trouble.since);
        troubles.insert(need, Trouble { since, error, broken });
    }

    fn troubles(&self) -> MutexGuard<'_, BTreeMap<Need, Trouble>> {
        self.troubles.lock().expect("nothing panics while it holds the board")
    }

    pub(crate) fn received(&self, count: usize) {
        self.received.fetch_add(count as u64, Ordering::Relaxed);
    }

    pub(crate) fn lost(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count(&self, receipts: &[Receipt]) {
        for receipt in receipts {
            let counter = match receipt {
                Receipt::Done => &self.done,
                Receipt::Duplicate => &self.duplicates,
                Receipt::Parked { .. } => &self.parked,
                Receipt::Dead { .. } => &self.dead,
                Receipt::Lost { .. } => &self.lost,
                Receipt::Unavailable { .. } | Receipt::Busy => continue,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn status(&self) -> Status {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Status {
            condition: self.condition(),
            received: count(&self.received),
            done: count(&self.done),
            duplicates: count(&self.duplicates),
            parked: count(&self.parked),
            dead: count(&self.dead),
            lost: count(&self.lost),
        }
    }

    fn condition(&self) -> Condition {
        let troubles = self.troubles();
        if troubles.is_empty() {
            return Condition::Running;
        }
        let since = troubles.values().map(|trouble| trouble.since).min().unwrap_or_else(Utc::now);
        let errors: Vec<_> = troubles.values().map(|trouble| trouble.error.as_str()).collect();
        let error = errors.join("; ");
        if troubles.values().any(|trouble| trouble.broken) {
            Condition::Broken { error }
        } else {
            Condition::Paused { since, error }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recovery_of_one_need_does_not_hide_another() {
        let board = Board::default();
        assert_eq!(board.status().condition, Condition::Running);
        board.paused(Need::Broker, "no broker");
        board.paused(Need::Handler, "no endpoint");
        board.well(Need::Broker);
        assert!(
            matches!(board.status().condition, Condition::Paused { error, .. } if error == "no endpoint")
        );
        board.broken(Need::Store, "disk full");
        let expected = Condition::Broken { error: "disk full; no endpoint".to_owned() };
        assert_eq!(board.status().condition, expected);
        board.well(Need::Store);
        board.well(Need::Handler);
        assert_eq!(board.status().condition, Condition::Running);
    }
}
