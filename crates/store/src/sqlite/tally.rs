//! Writing the counters.

use rusqlite::{Connection, params};

use crate::tally::Tally;

/// Writes what was added up.
pub(super) fn write(tally: Tally, connection: &Connection) -> rusqlite::Result<()> {
    let counters = [
        tally.failed,
        tally.sent,
        tally.dead,
        tally.successes,
        tally.failures,
        tally.died,
        tally.acknowledged,
    ];
    if counters != [0; 7] {
        connection
            .prepare_cached(
                "UPDATE outbox_counters SET failed = failed + ?1, sent = sent + ?2, dead = dead + ?3,
                        publish_success_total = publish_success_total + ?4,
                        publish_failure_total = publish_failure_total + ?5,
                        dead_total = dead_total + ?6, acknowledged_total = acknowledged_total + ?7",
            )?
            .execute(rusqlite::params_from_iter(counters))?;
    }
    for ((wait, bucket), (count, total)) in tally.waits {
        connection
            .prepare_cached(
                "INSERT INTO outbox_latencies (name, bucket, n, millis) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT DO UPDATE SET n = n + excluded.n, millis = millis + excluded.millis",
            )?
            .execute(params![wait.name(), bucket, count, total])?;
    }
    Ok(())
}

/// Takes back what was counted as Pending and never was: plain SQL may draw a sequence number without using
/// it (`INSERT OR IGNORE`), or skip some. It shows, for two index seeks, whenever nothing is left to send.
pub(super) fn mend(connection: &Connection) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "UPDATE outbox_counters SET removed = (SELECT seq FROM sqlite_sequence WHERE name = 'outbox_events')
                                           - failed - sent - dead
             WHERE EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'outbox_events')
             AND NOT EXISTS (SELECT 1 FROM outbox_events INDEXED BY outbox_ready WHERE ready = 1)
             AND NOT EXISTS (SELECT 1 FROM outbox_events INDEXED BY outbox_waiting
                             WHERE ready = 0 AND status IN ('pending', 'failed'))",
        )?
        .execute([])?;
    Ok(())
}
