//! What is SQLite's own: plain SQL writers, the application's transactions, query plans and migrations.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use message::{Message, MessageId, Status};
use rusqlite::{Connection, params};
use store::sqlite::{MIGRATIONS, SqliteStore};
use store::{Amend, Append, Claim, Filter, Inspect, Page, Record, Retention, Store};
use tempfile::TempDir;
use testkit::store::{Relay, dead, failed, holding, sent};

const ALL: Page = Page { after: None, limit: 10_000, newest_first: false };

struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        Self { folder: TempDir::new().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("store.db")
    }

    fn open(&self) -> Arc<SqliteStore> {
        Arc::new(SqliteStore::open(self.path()).unwrap())
    }

    /// The application's own connection, which knows nothing of Postrider but the table.
    fn application(&self) -> Connection {
        connect(&self.path())
    }
}

fn connect(path: &Path) -> Connection {
    let connection = Connection::open(path).unwrap();
    connection.busy_timeout(Duration::from_secs(10)).unwrap();
    connection
}

async fn records(store: &SqliteStore) -> Vec<Record> {
    store.list(&Filter::default(), ALL).await.unwrap().items
}

async fn relay(store: &Arc<SqliteStore>) -> Relay {
    let store: Arc<dyn Store> = store.clone();
    Relay::with_all_lanes(store).await
}

/// Whether the kept counts are those of the records.
async fn assert_counts_agree(store: &SqliteStore) {
    let records = records(store).await;
    let count = |status| records.iter().filter(|record| record.state.status == status).count() as u64;
    let counts = store.counts().await.unwrap();
    let kept = [counts.pending, counts.in_flight, counts.sent, counts.failed, counts.dead];
    assert_eq!(kept, Status::ALL.map(count));
}

#[tokio::test]
async fn any_program_writes_with_plain_sql() {
    let place = Place::new();
    let store = place.open();
    let application = place.application();
    let insert = "INSERT INTO outbox_events (topic, key, payload) VALUES (?1, ?2, ?3)";
    application.execute(insert, params!["orders", "42", "{\"total\": 10}"]).unwrap();
    application.execute(insert, params!["orders", "42", vec![0_u8, 255]]).unwrap();
    application.execute(insert, params!["orders", None::<String>, 42]).unwrap();
    application.execute(insert, params!["orders", "", 1.5]).unwrap();
    application.execute("INSERT INTO outbox_events (topic, payload) VALUES ('refunds', '')", []).unwrap();

    let relay = relay(&store).await;
    let taken = relay.drain(10, &sent()).await;
    assert_eq!(taken.len(), 5);
    let found = records(&store).await;
    let payloads: Vec<&[u8]> = found.iter().map(|record| &record.message.payload[..]).collect();
    assert_eq!(payloads, [&b"{\"total\": 10}"[..], &[0, 255], b"42", b"1.5", b""]);
    let keys: Vec<_> = found.iter().map(|record| record.message.key.as_deref()).collect();
    assert_eq!(keys, [Some("42"), Some("42"), None, Some(""), None]);
    for record in &found {
        assert_eq!(record.message.id.0.get_version_num(), 7, "ids are made like ours");
        assert_eq!(record.message.content_type, Message::DEFAULT_CONTENT_TYPE);
        assert!(record.message.headers.is_empty());
        assert!((chrono_now() - record.written_at.timestamp_millis()).abs() < 60_000);
    }
    assert_counts_agree(&store).await;
}

fn chrono_now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    i64::try_from(since.as_millis()).unwrap()
}

