//! What people and foreign programs do to the file with plain SQL must stop nobody.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use message::{Message, Status};
use rusqlite::Connection;
use store::sqlite::SqliteStore;
use store::{Amend, Append, Filter, Inspect, Page, Retention, Store, Turned};
use tempfile::TempDir;
use testkit::store::{Relay, dead, holding, sent};

const PAGE: Page = Page { after: None, limit: 100, newest_first: false };

fn open() -> (TempDir, Arc<SqliteStore>, Connection) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("store.db");
    let store = Arc::new(SqliteStore::open(&path).unwrap());
    let application = Connection::open(&path).unwrap();
    application.busy_timeout(Duration::from_secs(10)).unwrap();
    (folder, store, application)
}

async fn relay(store: &Arc<SqliteStore>) -> Relay {
    let store: Arc<dyn Store> = store.clone();
    Relay::with_all_lanes(store).await
}

#[tokio::test]
async fn headers_that_nobody_can_read_make_their_message_dead_and_stop_no_other() {
    let (_folder, store, application) = open();
    for headers in [r#"{"a":"\ud800"}"#, "{}", r#"{"b":1e999}"#, r#"{"n": 7}"#] {
        application
            .execute(
                "INSERT INTO outbox_events (topic, payload, headers) VALUES ('orders', '1', ?1)",
                [headers],
            )
            .unwrap();
    }
    let relay = relay(&store).await;
    assert_eq!(relay.drain(10, &sent()).await.len(), 2);
    let counts = store.counts().await.unwrap();
    assert_eq!((counts.sent, counts.dead, counts.pending), (2, 2, 0));
    let dead = Filter { statuses: vec![Status::Dead], ..Filter::default() };
    for record in store.list(&dead, PAGE).await.unwrap().items {
        assert!(record.dead_reason.unwrap().contains("headers"));
    }
}

#[tokio::test]
async fn deleting_by_hand_a_dead_message_that_holds_its_key_lets_the_others_go() {
    let (_folder, store, application) = open();
    let relay = relay(&store).await.by(holding);
    store.append((0..3).map(|_| Message::new("orders", "1").key("k").into()).collect()).await.unwrap();
    let batches = relay.claim(1).await;
    relay.settle_all(&batches, &dead(true)).await;
    assert!(relay.claim(10).await.is_empty(), "the others wait");
    application.execute("DELETE FROM outbox_events WHERE status = 'dead'", []).unwrap();
    assert_eq!(relay.drain(10, &sent()).await.len(), 2);
    assert!(store.holds(10).await.unwrap().is_empty());
    let left: i64 =
        application.query_row("SELECT count(*) FROM outbox_attempts", [], |row| row.get(0)).unwrap();
    assert_eq!(left, 0, "nothing is left of the one that is gone");
}

#[tokio::test]
async fn one_impossible_topic_is_turned_away_and_the_others_are_stored() {
    let (_folder, store, _application) = open();
    let messages = vec![Message::new("orders", "1").into(), Message::new("no such topic!", "2").into()];
    let results = store.append(messages).await.unwrap();
    assert!(results[0].is_ok());
    assert!(matches!(&results[1], Err(Turned::Invalid(_))));
    assert_eq!(store.counts().await.unwrap().pending, 1);
}

#[tokio::test]
async fn the_pending_are_listed_quickly_behind_many_that_were_sent() {
    let (_folder, store, application) = open();
    application
        .execute_batch(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000)
             INSERT INTO outbox_events (topic, payload, ready, status, sent_at)
             SELECT 'orders', 'x', 0, 'sent', 1 FROM n;
             INSERT INTO outbox_events (topic, payload) VALUES ('orders', 'a'), ('refunds', 'b');",
        )
        .unwrap();
    let pending = Filter { statuses: vec![Status::Pending, Status::Failed], ..Filter::default() };
    let all = Filter::default();
    let quickest = async |filter: &Filter, page: Page| {
        let mut best = Duration::MAX;
        for _ in 0..5 {
            let started = Instant::now();
            let listed = store.list(filter, page).await.unwrap();
            assert!(!listed.items.is_empty());
            best = best.min(started.elapsed());
        }
        best
    };
    let deep = Page { after: Some(199_990), limit: 5, newest_first: false };
    let shallow = quickest(&all, Page { limit: 5, ..PAGE }).await;
    let (pending, deep) = (quickest(&pending, PAGE).await, quickest(&all, deep).await);
    // A scan of the table is some hundred times slower than a seek; a noisy machine is not.
    assert!(
        pending < shallow * 20 + Duration::from_millis(10),
        "pending {pending:?}, first page {shallow:?}"
    );
    assert!(deep < shallow * 20 + Duration::from_millis(10), "deep {deep:?}, first page {shallow:?}");
}

#[tokio::test]
async fn a_dead_message_is_kept_from_when_it_died_and_not_from_when_it_was_written() {
    let (_folder, store, application) = open();
    application
        .execute_batch(
            "INSERT INTO outbox_events (topic, payload, ready, status, written_at, dead_at, dead_reason)
             VALUES ('orders', 'old', 0, 'dead', 0, 0, 'x'),
                    ('orders', 'fresh', 0, 'dead', 0, unixepoch() * 1000, 'x');
             UPDATE outbox_counters SET dead = 2",
        )
        .unwrap();
    store.clean(&Retention::default()).await.unwrap();
    let left = store.list(&Filter::default(), PAGE).await.unwrap().items;
    assert_eq!(left.iter().map(|record| &record.message.payload[..]).collect::<Vec<_>>(), [b"fresh"]);
}
