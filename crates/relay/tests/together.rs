//! A route that promises exactly once: messages and notes of them in transactions of the broker.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use broker::Subscriber;
use broker::embedded::{Broker, Config};
use message::{Message, MessageId};
use relay::{Relay, Route, Running, Settings, Settle};
use store::sqlite::SqliteStore;
use store::{Append, Inspect};

struct Bench {
    store: Arc<SqliteStore>,
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
        Self { store, folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("broker.db")
    }

    fn broker(&self) -> Broker {
        Broker::open(Config::new(self.path())).expect("a broker")
    }

    /// A relay as another process would have it.
    fn relay(&self) -> Running {
        let route = Route::new("main", &["*"], Arc::new(self.broker()));
        let route = Route { settle: Settle::Together, ..route };
        let settings = Settings { lease: Duration::from_secs(2), ..Settings::default() };
        Relay::start(self.store.clone(), vec![route], settings)
    }

    async fn write(&self, count: usize) {
        let message = |n: usize| Message::new("orders", n.to_string()).key(format!("key {}", n % 50)).into();
        let results = self.store.append((0..count).map(message).collect()).await.expect("stored");
        assert!(results.iter().all(Result::is_ok));
    }

    async fn until_sent(&self, count: u64) {
        let sent = async || self.store.counts().await.expect("counts").sent == count;
        testkit::until(&format!("{count} sent messages"), sent).await;
    }

    /// Asks the broker's file.
    fn count(&self, what: &str) -> u64 {
        let file = rusqlite::Connection::open(self.path()).expect("the file can be opened");
        let count = format!("SELECT count(*) FROM {what}");
        file.query_row(&count, [], |row| row.get(0)).expect("it can be asked")
    }

    /// The messages in the log.
    async fn log(&self, count: usize) -> Vec<MessageId> {
        let mut reader = self.broker().subscribe("auditor", &["orders".to_owned()]).await.expect("a reader");
        let mut ids = Vec::new();
        while ids.len() < count {
            let more = reader.receive(1_000).await.expect("messages");
            ids.extend(more.into_iter().map(|delivery| delivery.message.id));
        }
        ids
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lanes_go_from_one_relay_to_another_in_the_middle_of_the_work_and_nobody_is_fenced() {
    const ROUNDS: u64 = 30;
    let bench = Bench::new();
    let first = bench.relay();
    bench.write(100).await;
    bench.until_sent(100).await;
    let second = bench.relay();
    for round in 1..=ROUNDS {
        bench.write(100).await;
        if round == ROUNDS / 2 {
            let shared = async || !second.status().lanes.is_empty() && first.status().instances == 2;
            testkit::until("lanes for both", shared).await;
        }
    }
    bench.until_sent(100 * (ROUNDS + 1)).await;
    first.drain().await;
    bench.write(100).await;
    bench.until_sent(100 * (ROUNDS + 2)).await;
    assert_eq!(
        bench.count("broker_senders WHERE fenced"),
        0,
        "lanes that are given back are taken from nobody"
    );
    second.drain().await;
    assert_eq!(bench.count("broker_claims"), 0, "and all are given back in the end");
    let total = 100 * (ROUNDS as usize + 2);
    let log = bench.log(total).await;
    assert_eq!(log.iter().collect::<HashSet<_>>().len(), log.len(), "each is there once");
    assert_eq!(log.len(), total);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_vanished_is_fenced_by_the_next_and_then_forgotten() {
    let bench = Bench::new();
    let first = bench.relay();
    bench.write(100).await;
    bench.until_sent(100).await;
    let lanes = bench.count("broker_claims");
    assert!(lanes > 0);
    // As a crash would: nothing is given back.
    drop(first);
    let second = bench.relay();
    bench.write(100).await;
    bench.until_sent(200).await;
    let forgotten =
        async || bench.count("broker_senders WHERE fenced") == 0 && bench.count("broker_claims") == lanes;
    testkit::until("the end of the claims of the first", forgotten).await;
    second.drain().await;
    assert_eq!(bench.log(200).await.iter().collect::<HashSet<_>>().len(), 200);
}