#[tokio::test]
async fn plain_sql_that_makes_no_sense_is_refused_with_the_column() {
    let place = Place::new();
    let store = place.open();
    let application = place.application();
    let cases = [
        ("(payload) VALUES ('{}')", "outbox_events.topic"),
        ("(topic) VALUES ('orders')", "outbox_events.payload"),
        ("(topic, payload) VALUES ('', '{}')", "topic"),
        ("(topic, payload) VALUES ('two words', '{}')", "topic"),
        ("(topic, payload, id) VALUES ('orders', '{}', 'not an id')", "id"),
        ("(topic, payload, id) VALUES ('orders', '{}', '0192D3A4-0000-7000-8000-000000000000')", "id"),
        ("(topic, payload, headers) VALUES ('orders', '{}', 'not json')", "headers"),
        ("(topic, payload, headers) VALUES ('orders', '{}', '[]')", "headers"),
        ("(topic, payload, ack_groups) VALUES ('orders', '{}', '{}')", "ack_groups"),
        ("(topic, payload, status) VALUES ('orders', '{}', 'in_flight')", "status"),
        ("(topic, payload, occurred_at) VALUES ('orders', '{}', 'yesterday')", "occurred_at"),
    ];
    for (rest, expected) in cases {
        let error = application.execute(&format!("INSERT INTO outbox_events {rest}"), []).unwrap_err();
        assert!(error.to_string().contains(expected), "{rest}: {error}");
    }
    assert!(records(&store).await.is_empty());
    assert_counts_agree(&store).await;
}

#[tokio::test]
async fn numbers_that_writers_draw_and_do_not_use_are_not_counted_for_good() {
    let place = Place::new();
    let store = place.open();
    let application = place.application();
    let id = MessageId::new().to_string();
    let values = "INTO outbox_events (id, topic, payload) VALUES (?1, 'orders', '{}')";
    for verb in ["INSERT", "INSERT OR IGNORE", "INSERT OR REPLACE"] {
        application.execute(&format!("{verb} {values}"), [&id]).unwrap();
    }
    application.execute(&format!("INSERT {values} ON CONFLICT DO NOTHING"), [&id]).unwrap();
    application
        .execute("INSERT INTO outbox_events (seq, topic, payload) VALUES (1000, 'orders', '{}')", [])
        .unwrap();
    assert_eq!(relay(&store).await.drain(10, &sent()).await.len(), 2);
    assert_counts_agree(&store).await;
    store.clean(&Retention::default()).await.unwrap();
    store.append(vec![Message::new("orders", "1").into()]).await.unwrap();
    assert_counts_agree(&store).await;
}

#[tokio::test]
async fn a_row_deleted_by_hand_while_in_flight_stops_nobody() {
    for leaves in [false, true] {
        let place = Place::new();
        let store = place.open();
        let first = relay(&store).await;
        let messages = (0..3).map(|_| Message::new("orders", "{}").key("k").into()).collect();
        store.append(messages).await.unwrap();
        let batches = first.claim(10).await;
        place
            .application()
            .execute("DELETE FROM outbox_events WHERE seq = ?1", [batches[0].messages[1].seq])
            .unwrap();
        if leaves {
            first.leave().await;
            let second = relay(&store).await;
            assert_eq!(second.drain(10, &sent()).await.len(), 2);
        } else {
            first.settle_all(&batches, &failed(Duration::ZERO, true)).await;
            assert_eq!(records(&store).await.len(), 2);
        }
        assert_counts_agree(&store).await;
    }
}

#[tokio::test]
async fn what_the_application_rolls_back_was_never_written() {
    let place = Place::new();
    let store = place.open();
    let mut application = place.application();
    application.execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY)").unwrap();
    for (number, commit) in [(1, false), (2, true), (3, false)] {
        let transaction = application.transaction().unwrap();
        transaction.execute("INSERT INTO orders VALUES (?1)", [number]).unwrap();
        let message = Message::new("orders", number.to_string()).key("k");
        store::sqlite::append(&transaction, &message).unwrap();
        if commit {
            transaction.commit().unwrap();
        } else {
            transaction.rollback().unwrap();
        }
    }
    let found = records(&store).await;
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].message.payload, "2");
    let orders: i64 = application.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap();
    assert_eq!(orders, 1);
    assert_counts_agree(&store).await;
}

#[cfg(feature = "sqlx")]
mod sqlx_adapter {
    use sqlx::{Connection, SqliteConnection};
    use store::sqlite::sqlx as adapter;
    use store::{Arrival, Inbox, Verdict};

    use super::*;

