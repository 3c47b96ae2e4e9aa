//! What is PostgreSQL's own: plain SQL writers, the application's transactions, low-water marks and migrations.

#![cfg(feature = "postgres")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod postgres_server;

use std::sync::Arc;
use std::time::Duration;

use message::{Message, MessageId, Status};
use store::postgres::{Config, MIGRATIONS, PostgresStore};
use store::{
    Acknowledged, Amend, Append, Arrival, Claim, Filter, Inbox, InboxRules, Inspect, Page, Receipt, Record,
    Sent, Store, Verdict, Work,
};
use testkit::store::{Relay, dead, free, holding, sent};
use testkit::{eventually, within};
use tokio_postgres::Client;

use postgres_server::{Database, number};

const ALL: Page = Page { after: None, limit: 10_000, newest_first: false };
const PATIENCE: Duration = Duration::from_secs(10);

async fn records(store: &PostgresStore) -> Vec<Record> {
    store.list(&Filter::default(), ALL).await.unwrap().items
}

async fn relay(store: &Arc<PostgresStore>) -> Relay {
    let store: Arc<dyn Store> = store.clone();
    Relay::with_all_lanes(store).await
}

/// Whether the kept counts are those of the records.
async fn assert_counts_agree(store: &PostgresStore) {
    let records = records(store).await;
    let count = |status| records.iter().filter(|record| record.state.status == status).count() as u64;
    let counts = store.counts().await.unwrap();
    let kept = [counts.pending, counts.in_flight, counts.sent, counts.failed, counts.dead];
    assert_eq!(kept, Status::ALL.map(count));
}

#[tokio::test]
async fn any_program_writes_with_plain_sql() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let application = database.application().await;
    application
        .batch_execute(
            "INSERT INTO outbox_events (topic, key, payload) VALUES ('orders', '42', '{\"total\": 10}');
             INSERT INTO outbox_events (topic, key, payload) VALUES ('orders', '42', '\\x00ff');
             INSERT INTO outbox_events (topic, payload) VALUES ('refunds', '');
             INSERT INTO outbox_events (topic, payload, headers, ack_groups)
             VALUES ('refunds', '{}', '{\"a\": 1, \"b\": \"x\"}', '[\"billing\"]');",
        )
        .await
        .unwrap();
    let relay = relay(&store).await;
    assert_eq!(relay.drain(10, &sent()).await.len(), 4);
    let found = records(&store).await;
    let payloads: Vec<&[u8]> = found.iter().map(|record| &record.message.payload[..]).collect();
    assert_eq!(payloads, [&b"{\"total\": 10}"[..], &[0, 255], b"", b"{}"]);
    for record in &found {
        assert_eq!(record.message.id.0.get_version_num(), 7, "ids are made like ours");
        assert_eq!(record.message.content_type, Message::DEFAULT_CONTENT_TYPE);
    }
    assert_eq!(found[3].message.headers["a"], "1", "what is no text is shown as JSON");
    assert_eq!(found[3].ack_groups, Some(vec!["billing".to_owned()]));
    assert_counts_agree(&store).await;
}

#[tokio::test]
async fn plain_sql_that_makes_no_sense_is_refused_with_the_column() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let application = database.application().await;
    for (rest, expected) in [
        ("(payload) VALUES ('{}')", "topic"),
        ("(topic) VALUES ('orders')", "payload"),
        ("(topic, payload) VALUES ('', '{}')", "topic"),
        ("(topic, payload) VALUES ('two words', '{}')", "topic"),
        ("(topic, payload) VALUES ('..', '{}')", "topic"),
        ("(topic, payload, id) VALUES ('orders', '{}', 'not an id')", "uuid"),
        ("(topic, payload, headers) VALUES ('orders', '{}', '[]')", "headers"),
        ("(topic, payload, headers) VALUES ('orders', '{}', 'no json')", "json"),
        ("(topic, payload, ack_groups) VALUES ('orders', '{}', '{}')", "ack_groups"),
        ("(topic, payload, status) VALUES ('orders', '{}', 'in_flight')", "status"),
        ("(topic, payload, occurred_at) VALUES ('orders', '{}', 'once')", "timestamp"),
    ] {
        let error =
            application.batch_execute(&format!("INSERT INTO outbox_events {rest}")).await.unwrap_err();
        let text = error.as_db_error().unwrap().message().to_owned();
        assert!(text.contains(expected), "{rest}: {text}");
    }
    assert!(records(&store).await.is_empty());
    assert_counts_agree(&store).await;
}

