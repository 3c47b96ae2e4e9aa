//! What a consumer does beside receiving: trying parked messages again, and forgetting old ids.

use std::sync::Arc;
use std::time::Duration;

use store::Receipt;
use tracing::{debug, warn};

use crate::group::Group;
use crate::worker::{Stop, Worker};

/// The wait between two looks for parked messages while there are some, and while there are none.
const QUICK: Duration = Duration::from_millis(250);
const SLOW: Duration = Duration::from_secs(1);

/// Parked messages tried together.
const PARKED: usize = 64;

/// The wait between two rounds of forgetting.
const FORGET_EVERY: Duration = Duration::from_secs(60);

/// The wait between two calls of a round: each removes a bounded number, and writers must get their turn.
const FORGET_PAUSE: Duration = Duration::from_millis(5);

/// Tries parked messages again when their wait is over, until asked to stop.
pub(crate) async fn retry_parked(worker: Arc<Worker>, mut stop: Stop) {
    let mut pause = SLOW;
    while stop.wait(pause).await {
        let Some(take) = worker.ready(PARKED.min(worker.group.batch()), &mut stop).await else { return };
        let due = match worker.group.store().due(worker.group.name(), take.max).await {
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
        let full = due.len() == take.max;
        let receipts = worker.work(due, take, &mut stop).await.unwrap_or_default();
        let moved = |receipt: &Receipt| matches!(receipt, Receipt::Parked { .. } | Receipt::Dead { .. });
        // What is done lets the next of its key go: look again at once.
        let more = receipts.contains(&Receipt::Done) || (full && receipts.iter().any(moved));
        pause = if more { Duration::ZERO } else { QUICK };
    }
}

/// Forgets ids that are older than the group keeps them, until asked to stop.
pub(crate) async fn forget_ids(worker: Arc<Worker>, mut stop: Stop) {
    while stop.wait(FORGET_EVERY).await {
        forget_all(&worker.group, &mut stop).await;
    }
}

/// To the end, however many: a bound here would be a rate past which the table grows for ever.
async fn forget_all(group: &Group, stop: &mut Stop) {
    loop {
        match group.store().forget_ids(group.name(), group.id_retention()).await {
            Ok(0) => return,
            Ok(count) => debug!(group = group.name(), count, "forgot old ids"),
            Err(error) => {
                warn!(group = group.name(), %error, "old ids cannot be removed now; trying again in a minute");
                return;
            }
        }
        if !stop.wait(FORGET_PAUSE).await {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use store::sqlite::SqliteStore;
    use store::{Inbox, InboxRules};
    use tokio::sync::watch;

    use super::*;
    use crate::Handler;

    #[tokio::test]
    async fn a_round_of_forgetting_goes_on_until_nothing_is_left() {
        const IDS: u64 = 30_000;
        let folder = tempfile::tempdir().expect("a folder");
        let store = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
        let connection = rusqlite::Connection::open(store.path()).expect("a connection");
        let old = format!(
            "INSERT INTO inbox_groups (grp, name) VALUES (1, 'billing');
             WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {IDS})
             INSERT INTO inbox_ids (grp, id, digest, topic, processed_at) SELECT 1, n, x'00', 'orders', 1 FROM n"
        );
        connection.execute_batch(&old).expect("old ids");
        let inbox = Arc::clone(&store) as Arc<dyn Inbox>;
        let group = Group::new("billing", inbox, Handler::Log, InboxRules::default());
        let (_asks, asked) = watch::channel(false);
        forget_all(&group, &mut Stop(asked)).await;
        let left: u64 =
            connection.query_row("SELECT count(*) FROM inbox_ids", [], |row| row.get(0)).expect("a count");
        assert_eq!(left, 0);
    }
}