    async fn connect(place: &Place) -> SqliteConnection {
        let url = format!("sqlite://{}", place.path().display());
        SqliteConnection::connect(&url).await.unwrap()
    }

    #[tokio::test]
    async fn a_message_shares_the_fate_of_the_users_transaction() {
        let place = Place::new();
        let store = place.open();
        let mut connection = connect(&place).await;
        let kept = Message::new("orders", "kept").key("k").kind("Placed").header("a", "b");
        let undone = Message::new("orders", "undone");
        let mut transaction = connection.begin().await.unwrap();
        adapter::append(&mut transaction, &undone).await.unwrap();
        transaction.rollback().await.unwrap();
        let mut transaction = connection.begin().await.unwrap();
        adapter::append(&mut transaction, &kept).await.unwrap();
        assert!(store.record(kept.id).await.unwrap().is_none(), "nobody sees it before the commit");
        transaction.commit().await.unwrap();
        assert!(store.record(undone.id).await.unwrap().is_none());
        let found = store.record(kept.id).await.unwrap().unwrap().message;
        assert_eq!(Message { occurred_at: kept.occurred_at, ..found }, kept);
        assert_counts_agree(&store).await;
    }

    #[tokio::test]
    async fn a_mark_shares_the_fate_of_the_users_transaction() {
        let place = Place::new();
        let store = place.open();
        let mut connection = connect(&place).await;
        let message = Message::new("orders", "1").key("k");
        let arrival = Arrival { message: message.clone(), seq: Some(1), delivery: 0 };
        let mut transaction = connection.begin().await.unwrap();
        assert!(adapter::once(&mut transaction, "billing", &arrival).await.unwrap());
        transaction.rollback().await.unwrap();
        for first in [true, false] {
            let mut transaction = connection.begin().await.unwrap();
            assert_eq!(adapter::once(&mut transaction, "billing", &arrival).await.unwrap(), first);
            transaction.commit().await.unwrap();
        }
        let counts = store.inbox_counts("billing").await.unwrap();
        assert_eq!((counts.processed, counts.duplicates), (1, 1));
    }

    #[tokio::test]
    async fn an_acknowledgement_counts_only_for_what_was_sent_to_that_group() {
        let place = Place::new();
        let store = place.open();
        let mut connection = connect(&place).await;
        let message = Message::new("orders", "1").key("k");
        store.append(vec![message.clone().into()]).await.unwrap();
        adapter::acknowledge(&mut connection, "billing", message.id).await.unwrap();
        assert_eq!(store.counts().await.unwrap().acknowledged_total, 0, "it was never sent");
        let relay = relay(&store).await;
        let asked = Verdict::Sent { ack_groups: vec!["billing".to_owned()] };
        relay.settle_all(&relay.claim(1).await, &asked).await;
        for group in ["audit", "billing", "billing"] {
            let mut transaction = connection.begin().await.unwrap();
            adapter::acknowledge(&mut transaction, group, message.id).await.unwrap();
            transaction.commit().await.unwrap();
        }
        let found = store.record(message.id).await.unwrap().unwrap();
        let groups: Vec<_> = found.acknowledgements.iter().map(|done| done.group.as_str()).collect();
        assert_eq!(groups, ["billing"]);
        assert_eq!(store.counts().await.unwrap().acknowledged_total, 1);
        let filter = Filter { unacknowledged_by: Some("billing".to_owned()), ..Filter::default() };
        assert!(store.list(&filter, ALL).await.unwrap().items.is_empty());
    }
}

/// The plan of a statement, one step a line.
fn plan(connection: &Connection, sql: &str) -> String {
    let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
    let steps = statement.query_map([], |row| row.get::<_, String>(3)).unwrap();
    steps.collect::<Result<Vec<_>, _>>().unwrap().join("\n")
}

/// The SQL of the claim, as it is in its source: a copy here would soon be of something else.
fn claim_statements() -> Vec<String> {
    let source = include_str!("../src/sqlite/claim.rs");
    source
        .split('"')
        .skip(1)
        .step_by(2)
        .filter(|text| text.starts_with("SELECT") && text.contains("FROM outbox_events"))
        // Parameters are numbers and names; for the plan any value will do.
        .map(|text| text.replace("?1", "'1'").replace("?2", "2"))
        .collect()
}