#[tokio::test]
async fn postrider_send_writes_json_as_it_is_in_the_callers_transaction() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let application = database.application().await;
    application
        .batch_execute(r#"BEGIN; SELECT postrider_send('orders', 'a', '{"lost": 1}'); ROLLBACK"#)
        .await
        .unwrap();
    application
        .batch_execute(
            r#"BEGIN; SELECT postrider_send('orders', 'a', '{"path": "C:\\dir", "line": "x\ny"}'); COMMIT;
               SELECT postrider_send('orders', NULL, '{"a": 1}'::jsonb);
               SELECT postrider_send('orders', NULL, '\x00ff'::bytea)"#,
        )
        .await
        .unwrap();
    let not_json = application.batch_execute("SELECT postrider_send('orders', 'a', 'hello')").await;
    assert!(not_json.unwrap_err().as_db_error().unwrap().message().contains("json"));
    let found: Vec<Vec<u8>> =
        records(&store).await.iter().map(|record| record.message.payload.to_vec()).collect();
    assert_eq!(found, [&br#"{"path": "C:\\dir", "line": "x\ny"}"#[..], br#"{"a": 1}"#, &[0, 255]]);
}

#[tokio::test]
async fn postrider_once_tells_one_caller_that_a_message_is_new() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let arrival = Arrival { message: Message::new("orders", "{}"), seq: None, delivery: 0 };
    let ask = format!("SELECT postrider_once('billing', '{}')", arrival.message.id);
    let (first, second) = (database.application().await, database.application().await);
    let new = async |client: &Client| client.query_one(&ask, &[]).await.unwrap().get::<_, bool>(0);

    first.batch_execute("BEGIN").await.unwrap();
    assert!(new(&first).await);
    first.batch_execute("ROLLBACK").await.unwrap();
    first.batch_execute("BEGIN").await.unwrap();
    assert!(new(&first).await, "what was rolled back did not happen");
    let waiting = {
        let ask = ask.clone();
        tokio::spawn(async move { second.query_one(&ask, &[]).await.unwrap().get::<_, bool>(0) })
    };
    let observer = database.application().await;
    let blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted";
    within(PATIENCE, "the second to wait", || async { (number(&observer, blocked).await > 0).then_some(()) })
        .await;
    first.batch_execute("COMMIT").await.unwrap();
    assert!(!waiting.await.unwrap(), "the second hears that it was done");

    let rules = InboxRules::default();
    let receipts = store.process("billing", vec![arrival], &Work::Mark, &rules).await.unwrap();
    assert_eq!(receipts, [Receipt::Duplicate], "the store knows the mark of another program");
    assert_eq!(store.inbox_counts("billing").await.unwrap().processed, 1);
}

#[tokio::test]
async fn the_applications_tokio_postgres_transaction_decides() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let mut application = database.application().await;
    let (kept, lost) = (Message::new("orders", "1").header("a", "b").key("k"), Message::new("orders", "2"));
    let transaction = application.transaction().await.unwrap();
    store::postgres::append(&transaction, &kept).await.unwrap();
    transaction.commit().await.unwrap();
    let transaction = application.transaction().await.unwrap();
    store::postgres::append(&transaction, &lost).await.unwrap();
    transaction.rollback().await.unwrap();
    let found = records(&store).await;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].message.id, &found[0].message.headers), (kept.id, &kept.headers));

    // The consuming side: the mark and the acknowledgement are part of the handler's transaction.
    let relay = relay(&store).await;
    relay.settle_all(&relay.claim(1).await, &Verdict::Sent { ack_groups: vec!["billing".to_owned()] }).await;
    let arrival = Arrival { message: kept.clone(), seq: None, delivery: 0 };
    for (commit, new) in [(false, true), (true, true), (true, false)] {
        let transaction = application.transaction().await.unwrap();
        assert_eq!(store::postgres::once(&transaction, "billing", &arrival).await.unwrap(), new);
        store::postgres::acknowledge(&transaction, "billing", kept.id).await.unwrap();
        if commit { transaction.commit().await.unwrap() } else { transaction.rollback().await.unwrap() }
    }
    let record = store.record(kept.id).await.unwrap().unwrap();
    assert_eq!(record.acknowledgements.len(), 1);
    let counts = store.counts().await.unwrap();
    assert_eq!((counts.acknowledged_total, counts.sent_to_acknowledged.counts.iter().sum::<u64>()), (1, 1));
    let again = store.acknowledge(vec![(kept.id, "billing".to_owned())]).await.unwrap();
    assert_eq!(again, [Acknowledged::Repeated]);
}

