//! What a consumer does beside receiving: trying parked messages again, and forgetting old ids.

use std::sync::Arc;
use std::time::Duration;

use store::Receipt;
use tracing::{debug, warn};

use crate::worker::{Stop, Worker};

/// The wait between two looks for parked messages while there are some, and while there are none.
const QUICK: Duration = Duration::from_millis(250);
const SLOW: Duration = Duration::from_secs(1);

/// Parked messages tried together.
const PARKED: usize = 64;

/// The wait between two rounds of forgetting.
const FORGET_EVERY: Duration = Duration::from_secs(60);

/// Calls of one round at most: each removes a bounded number, and writers must get their turn.
const FORGET_CALLS: usize = 20;

/// Tries parked messages again when their wait is over, until asked to stop.
pub(crate) async fn retry_parked(worker: Arc<Worker>, mut stop: Stop) {
    let mut pause = SLOW;
    while stop.wait(pause).await {
        let Some(limit) = worker.ready(PARKED.min(worker.group.batch()), &mut stop).await else { return };
        let due = match worker.group.store().due(worker.group.name(), limit).await {
            Ok(due) => due,
            Err(error) => {
                worker.store_failed(&error);
                continue;
            }
        };
        if due.is_empty() {
            pause = (pause * 2).clamp(QUICK, SLOW);
            continue;
        }
        debug!(group = worker.group.name(), count = due.len(), "trying parked messages again");
        let full = due.len() == limit;
        let receipts = worker.work(due, &mut stop).await.unwrap_or_default();
        let moved = |receipt: &Receipt| matches!(receipt, Receipt::Parked { .. } | Receipt::Dead { .. });
        // What is done lets the next of its key go: look again at once.
        let more = receipts.contains(&Receipt::Done) || (full && receipts.iter().any(moved));
        pause = if more { Duration::ZERO } else { QUICK };
    }
}

/// Forgets ids that are older than the group keeps them, until asked to stop.
pub(crate) async fn forget_ids(worker: Arc<Worker>, mut stop: Stop) {
    let group = &worker.group;
    while stop.wait(FORGET_EVERY).await {
        for _ in 0..FORGET_CALLS {
            match group.store().forget_ids(group.name(), group.id_retention()).await {
                Ok(0) => break,
                Ok(count) => debug!(group = group.name(), count, "forgot old ids"),
                Err(error) => {
                    warn!(group = group.name(), %error, "old ids cannot be removed now; trying again in a minute");
                    break;
                }
            }
        }
    }
}