#[tokio::test]
async fn the_claim_reads_indexes_and_never_scans_the_table() {
    let place = Place::new();
    let store = place.open();
    drop(store);
    let connection = place.application();
    let statements = claim_statements();
    assert!(statements.len() >= 4, "the claim's statements are found: {statements:#?}");
    let mut ready = 0;
    for sql in statements {
        let plan = plan(&connection, &sql);
        let searches = plan.lines().all(|step| {
            step.starts_with("SEARCH") || step.contains("USING") && !step.contains("TEMP B-TREE")
        });
        assert!(searches, "{sql}\n{plan}");
        assert!(!plan.lines().any(|step| step == "SCAN outbox_events"), "{sql}\n{plan}");
        ready += usize::from(plan.contains("outbox_ready"));
    }
    assert!(ready >= 2, "the claim finds sendable rows by outbox_ready");
}

/// How long it takes to claim and settle some messages, the quickest of several tries.
async fn cost(store: &Arc<SqliteStore>, relay: &Relay) -> Duration {
    let mut best = Duration::MAX;
    for _ in 0..10 {
        let messages = (0..50).map(|n| Message::new("orders", "{}").key(n.to_string()).into()).collect();
        store.append(messages).await.unwrap();
        let started = Instant::now();
        assert_eq!(relay.drain(100, &sent()).await.len(), 50);
        best = best.min(started.elapsed());
    }
    best
}

#[tokio::test]
async fn a_claim_costs_the_same_however_many_were_sent_before() {
    let place = Place::new();
    let store = place.open();
    let relay = relay(&store).await;
    let empty = cost(&store, &relay).await;
    place
        .application()
        .execute_batch(
            "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 200000)
             INSERT INTO outbox_events (topic, key, payload, status, ready, sent_at)
             SELECT 'orders', n, '{}', 'sent', 0, 1 FROM n",
        )
        .unwrap();
    let full = cost(&store, &relay).await;
    // Generous, because machines are busy; a claim made to scan these rows does not pass it.
    assert!(full < empty * 5 + Duration::from_millis(20), "{empty:?} with few, {full:?} with many");
}

#[tokio::test]
async fn thousands_of_followers_come_in_order_after_the_one_they_waited_for() {
    const FOLLOWERS: usize = 2_500;
    let place = Place::new();
    let store = place.open();
    let relay = relay(&store).await.by(holding);
    let write = async |count: usize| {
        let messages = (0..count).map(|_| Message::new("orders", "{}").key("k").into()).collect();
        store.append(messages).await.unwrap();
    };
    write(1 + FOLLOWERS).await;
    relay.settle_all(&relay.claim(1).await, &dead(true)).await;
    assert!(relay.drain(500, &sent()).await.is_empty());
    assert_eq!(records(&store).await.iter().filter(|record| record.held).count(), FOLLOWERS);

    let first = records(&store).await[0].message.id;
    store.requeue(first, "test").await.unwrap();
    relay.settle_all(&relay.claim(1).await, &sent()).await;
    // Written while they are being let go: behind all of them.
    write(10).await;
    let taken = relay.drain(700, &sent()).await;
    let seqs: Vec<i64> = taken.iter().map(|claimed| claimed.seq).collect();
    assert_eq!(seqs.len(), FOLLOWERS + 10);
    assert!(seqs.is_sorted(), "they come in the order of writing");
    assert!(store.holds(10).await.unwrap().is_empty());
    assert_counts_agree(&store).await;
}

