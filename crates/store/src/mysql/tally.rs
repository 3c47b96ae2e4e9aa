//! Writing the counters, in parts: two relays, or two consumers, need not wait for each other to count.

use mysql_async::Value;
use mysql_async::prelude::Queryable;
use rand::Rng;

use super::error::Trouble;
use crate::column::SLOTS;
use crate::tally::Tally;

/// Parts for what happens outside of lanes.
const SHARED: u16 = 64;

/// A part for a transaction that holds no lane.
pub(super) fn any_part() -> u16 {
    SLOTS + rand::rng().random_range(0..SHARED)
}

/// Writes what was added up into `part`: that of a lane that this transaction has locked, or [`any_part`].
pub(super) async fn write(tally: Tally, connection: &mut impl Queryable, part: u16) -> Result<(), Trouble> {
    let counters = [tally.sent, tally.successes, tally.failures, tally.died, tally.acknowledged];
    if counters != [0; 5] {
        let mut values: Vec<Value> = counters.map(Value::from).to_vec();
        values.push(part.into());
        connection
            .exec_drop(
                "UPDATE outbox_counters SET sent = sent + ?, publish_success_total = publish_success_total + ?,
                        publish_failure_total = publish_failure_total + ?, dead_total = dead_total + ?,
                        acknowledged_total = acknowledged_total + ?
                 WHERE part = ?",
                values,
            )
            .await?;
    }
    if !tally.waits.is_empty() {
        let rows: Vec<String> = tally
            .waits
            .iter()
            .map(|((wait, bucket), (count, total))| {
                format!("({part}, '{}', {bucket}, {count}, {total})", wait.name())
            })
            .collect();
        connection
            .query_drop(format!(
                "INSERT INTO outbox_latencies (part, name, bucket, n, millis) VALUES {}
                 ON DUPLICATE KEY UPDATE n = n + VALUES(n), millis = millis + VALUES(millis)",
                rows.join(", ")
            ))
            .await?;
    }
    Ok(())
}