#[cfg(feature = "sqlx")]
#[tokio::test]
async fn the_applications_sqlx_transaction_decides() {
    use sqlx::Connection;
    let database = Database::fresh().await;
    let store = database.open().await;
    let mut connection = sqlx::PgConnection::connect(&database.url()).await.unwrap();
    let (kept, lost) = (Message::new("orders", "1").key("k").kind("Placed"), Message::new("orders", "2"));
    let mut transaction = connection.begin().await.unwrap();
    store::postgres::sqlx::append(&mut transaction, &kept).await.unwrap();
    transaction.commit().await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    store::postgres::sqlx::append(&mut transaction, &lost).await.unwrap();
    transaction.rollback().await.unwrap();
    let found = records(&store).await;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].message.id, &found[0].message.kind), (kept.id, &kept.kind));

    let arrival = Arrival { message: kept, seq: Some(found[0].seq), delivery: 0 };
    for new in [true, false] {
        let mut transaction = connection.begin().await.unwrap();
        assert_eq!(store::postgres::sqlx::once(&mut transaction, "billing", &arrival).await.unwrap(), new);
        store::postgres::sqlx::acknowledge(&mut transaction, "billing", arrival.message.id).await.unwrap();
        transaction.commit().await.unwrap();
    }
    let counts = store.inbox_counts("billing").await.unwrap();
    assert_eq!((counts.processed, counts.duplicates), (1, 1));
}

#[cfg(feature = "diesel")]
#[tokio::test]
async fn the_applications_diesel_transaction_decides() {
    use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};
    let database = Database::fresh().await;
    let store = database.open().await;
    let mut connection = AsyncPgConnection::establish(&database.url()).await.unwrap();
    let (kept, lost) = (Message::new("orders", "1").key("k"), Message::new("orders", "2"));
    for (message, commit) in [(&kept, true), (&lost, false)] {
        connection.begin_test_transaction().await.unwrap();
        store::postgres::diesel::append(message).execute(&mut connection).await.unwrap();
        let end = if commit { "COMMIT" } else { "ROLLBACK" };
        diesel::sql_query(end).execute(&mut connection).await.unwrap();
        connection = AsyncPgConnection::establish(&database.url()).await.unwrap();
    }
    let found = records(&store).await;
    assert_eq!(found.iter().map(|record| record.message.id).collect::<Vec<_>>(), [kept.id]);
}

#[cfg(feature = "sea-orm")]
#[tokio::test]
async fn the_applications_sea_orm_transaction_decides() {
    use sea_orm::TransactionTrait;
    let database = Database::fresh().await;
    let store = database.open().await;
    let connection = sea_orm::Database::connect(database.url()).await.unwrap();
    let (kept, lost) = (Message::new("orders", "1").key("k"), Message::new("orders", "2"));
    let transaction = connection.begin().await.unwrap();
    store::postgres::sea_orm::append(&transaction, &kept).await.unwrap();
    transaction.commit().await.unwrap();
    let transaction = connection.begin().await.unwrap();
    store::postgres::sea_orm::append(&transaction, &lost).await.unwrap();
    transaction.rollback().await.unwrap();
    let found = records(&store).await;
    assert_eq!(found.iter().map(|record| record.message.id).collect::<Vec<_>>(), [kept.id]);
}

