//! A store that does what it is asked and whose answers are lost on the way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use broker::embedded::{Broker, Config};
use message::Message;
use relay::{Relay, Route, Settings};
use store::sqlite::SqliteStore;
use store::{Append, Inspect};

#[tokio::test(flavor = "multi_thread")]
async fn claims_and_settles_of_which_the_relay_never_heard_strand_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
    let broker = Broker::open(Config::new(folder.path().join("broker.db"))).expect("a broker");
    let message = |n: usize| Message::new("orders", n.to_string()).key(format!("k{}", n % 7)).into();
    // Every fourth answer is lost, sixteen of them.
    fail::cfg("store::turned", "25%16*return").expect("a failpoint");
    let settings = Settings { lease: Duration::from_secs(2), ..Settings::default() };
    let relay = Relay::start(store.clone(), vec![Route::new("main", &["*"], Arc::new(broker))], settings);
    for n in 0..60 {
        store.append((n * 10..n * 10 + 10).map(message).collect()).await.expect("stored");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let started = Instant::now();
    while store.counts().await.expect("counts").sent < 600 {
        assert!(started.elapsed() < Duration::from_secs(60), "stuck: {:?}", store.counts().await);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    fail::remove("store::turned");
    relay.drain().await;
}