#[tokio::test]
async fn a_follower_that_fails_while_others_are_let_go_holds_those_behind_it() {
    let place = Place::new();
    let store = place.open();
    let relay = relay(&store).await.by(holding);
    let messages = (0..2_200).map(|_| Message::new("orders", "{}").key("k").into()).collect();
    store.append(messages).await.unwrap();
    relay.settle_all(&relay.claim(1).await, &failed(Duration::ZERO, true)).await;
    // The first again, meeting and parking all others.
    let mut order = Vec::new();
    let mut failures = 0;
    while order.len() < 2_200 {
        for batch in relay.claim(300).await {
            let fails = failures < 5 && !order.is_empty();
            failures += usize::from(fails);
            // The first of the batch fails and the rest are given back, as a relay does.
            let head = batch.messages[0].seq;
            relay
                .settle(&batch, |claimed| match (fails, claimed.seq == head) {
                    (true, true) => failed(Duration::ZERO, true),
                    (true, false) => testkit::store::released(),
                    (false, _) => sent(),
                })
                .await;
            if !fails {
                order.extend(batch.messages.iter().map(|claimed| claimed.seq));
            }
        }
    }
    assert!(order.is_sorted(), "nobody overtakes");
    assert_counts_agree(&store).await;
}

#[test]
fn a_file_from_a_newer_program_is_refused() {
    let place = Place::new();
    drop(place.open());
    let newer = MIGRATIONS.last().unwrap().version + 1;
    place
        .application()
        .execute("INSERT INTO postrider_migrations (version, name) VALUES (?1, 'later')", [newer])
        .unwrap();
    let error = SqliteStore::open(place.path()).unwrap_err().to_string();
    assert!(error.contains("use a newer program"), "{error}");
    let error = store::sqlite::pending(&place.path()).unwrap_err().to_string();
    assert!(error.contains("use a newer program"), "{error}");
}

#[test]
fn a_file_that_is_no_database_is_refused() {
    let place = Place::new();
    std::fs::write(place.path(), "something else entirely, and long enough".repeat(50)).unwrap();
    let error = SqliteStore::open(place.path()).unwrap_err().to_string();
    assert!(error.contains("not a database"), "{error}");
}

#[test]
fn many_may_open_a_new_file_at_once() {
    let place = Place::new();
    assert_eq!(store::sqlite::pending(&place.path()).unwrap().len(), MIGRATIONS.len());
    std::thread::scope(|scope| {
        let opening: Vec<_> = (0..8).map(|_| scope.spawn(|| SqliteStore::open(place.path()))).collect();
        for store in opening {
            store.join().unwrap().unwrap();
        }
    });
    assert!(store::sqlite::pending(&place.path()).unwrap().is_empty());
    let applied: usize = place
        .application()
        .query_row("SELECT count(*) FROM postrider_migrations", [], |row| row.get(0))
        .unwrap();
    assert_eq!(applied, MIGRATIONS.len());
}

#[tokio::test]
async fn the_view_shows_what_is_in_flight() {
    let place = Place::new();
    let store = place.open();
    let relay = relay(&store).await;
    store.append(vec![Message::new("orders", "1").into(), Message::new("orders", "2").into()]).await.unwrap();
    let batches = relay.claim(1).await;
    let application = place.application();
    let shown = || -> Vec<(String, bool)> {
        let mut statement = application
            .prepare("SELECT status, locked_until IS NOT NULL FROM outbox_status ORDER BY seq")
            .unwrap();
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        rows.collect::<Result<_, _>>().unwrap()
    };
    let row = |status: &str, locked| (status.to_owned(), locked);
    assert_eq!(shown(), [row("in_flight", true), row("pending", false)]);
    relay.settle_all(&batches, &sent()).await;
    assert_eq!(shown(), [row("sent", false), row("pending", false)]);
}

#[tokio::test]
async fn a_relay_in_another_process_finds_what_it_was_not_woken_for() {
    let place = Place::new();
    let (here, there) = (place.open(), place.open());
    let relay = relay(&there).await;
    assert!(relay.claim(10).await.is_empty());
    here.append(vec![Message::new("orders", "1").into()]).await.unwrap();
    assert_eq!(relay.claim(10).await.len(), 1);
    // The bell of this process rings for its own relays only, and only as a hint.
    tokio::time::timeout(Duration::from_secs(5), here.woken()).await.unwrap();
}