#[tokio::test]
async fn several_processes_may_migrate_at_once() {
    let database = Database::fresh().await;
    assert_eq!(store::postgres::pending(&database.url()).await.unwrap().len(), MIGRATIONS.len());
    let closed = PostgresStore::connect(Config { migrate: false, ..Config::new(database.url()) }).await;
    assert!(closed.unwrap_err().to_string().contains("postrider migrate"), "it says what to do");
    let starting: Vec<_> = (0..8)
        .map(|_| {
            let url = database.url();
            tokio::spawn(async move { PostgresStore::connect(Config::new(url)).await.map(drop) })
        })
        .collect();
    for started in starting {
        started.await.unwrap().unwrap();
    }
    assert!(store::postgres::pending(&database.url()).await.unwrap().is_empty());
    assert!(store::postgres::migrate(&database.url()).await.unwrap().is_empty());

    let application = database.application().await;
    application
        .batch_execute("INSERT INTO postrider_migrations (version, name) VALUES (99, 'x')")
        .await
        .unwrap();
    let newer = PostgresStore::connect(Config::new(database.url())).await.unwrap_err().to_string();
    assert!(newer.contains("99") && newer.contains("newer program"), "{newer}");
}

#[tokio::test]
async fn the_schema_for_other_tools_is_the_one_that_migrations_make() {
    let (migrated, by_hand) = (Database::fresh().await, Database::fresh().await);
    migrated.open().await;
    by_hand.application().await.batch_execute(&store::postgres::schema()).await.unwrap();
    assert!(
        store::postgres::pending(&by_hand.url()).await.unwrap().is_empty(),
        "it says of itself that it is there"
    );
    let shape = async |database: &Database| {
        let client = database.application().await;
        let sql = include_str!("postgres_shape.sql");
        let rows = client.query(sql, &[]).await.unwrap();
        rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>().join("\n")
    };
    let found = shape(&migrated).await;
    assert_eq!(found, shape(&by_hand).await);
    let expected = include_str!("postgres_shape.txt").trim_end();
    assert!(
        found == expected,
        "the schema has drifted from tests/postgres_shape.txt; if that is meant, add a migration and write:\n{found}"
    );
}

#[tokio::test]
async fn a_database_that_cannot_be_written_to_is_refused_with_the_reason() {
    let database = Database::fresh().await;
    let application = database.application().await;
    let name = database.name();
    application
        .batch_execute(&format!("ALTER DATABASE {name} SET default_transaction_read_only = on"))
        .await
        .unwrap();
    let error = PostgresStore::connect(Config::new(database.url())).await.unwrap_err().to_string();
    assert!(error.contains("read-only") && error.contains("primary"), "{error}");
}

#[tokio::test]
async fn an_error_never_tells_a_password() {
    let database = Database::fresh().await;
    let wrong = database.url().replace("postgres@", "nobody:hunter2@");
    for url in [wrong, "postgres://ann:hunter2@127.0.0.1:1/shop".to_owned()] {
        let error = PostgresStore::connect(Config::new(&url)).await.unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
    }
}

#[tokio::test]
async fn a_call_that_is_dropped_half_way_leaves_nothing_open() {
    let database = Database::fresh().await;
    let config = Config { pool: 2, ..Config::new(database.url()) };
    let store = Arc::new(PostgresStore::connect(config).await.unwrap());
    let relay = relay(&store).await;
    for round in 0..30 {
        store
            .append((0..20).map(|n| Message::new("orders", "{}").key(n.to_string()).into()).collect())
            .await
            .unwrap();
        let cut = Duration::from_micros(150 * round);
        let _ = tokio::time::timeout(cut, relay.claim(20)).await;
        let _ = tokio::time::timeout(cut, store.append(vec![Message::new("orders", "{}").into()])).await;
    }
    store.append(vec![Message::new("orders", "{}").into()]).await.expect("the pool is as good as new");
    let observer = database.application().await;
    let open = "SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND state LIKE 'idle in transaction%'";
    assert!(eventually(PATIENCE, || async { number(&observer, open).await == 0 }).await);
}

