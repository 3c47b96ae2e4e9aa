//! Write, relay, broker, inbox, effect and acknowledgement, everything at once in one process.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use broker::embedded;
use inbox::{Acknowledge, Consumer, Group, Handler};
use message::{Message, RetryPolicy};
use relay::{Relay, Route, Settings};
use store::sqlite::SqliteStore;
use store::{Append, InboxRules, Inspect, NewMessage};

use crate::Size;

/// Messages written in one transaction, and claimed in one turn.
pub(crate) const BATCH: usize = 500;

/// What the handler does with a message.
pub(crate) const EFFECT: &str = "INSERT INTO effects (message_id, key) VALUES (:id, :key)";

pub(crate) fn message(size: Size, number: usize) -> Message {
    let message = Message::new("orders", vec![b'x'; size.payload]);
    match number.checked_rem(size.keys) {
        Some(customer) => message.key(format!("customer-{customer}")),
        None => message,
    }
}

/// The table of the handler's effects.
pub(crate) fn effects(path: &Path) -> rusqlite::Result<()> {
    let connection = rusqlite::Connection::open(path)?;
    connection.busy_timeout(Duration::from_secs(10))?;
    connection.execute_batch(
        "CREATE TABLE effects (position INTEGER PRIMARY KEY, message_id TEXT, key TEXT) STRICT",
    )
}

/// The time from the first write until the last acknowledgement is on disk.
pub(crate) async fn run(size: Size) -> Result<Duration> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("store.db");
    let store = Arc::new(SqliteStore::open(&path)?);
    effects(&path)?;
    let broker = embedded::Broker::open(embedded::Config::new(folder.path().join("broker.db")))?;
    let settings =
        Settings { groups: Arc::new(|_| vec!["bench".to_owned()]), batch: BATCH, ..Settings::default() };
    let relay =
        Relay::start(store.clone(), vec![Route::new("main", &["*"], Arc::new(broker.clone()))], settings);
    let rules =
        InboxRules { retry: RetryPolicy::default(), ordered: true, hold_dead: true, acknowledge: true };
    let group = Group::new("bench", store.clone(), Handler::Sql(EFFECT.to_owned()), rules)
        .acknowledge(Acknowledge::InStore);
    let consumer = Consumer::new(Arc::new(group), Arc::new(broker), vec!["orders".to_owned()]).start();
    while relay.status().lanes.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    let messages: Vec<NewMessage> = (0..size.messages).map(|number| message(size, number).into()).collect();
    let started = Instant::now();
    for batch in messages.chunks(BATCH) {
        for result in store.append(batch.to_vec()).await? {
            result?;
        }
    }
    while store.counts().await?.acknowledged_total < size.messages as u64 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let took = started.elapsed();
    consumer.drain().await;
    relay.drain().await;
    Ok(took)
}
