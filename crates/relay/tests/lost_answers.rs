//! A store that does what it is asked and whose answers are lost on the way.

use std::sync::Arc;

use broker::embedded::{Broker, Config};
use message::Message;
use relay::{Relay, Route, Settings};
use store::sqlite::SqliteStore;
use store::{Append, Filter, Inspect, NewMessage, Page};
use testkit::until;

#[tokio::test(flavor = "multi_thread")]
async fn claims_and_settles_of_which_the_relay_never_heard_strand_nothing_and_blame_nobody() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
    let broker = Broker::open(Config::new(folder.path().join("broker.db"))).expect("a broker");
    let message = |key: usize, n: usize| -> NewMessage {
        Message::new("orders", n.to_string()).key(format!("k{key}")).into()
    };
    let sent = async || store.counts().await.expect("counts").sent;

    // More in a row than there are crashes that a message survives.
    fail::cfg("store::turned", "8*return").expect("a failpoint");
    store.append((0..10).map(|n| message(0, n)).collect()).await.expect("stored");
    let relay =
        Relay::start(store.clone(), vec![Route::new("main", &["*"], Arc::new(broker))], Settings::default());
    until("the first", async || sent().await == 10).await;

    // Every fourth, while messages come.
    fail::cfg("store::turned", "25%16*return").expect("a failpoint");
    for n in 1..60 {
        let before = sent().await;
        store.append((n * 10..n * 10 + 10).map(|n| message(n % 7, n)).collect()).await.expect("stored");
        until("progress", async || sent().await > before).await;
    }
    until("the rest", async || sent().await == 600).await;
    fail::remove("store::turned");
    relay.drain().await;

    let all = Page { after: None, limit: 1_000, newest_first: false };
    for record in store.list(&Filter::default(), all).await.expect("a list").items {
        assert_eq!(record.state.crashes, 0, "nothing crashed");
    }
}