#[tokio::test]
async fn a_row_deleted_by_hand_takes_all_that_hangs_on_it() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let relay = relay(&store).await.by(holding);
    let application = database.application().await;
    let keys = ["a", "a", "b", "c"];
    store.append(keys.map(|key| Message::new("orders", "{}").key(key).into()).to_vec()).await.unwrap();
    relay.settle_all(&relay.claim(1).await, &dead(true)).await;
    assert_eq!(relay.drain(10, &sent()).await.len(), 2, "the follower waits");
    application.batch_execute("DELETE FROM outbox_events WHERE status = 'dead'").await.unwrap();
    assert_counts_agree(&store).await;
    assert_eq!(relay.drain(10, &sent()).await.len(), 1, "the follower goes on");
    assert!(store.holds(10).await.unwrap().is_empty());
    application.batch_execute("DELETE FROM outbox_events").await.unwrap();
    assert_counts_agree(&store).await;
    for table in ["outbox_attempts", "outbox_acknowledgements", "outbox_unacknowledged", "outbox_holds"] {
        assert_eq!(number(&application, &format!("SELECT count(*) FROM {table}")).await, 0, "{table}");
    }
}

#[tokio::test]
async fn sent_records_are_deleted_where_that_is_wanted() {
    let database = Database::fresh().await;
    let config = Config { sent: Sent::Delete, ..Config::new(database.url()) };
    let store = Arc::new(PostgresStore::connect(config).await.unwrap());
    let relay = relay(&store).await;
    let groups = vec!["billing".to_owned(), "audit".to_owned()];
    let asked = store::NewMessage { ack_groups: Some(groups), ..Message::new("orders", "{}").into() };
    let id = asked.message.id;
    store.append(vec![Message::new("orders", "{}").into(), asked]).await.unwrap();
    assert_eq!(relay.drain(10, &sent()).await.len(), 2);
    let left: Vec<MessageId> = records(&store).await.iter().map(|record| record.message.id).collect();
    assert_eq!(left, [id], "one that must be acknowledged is kept");
    assert_counts_agree(&store).await;
    for group in ["billing", "audit"] {
        let answers = store.acknowledge(vec![(id, group.to_owned())]).await.unwrap();
        assert_eq!(answers, [Acknowledged::New]);
    }
    assert!(records(&store).await.is_empty(), "until all have");
    assert_counts_agree(&store).await;
    let counts = store.counts().await.unwrap();
    assert_eq!((counts.publish_success_total, counts.acknowledged_total), (2, 2));
}

#[tokio::test]
async fn sql_users_see_what_is_in_flight() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let relay = relay(&store).await;
    store
        .append(vec![Message::new("orders", "{}").into(), Message::new("orders", "{}").into()])
        .await
        .unwrap();
    assert_eq!(relay.claim(1).await.len(), 1);
    let application = database.application().await;
    let rows = application
        .query("SELECT status, locked_until > now() FROM outbox_status ORDER BY seq", &[])
        .await
        .unwrap();
    let seen: Vec<(String, Option<bool>)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(seen, [("in_flight".to_owned(), Some(true)), ("pending".to_owned(), None)]);
}

/// Sends `rounds` times `count` messages, each round claimed and settled, so that the low-water marks rise.
async fn traffic(relay: &Relay, rounds: usize, count: usize) {
    for round in 0..rounds {
        let message =
            |n: usize| Message::new("orders", "{}").key(format!("{}", (round * count + n) % 97)).into();
        relay.store.append((0..count).map(message).collect()).await.unwrap();
        assert_eq!(relay.drain(count, &sent()).await.len(), count);
    }
}

