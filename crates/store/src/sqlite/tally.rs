//! Counters that change with the records, added up over a transaction and written once at its end.

use std::collections::BTreeMap;
use std::time::Duration;

use message::Status;
use rusqlite::{Connection, params};

use super::row::millis;
use crate::Latency;

/// Which of the two histograms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wait {
    WriteToSent,
    SentToAcknowledged,
}

impl Wait {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::WriteToSent => "write_to_sent",
            Self::SentToAcknowledged => "sent_to_acknowledged",
        }
    }
}

/// What a transaction changed.
#[derive(Debug, Default)]
pub(super) struct Tally {
    failed: i64,
    sent: i64,
    dead: i64,
    successes: i64,
    failures: i64,
    died: i64,
    acknowledged: i64,
    waits: BTreeMap<(Wait, usize), (i64, i64)>,
}

impl Tally {
    /// A record went from one status to another. In flight is not a status of the table.
    pub(super) fn moved(&mut self, from: Status, to: Status) {
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

    pub(super) fn succeeded(&mut self) {
        self.successes += 1;
    }

    pub(super) fn failed(&mut self) {
        self.failures += 1;
    }

    pub(super) fn acknowledged(&mut self) {
        self.acknowledged += 1;
    }

    pub(super) fn waited(&mut self, wait: Wait, duration: Duration) {
        let (count, total) = self.waits.entry((wait, Latency::bucket(duration))).or_default();
        *count += 1;
        *total += millis(duration);
    }

    /// Writes what was added up.
    pub(super) fn write(self, connection: &Connection) -> rusqlite::Result<()> {
        let counters =
            [self.failed, self.sent, self.dead, self.successes, self.failures, self.died, self.acknowledged];
        if counters != [0; 7] {
            connection
                .prepare_cached(
                    "UPDATE counters SET failed = failed + ?1, sent = sent + ?2, dead = dead + ?3,
                            publish_success_total = publish_success_total + ?4,
                            publish_failure_total = publish_failure_total + ?5,
                            dead_total = dead_total + ?6, acknowledged_total = acknowledged_total + ?7",
                )?
                .execute(rusqlite::params_from_iter(counters))?;
        }
        for ((wait, bucket), (count, total)) in self.waits {
            connection
                .prepare_cached(
                    "INSERT INTO latencies (name, bucket, n, millis) VALUES (?1, ?2, ?3, ?4)
                     ON CONFLICT DO UPDATE SET n = n + excluded.n, millis = millis + excluded.millis",
                )?
                .execute(params![wait.name(), bucket, count, total])?;
        }
        Ok(())
    }
}

/// Takes back what was counted as Pending and never was: plain SQL may draw a sequence number without using
/// it (`INSERT OR IGNORE`), or skip some. It shows, for two index seeks, whenever nothing is left to send.
pub(super) fn mend(connection: &Connection) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "UPDATE counters SET removed = (SELECT seq FROM sqlite_sequence WHERE name = 'outbox_events')
                                           - failed - sent - dead
             WHERE EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'outbox_events')
             AND NOT EXISTS (SELECT 1 FROM outbox_events INDEXED BY outbox_ready WHERE ready = 1)
             AND NOT EXISTS (SELECT 1 FROM outbox_events INDEXED BY outbox_waiting
                             WHERE ready = 0 AND status IN ('pending', 'failed'))",
        )?
        .execute([])?;
    Ok(())
}
