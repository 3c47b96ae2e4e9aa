//! The process that is killed: an application with its relay and its consumer.
//!
//! The application writes an order and its message in one transaction of its own, on a connection of its own,
//! and rolls some back. Everything it knows it reads from the database when it starts, as a service would.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use broker::embedded;
use inbox::{Acknowledge, Consumer, Group, Handler};
use message::{Message, RetryPolicy};
use rand::Rng;
use relay::{Relay, Route, Settings};
use rusqlite::{Connection, TransactionBehavior};
use store::sqlite::SqliteStore;
use store::{InboxRules, Store};

/// The consumer group of the proof.
pub const GROUP: &str = "proof";

/// The topic of the proof.
pub const TOPIC: &str = "orders";

/// What the handler does: an effect that nothing keeps from happening twice but the inbox.
const HANDLER: &str = "INSERT INTO effects (message_id, key, n)
                       VALUES (:id, :key, json_extract(:payload, '$.n'))";

/// What a worker does.
#[derive(Clone, Debug, clap::Args)]
pub struct Work {
    /// The folder of the databases.
    #[arg(long)]
    pub data: PathBuf,
    /// Orders to commit in all.
    #[arg(long, default_value_t = 100_000)]
    pub messages: u64,
    /// Keys to spread them over.
    #[arg(long, default_value_t = 1_000)]
    pub keys: u64,
    /// The lease of lanes and partitions: how long a dead process is waited for.
    #[arg(long, default_value = "1s", value_parser = humantime::parse_duration)]
    pub lease: Duration,
    /// The parts to run.
    #[arg(long, value_delimiter = ',', default_value = "producer,relay,consumer")]
    pub only: Vec<String>,
    /// Crash at the n-th time that this point is reached: `relay::published=3`.
    #[arg(long)]
    pub crash: Option<String>,
}

/// The outbox, the business tables and the inbox.
pub fn store_path(data: &Path) -> PathBuf {
    data.join("shop.db")
}

/// The broker's log.
pub fn broker_path(data: &Path) -> PathBuf {
    data.join("broker.db")
}

/// Works until everything that was to be committed is committed, sent, done and acknowledged.
pub async fn run(work: Work) -> Result<()> {
    let crash = work.crash.as_deref().map(arm).transpose()?;
    let runs = |part: &str| work.only.iter().any(|only| only == part);
    let store = Arc::new(SqliteStore::open(store_path(&work.data))?);
    prepare(&work.data)?;
    let broker = embedded::Broker::open(embedded::Config {
        lease: work.lease,
        ..embedded::Config::new(broker_path(&work.data))
    })?;

    let relay = runs("relay").then(|| {
        let settings = Settings {
            lease: work.lease,
            groups: Arc::new(|_| vec![GROUP.to_owned()]),
            ..Settings::default()
        };
        Relay::start(store.clone(), vec![Route::new("main", &["*"], Arc::new(broker.clone()))], settings)
    });
    let consumer = runs("consumer").then(|| {
        let rules =
            InboxRules { retry: RetryPolicy::default(), ordered: true, hold_dead: true, acknowledge: true };
        let group = Group::new(GROUP, store.clone(), Handler::Sql(HANDLER.to_owned()), rules)
            .acknowledge(Acknowledge::InStore);
        Consumer::new(Arc::new(group), Arc::new(broker.clone()), vec![TOPIC.to_owned()]).start()
    });
    let producer = runs("producer").then(|| {
        let (work, store) = (work.clone(), store.clone());
        std::thread::spawn(move || produce(&work, &store))
    });

    while !finished(&work, &*store).await? {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    if let Some(producer) = producer {
        producer.join().map_err(|_| anyhow::anyhow!("the producer panicked"))??;
    }
    if let Some(consumer) = consumer {
        consumer.drain().await;
    }
    if let Some(relay) = relay {
        relay.drain().await;
    }
    // A crash that was asked for and never came is a proof of nothing.
    if let Some((point, left)) = crash {
        anyhow::ensure!(left.load(Ordering::Relaxed) == 0, "the point {point} was not reached often enough");
    }
    Ok(())
}

/// Makes the process abort, without unwinding or flushing anything, at a named point.
fn arm(crash: &str) -> Result<(String, Arc<AtomicU64>)> {
    let (point, times) = crash.split_once('=').context("--crash wants POINT=TIMES")?;
    let left = Arc::new(AtomicU64::new(times.parse()?));
    let counting = left.clone();
    fail::cfg_callback(point, move || {
        if counting.fetch_sub(1, Ordering::Relaxed) == 1 {
            std::process::abort();
        }
    })
    .map_err(anyhow::Error::msg)?;
    Ok((point.to_owned(), left))
}

fn connect(data: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(store_path(data))?;
    connection.busy_timeout(Duration::from_secs(30))?;
    connection.pragma_update(None, "synchronous", "full")?;
    Ok(connection)
}

fn prepare(data: &Path) -> rusqlite::Result<()> {
    connect(data)?.execute_batch(
        "CREATE TABLE IF NOT EXISTS orders (key TEXT, n INTEGER, PRIMARY KEY (key, n)) STRICT, WITHOUT ROWID;
         CREATE TABLE IF NOT EXISTS effects (
             position INTEGER PRIMARY KEY AUTOINCREMENT, message_id TEXT, key TEXT, n INTEGER) STRICT;",
    )
}

/// Commits orders with their messages, up to twenty in a transaction, and rolls every tenth transaction back.
fn produce(work: &Work, store: &SqliteStore) -> Result<()> {
    let mut connection = connect(&work.data)?;
    let mut random = rand::rng();
    let mut committed: u64 = connection.query_row("SELECT count(*) FROM orders", [], |row| row.get(0))?;
    while committed < work.messages {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let size = random.random_range(1..=20).min(work.messages - committed);
        for _ in 0..size {
            let key = format!("customer-{}", random.random_range(0..work.keys));
            let n: u64 = transaction
                .prepare_cached("SELECT coalesce(max(n), 0) + 1 FROM orders WHERE key = ?1")?
                .query_row([&key], |row| row.get(0))?;
            transaction.prepare_cached("INSERT INTO orders VALUES (?1, ?2)")?.execute((&key, n))?;
            let payload = serde_json::json!({ "n": n, "note": "x".repeat(random.random_range(0..300)) });
            store::sqlite::append(
                &transaction,
                &Message::json(TOPIC, &payload)?.key(key).kind("OrderPlaced"),
            )?;
        }
        if random.random_range(0..10) == 0 {
            transaction.rollback()?;
        } else {
            transaction.commit()?;
            committed += size;
            store.ring();
        }
    }
    Ok(())
}

async fn finished(work: &Work, store: &dyn Store) -> Result<bool> {
    let counts = store.counts().await?;
    Ok(counts.sent == work.messages && counts.acknowledged_total >= work.messages)
}