#[tokio::test]
async fn a_held_snapshot_does_not_make_claims_dearer() {
    const ROUNDS: usize = 120;
    const COUNT: usize = 50;
    let database = Database::fresh().await;
    let store = database.open().await;
    let relay = relay(&store).await;
    traffic(&relay, 5, COUNT).await;
    let holder = database.application().await;
    holder
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox_events")
        .await
        .unwrap();
    traffic(&relay, ROUNDS, COUNT).await;
    let observer = database.application().await;
    // A session adds its numbers to the server's with its first statement after a second.
    let met = within(Duration::from_secs(30), "the server's numbers", || async {
        traffic(&relay, 1, 1).await;
        let met = "SELECT CASE WHEN idx_scan >= 240 THEN idx_tup_read ELSE 0 END FROM pg_stat_user_indexes
                   WHERE indexrelname = 'outbox_ready'";
        Some(number(&observer, met).await).filter(|met| *met > 0)
    })
    .await;
    // Stepping over every dead entry in each turn would meet dozens of them for each message.
    let each = met / i64::try_from(ROUNDS * COUNT).unwrap();
    assert!(each < 30, "{each} entries of the index were met for each message");
}

#[tokio::test]
async fn a_low_number_that_is_committed_late_goes_before_later_ones_of_its_key() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let relay = relay(&store).await;
    let mut application = database.application().await;
    let (low, later) =
        (Message::new("orders", "low").key("slow"), Message::new("orders", "later").key("slow"));
    traffic(&relay, 5, 20).await;
    let transaction = application.transaction().await.unwrap();
    store::postgres::append(&transaction, &low).await.unwrap();
    // Others write and are sent meanwhile; their numbers are higher.
    traffic(&relay, 30, 20).await;
    transaction.commit().await.unwrap();
    store.append(vec![later.clone().into()]).await.unwrap();
    let taken = relay.drain(10, &sent()).await;
    let ids: Vec<MessageId> = taken.iter().map(|claimed| claimed.message.id).collect();
    assert_eq!(ids, [low.id, later.id]);
}

#[tokio::test]
async fn what_a_person_requeues_is_found_below_the_marks() {
    let database = Database::fresh().await;
    let (store, desk) = (database.open().await, database.open().await);
    let relay = relay(&store).await.by(free);
    store.append(vec![Message::new("orders", "{}").key("a").into()]).await.unwrap();
    let batches = relay.claim(1).await;
    let id = batches[0].messages[0].message.id;
    relay.settle_all(&batches, &dead(false)).await;
    traffic(&relay, 30, 20).await;
    desk.requeue(id, "ann").await.unwrap();
    let taken = relay.drain(10, &sent()).await;
    assert_eq!(taken.iter().map(|claimed| claimed.message.id).collect::<Vec<_>>(), [id]);
}

#[tokio::test]
async fn a_message_written_by_hand_below_the_marks_is_found_by_the_sweep() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let relay = relay(&store).await;
    traffic(&relay, 30, 20).await;
    let application = database.application().await;
    application
        .batch_execute("INSERT INTO outbox_events (seq, topic, payload) VALUES (-5, 'orders', '{}')")
        .await
        .unwrap();
    let taken = within(Duration::from_secs(40), "the sweep", || async {
        let taken = relay.drain(10, &sent()).await;
        (!taken.is_empty()).then_some(taken)
    })
    .await;
    assert_eq!(taken[0].seq, -5);
}

#[tokio::test]
async fn the_doorbell_rings_for_a_relay_that_sleeps() {
    let database = Database::fresh().await;
    let config = Config { doorbell: true, ..Config::new(database.url()) };
    let store = Arc::new(PostgresStore::connect(config).await.unwrap());
    let application = database.application().await;
    let insert = "INSERT INTO outbox_events (topic, payload) VALUES ('orders', '{}')";
    let asleep = "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database
                  WHERE locktype = 'advisory' AND mode = 'ShareLock' AND d.datname = current_database()";
    for _ in 0..3 {
        // It sleeps, looks again three times, and then hears nothing.
        for _ in 0..3 {
            tokio::time::timeout(PATIENCE, store.woken()).await.expect("it looks again by itself");
        }
        assert_eq!(number(&application, asleep).await, 1);
        let waiting = {
            let store = store.clone();
            tokio::spawn(async move { store.woken().await })
        };
        application.batch_execute(insert).await.unwrap();
        tokio::time::timeout(PATIENCE, waiting).await.expect("the insert rings").unwrap();
        assert_eq!(number(&application, asleep).await, 0, "others need not ring");
    }
}
