//! Counters that change with the records, added up over a transaction; each store writes them once, at its end.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Latency;
use crate::column::millis;
use message::Status;

/// Which of the two histograms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wait {
    WriteToSent,
    SentToAcknowledged,
}

impl Wait {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::WriteToSent => "write_to_sent",
            Self::SentToAcknowledged => "sent_to_acknowledged",
        }
    }
}

/// What a transaction changed.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) failed: i64,
    pub(crate) sent: i64,
    pub(crate) dead: i64,
    pub(crate) successes: i64,
    pub(crate) failures: i64,
    pub(crate) died: i64,
    pub(crate) acknowledged: i64,
    /// By histogram and bucket: how many, and how many milliseconds together.
    pub(crate) waits: BTreeMap<(Wait, usize), (i64, i64)>,
}

impl Tally {
    /// A record went from one status to another. In flight is not a status of the table.
    pub(crate) fn moved(&mut self, from: Status, to: Status) {
        if let Some(count) = self.of(from) {
            *count -= 1;
        }
        if let Some(count) = self.of(to) {
            *count += 1;
        }
        if to == Status::Dead && from != Status::Dead {
            self.died += 1;
        }
    }

    /// Pending is what is left over, so nothing keeps its number.
    fn of(&mut self, status: Status) -> Option<&mut i64> {
        match status {
            Status::Failed => Some(&mut self.failed),
            Status::Sent => Some(&mut self.sent),
            Status::Dead => Some(&mut self.dead),
            Status::Pending | Status::InFlight => None,
        }
    }

    pub(crate) fn succeeded(&mut self) {
        self.successes += 1;
    }

    pub(crate) fn tried_in_vain(&mut self) {
        self.failures += 1;
    }

    pub(crate) fn acknowledged(&mut self) {
        self.acknowledged += 1;
    }

    pub(crate) fn waited(&mut self, wait: Wait, duration: Duration) {
        let (count, total) = self.waits.entry((wait, Latency::bucket(duration))).or_default();
        *count += 1;
        *total += millis(duration);
    }
}
