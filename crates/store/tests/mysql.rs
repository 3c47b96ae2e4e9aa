//! What is MySQL's own: plain SQL writers, the application's transactions, keys as bytes, and what becomes of sent rows.

#![cfg(feature = "mysql")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod mysql_database;

use std::sync::Arc;
use std::time::Duration;

use message::{Message, Status};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error as Driver, TxOpts};
use store::mysql::{Config, MysqlStore};
use store::{
    Acknowledged, Amend, Append, Appended, Arrival, Filter, Inbox, InboxRules, Inspect, Page, Receipt,
    Record, Retention, Sent, Store, Turned, Verdict, Work,
};
use testkit::store::{Relay, dead, failed, holding, sent};
use testkit::within;

use mysql_database::Database;

const ALL: Page = Page { after: None, limit: 10_000, newest_first: false };
const PATIENCE: Duration = Duration::from_secs(10);

async fn open(database: &Database) -> Arc<MysqlStore> {
    Arc::new(MysqlStore::connect(Config::new(database.url())).await.unwrap())
}

async fn records(store: &MysqlStore) -> Vec<Record> {
    store.list(&Filter::default(), ALL).await.unwrap().items
}

async fn relay(store: &Arc<MysqlStore>) -> Relay {
    let store: Arc<dyn Store> = store.clone();
    Relay::with_all_lanes(store).await
}

async fn number(connection: &mut Conn, sql: &str) -> i64 {
    connection.query_first(sql).await.unwrap().unwrap()
}

/// What the server said.
fn told(error: &Driver) -> String {
    match error {
        Driver::Server(error) => error.message.clone(),
        other => other.to_string(),
    }
}

/// Whether the kept counts are those of the records.
async fn assert_counts_agree(store: &MysqlStore) {
    let records = records(store).await;
    let count = |status| records.iter().filter(|record| record.state.status == status).count() as u64;
    let counts = store.counts().await.unwrap();
    let kept = [counts.pending, counts.in_flight, counts.sent, counts.failed, counts.dead];
    assert_eq!(kept, Status::ALL.map(count));
}

#[tokio::test]
async fn any_program_writes_with_plain_sql() {
    let database = Database::fresh().await;
    let store = open(&database).await;
    let mut application = database.application().await;
    for insert in [
        r#"(topic, `key`, payload) VALUES ('orders', '42', '{"total": 10}')"#,
        "(topic, `key`, payload) VALUES ('orders', '42', x'00ff')",
        "(topic, payload) VALUES ('refunds', '')",
        r#"(topic, payload, headers, ack_groups) VALUES ('refunds', '{}', '{"a": 1, "b": "x"}', '["billing"]')"#,
    ] {
        application.query_drop(format!("INSERT INTO outbox_events {insert}")).await.unwrap();
    }
    application.query_drop("START TRANSACTION").await.unwrap();
    application
        .query_drop("INSERT INTO outbox_events (topic, payload) VALUES ('orders', 'lost')")
        .await
        .unwrap();
    application.query_drop("ROLLBACK").await.unwrap();
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
    let store = open(&database).await;
    let mut application = database.application().await;
    let long = format!("(topic, payload, `key`) VALUES ('orders', '{{}}', '{}')", "ü".repeat(600));
    for (rest, expected) in [
        ("(payload) VALUES ('{}')", "topic"),
        ("(topic) VALUES ('orders')", "payload"),
        ("(topic, payload) VALUES ('', '{}')", "outbox_topic_is_a_name"),
        ("(topic, payload) VALUES ('two words', '{}')", "outbox_topic_is_a_name"),
        ("(topic, payload) VALUES ('..', '{}')", "outbox_topic_is_a_name"),
        ("(topic, payload, id) VALUES ('orders', '{}', 'not an id')", "outbox_id_is_a_uuid"),
        (long.as_str(), "outbox_key_has_at_most_1024_bytes"),
        ("(topic, payload, headers) VALUES ('orders', '{}', '[]')", "outbox_headers_are_a_json_object"),
        ("(topic, payload, headers) VALUES ('orders', '{}', 'no json')", "json"),
        ("(topic, payload, ack_groups) VALUES ('orders', '{}', '{}')", "outbox_ack_groups_are_a_json_array"),
        ("(topic, payload, status) VALUES ('orders', '{}', 'in_flight')", "status"),
        ("(topic, payload, occurred_at) VALUES ('orders', '{}', 'once')", "occurred_at"),
    ] {
        let error = application.query_drop(format!("INSERT INTO outbox_events {rest}")).await.unwrap_err();
        assert!(told(&error).contains(expected), "{rest}: {error}");
    }
    assert!(records(&store).await.is_empty());
    assert_counts_agree(&store).await;
}

#[tokio::test]
async fn postrider_send_writes_in_the_callers_transaction() {
    let database = Database::fresh().await;
    let store = open(&database).await;
    let mut application = database.application().await;
    let send = r#"SELECT postrider_send('orders', 'a', '{"path": "ü"}')"#;
    for (end, expected) in [("ROLLBACK", 0), ("COMMIT", 1)] {
        application.query_drop("START TRANSACTION").await.unwrap();
        let id: Option<String> = application.query_first(send).await.unwrap();
        application.query_drop(end).await.unwrap();
        let found = records(&store).await;
        assert_eq!(found.len(), expected, "{end}");
        if let Some(record) = found.first() {
            assert_eq!(record.message.id.to_string(), id.unwrap());
            assert_eq!(&record.message.payload[..], r#"{"path": "ü"}"#.as_bytes());
        }
    }
    let error = application.query_drop("SELECT postrider_send('orders', NULL, 'hello')").await.unwrap_err();
    assert!(told(&error).contains("no JSON"), "{error}");
}

#[tokio::test]
async fn postrider_once_tells_one_caller_that_a_message_is_new() {
    let database = Database::fresh().await;
    let store = open(&database).await;
    let arrival = Arrival { message: Message::new("orders", "{}"), seq: None, delivery: 0 };
    let ask = format!("SELECT postrider_once('billing', '{}')", arrival.message.id);
    let (mut first, mut second) = (database.application().await, database.application().await);
    first.query_drop("START TRANSACTION").await.unwrap();
    assert_eq!(number(&mut first, &ask).await, 1);
    first.query_drop("ROLLBACK").await.unwrap();
    first.query_drop("START TRANSACTION").await.unwrap();
    assert_eq!(number(&mut first, &ask).await, 1, "what was rolled back did not happen");
    let second_id = second.id();
    let waiting = {
        let ask = ask.clone();
        tokio::spawn(async move { number(&mut second, &ask).await })
    };
    let observer = tokio::sync::Mutex::new(database.application().await);
    let blocked = format!(
        "SELECT count(*) FROM information_schema.innodb_trx
         WHERE trx_mysql_thread_id = {second_id} AND trx_state = 'LOCK WAIT'"
    );
    within(PATIENCE, "the second to wait", || async {
        // The server answers from a copy as long as it is asked again within a tenth of a second.
        tokio::time::sleep(Duration::from_millis(150)).await;
        (number(&mut *observer.lock().await, &blocked).await > 0).then_some(())
    })
    .await;
    first.query_drop("COMMIT").await.unwrap();
    assert_eq!(waiting.await.unwrap(), 0, "the second hears that it was done");

    let rules = InboxRules::default();
    let receipts = store.process("billing", vec![arrival], &Work::Mark, &rules).await.unwrap();
    assert_eq!(receipts, [Receipt::Duplicate], "the store knows the mark of another program");
    assert_eq!(store.inbox_counts("billing").await.unwrap().processed, 1);
}

#[tokio::test]
async fn the_applications_mysql_async_transaction_decides() {
    let database = Database::fresh().await;
    let store = open(&database).await;
    let mut application = database.application().await;
    let (kept, lost) = (Message::new("orders", "1").header("a", "b").key("k"), Message::new("orders", "2"));
    let mut transaction = application.start_transaction(TxOpts::default()).await.unwrap();
    store::mysql::append(&mut transaction, &kept).await.unwrap();
    transaction.commit().await.unwrap();
    let mut transaction = application.start_transaction(TxOpts::default()).await.unwrap();
    store::mysql::append(&mut transaction, &lost).await.unwrap();
    transaction.rollback().await.unwrap();
    let found = records(&store).await;
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].message.id, kept.id);
    assert_eq!((&found[0].message.headers, &found[0].message.key), (&kept.headers, &kept.key));

    // The consuming side: the mark and the acknowledgement are part of the handler's transaction.
    let relay = relay(&store).await;
    relay.settle_all(&relay.claim(1).await, &Verdict::Sent { ack_groups: vec!["billing".to_owned()] }).await;
    let arrival = Arrival { message: kept.clone(), seq: None, delivery: 0 };
    for (commit, new) in [(false, true), (true, true), (true, false)] {
        let mut transaction = application.start_transaction(TxOpts::default()).await.unwrap();
        assert_eq!(store::mysql::once(&mut transaction, "billing", &arrival).await.unwrap(), new);
        store::mysql::acknowledge(&mut transaction, "billing", kept.id).await.unwrap();
        if commit { transaction.commit().await.unwrap() } else { transaction.rollback().await.unwrap() }
    }
    assert_eq!(store.record(kept.id).await.unwrap().unwrap().acknowledgements.len(), 1);
    let counts = store.counts().await.unwrap();
    assert_eq!((counts.acknowledged_total, counts.sent_to_acknowledged.counts.iter().sum::<u64>()), (1, 1));
    let again = store.acknowledge(vec![(kept.id, "billing".to_owned())]).await.unwrap();
    assert_eq!(again, [Acknowledged::Repeated]);
    let inbox = store.inbox_counts("billing").await.unwrap();
    assert_eq!((inbox.processed, inbox.duplicates), (1, 1));
}

#[cfg(feature = "sqlx")]
#[tokio::test]
async fn the_applications_sqlx_transaction_decides() {
    use sqlx::Connection;
    let database = Database::fresh().await;
    let store = open(&database).await;
    let mut application = sqlx::MySqlConnection::connect(&database.url()).await.unwrap();
    let (kept, lost) = (Message::new("orders", "1").header("a", "b").key("k"), Message::new("orders", "2"));
    let mut transaction = application.begin().await.unwrap();
    store::mysql::sqlx::append(&mut transaction, &kept).await.unwrap();
    transaction.commit().await.unwrap();
    let mut transaction = application.begin().await.unwrap();
    store::mysql::sqlx::append(&mut transaction, &lost).await.unwrap();
    transaction.rollback().await.unwrap();
    let found = records(&store).await;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].message.id, &found[0].message.headers), (kept.id, &kept.headers));
    let (written, read) =
        (kept.occurred_at.timestamp_millis(), found[0].message.occurred_at.timestamp_millis());
    assert_eq!(written, read);

    let relay = relay(&store).await;
    relay.settle_all(&relay.claim(1).await, &Verdict::Sent { ack_groups: vec!["billing".to_owned()] }).await;
    let arrival = Arrival { message: kept.clone(), seq: Some(1), delivery: 0 };
    for (commit, new) in [(false, true), (true, true), (true, false)] {
        let mut transaction = application.begin().await.unwrap();
        assert_eq!(store::mysql::sqlx::once(&mut transaction, "billing", &arrival).await.unwrap(), new);
        store::mysql::sqlx::acknowledge(&mut transaction, "billing", kept.id).await.unwrap();
        assert_eq!(store::mysql::sqlx::newer(&mut transaction, "billing", "42", 7).await.unwrap(), new);
        if commit { transaction.commit().await.unwrap() } else { transaction.rollback().await.unwrap() }
    }
    let counts = store.counts().await.unwrap();
    assert_eq!((counts.acknowledged_total, counts.sent_to_acknowledged.counts.iter().sum::<u64>()), (1, 1));
    assert!(store::mysql::sqlx::swap(&mut application, "billing", "42", 7, 8).await.unwrap());
    assert!(!store::mysql::sqlx::swap(&mut application, "billing", "42", 7, 9).await.unwrap());
}

#[cfg(feature = "sea-orm")]
#[tokio::test]
async fn the_applications_sea_orm_transaction_decides() {
    use sea_orm::{Database as SeaOrm, TransactionTrait};
    let database = Database::fresh().await;
    let store = open(&database).await;
    let application = SeaOrm::connect(database.url()).await.unwrap();
    let (kept, lost) = (Message::new("orders", "1").key("k"), Message::new("orders", "2"));
    let transaction = application.begin().await.unwrap();
    store::mysql::sea_orm::append(&transaction, &kept).await.unwrap();
    transaction.commit().await.unwrap();
    let transaction = application.begin().await.unwrap();
    store::mysql::sea_orm::append(&transaction, &lost).await.unwrap();
    transaction.rollback().await.unwrap();
    let found: Vec<_> = records(&store).await.iter().map(|record| record.message.id).collect();
    assert_eq!(found, [kept.id]);
}

#[cfg(feature = "diesel")]
#[tokio::test]
async fn the_applications_diesel_transaction_decides() {
    use diesel_async::{AsyncConnection, AsyncMysqlConnection, RunQueryDsl};
    let database = Database::fresh().await;
    let store = open(&database).await;
    let mut application = AsyncMysqlConnection::establish(&database.url()).await.unwrap();
    let (kept, lost) = (Message::new("orders", "1").key("k"), Message::new("orders", "2"));
    for (message, end) in [(&kept, "COMMIT"), (&lost, "ROLLBACK")] {
        diesel::sql_query("START TRANSACTION").execute(&mut application).await.unwrap();
        store::mysql::diesel::append(message).execute(&mut application).await.unwrap();
        diesel::sql_query(end).execute(&mut application).await.unwrap();
    }
    let found: Vec<_> = records(&store).await.iter().map(|record| record.message.id).collect();
    assert_eq!(found, [kept.id]);
}

#[tokio::test]
async fn keys_that_differ_in_case_or_in_a_space_at_the_end_are_different_keys() {
    let database = Database::fresh().await;
    let store = open(&database).await;
    let relay = relay(&store).await.by(holding);
    let keys = ["a", "A", "a ", "ä"];
    let write = |key: &str| Message::new("orders", "{}").key(key).into();
    store.append(keys.iter().map(|key| write(key)).collect()).await.unwrap();
    let batches = relay.claim(10).await;
    for batch in &batches {
        let verdict = |claimed: &store::Claimed| match claimed.message.key.as_deref() {
            Some("a") => dead(true),
            _ => sent(),
        };
        assert!(relay.settle(batch, verdict).await.fenced.is_empty());
    }
    store.append(keys.iter().map(|key| write(key)).collect()).await.unwrap();
    let mut claimed: Vec<_> = relay
        .drain(10, &sent())
        .await
        .into_iter()
        .filter_map(|claimed| claimed.message.key.clone())
        .collect();
    claimed.sort();
    assert_eq!(claimed, ["A", "a ", "ä"], "only `a` waits behind the dead one");
    assert_eq!(store.holds(10).await.unwrap().len(), 1);
    assert_counts_agree(&store).await;
}

#[tokio::test]
async fn deleting_by_hand_a_dead_message_that_holds_its_key_lets_the_others_go() {
    let database = Database::fresh().await;
    let store = open(&database).await;
    let relay = relay(&store).await.by(holding);
    store.append((0..3).map(|_| Message::new("orders", "1").key("k").into()).collect()).await.unwrap();
    relay.settle_all(&relay.claim(1).await, &dead(true)).await;
    assert!(relay.claim(10).await.is_empty(), "the others wait");
    let mut application = database.application().await;
    application.query_drop("DELETE FROM outbox_events WHERE status = 'dead'").await.unwrap();
    assert_eq!(relay.drain(10, &sent()).await.len(), 2);
    assert_counts_agree(&store).await;
    application.query_drop("DELETE FROM outbox_events WHERE status = 'sent' LIMIT 1").await.unwrap();
    assert_counts_agree(&store).await;
    store.clean(&Retention::default()).await.unwrap();
    assert_eq!(
        number(&mut application, "SELECT count(*) FROM outbox_attempts").await,
        0,
        "its history goes too"
    );
}

#[tokio::test]
async fn without_functions_and_trigger_all_else_works() {
    let database = Database::fresh().await;
    open(&database).await;
    let mut administrator = database.application().await;
    administrator.query_drop("DROP TRIGGER outbox_removed").await.unwrap();
    administrator.query_drop("DROP FUNCTION postrider_send").await.unwrap();
    let store = open(&database).await;
    let relay = relay(&store).await.by(holding);
    store.append((0..4).map(|_| Message::new("orders", "1").key("k").into()).collect()).await.unwrap();
    relay.settle_all(&relay.claim(1).await, &sent()).await;
    relay.settle_all(&relay.claim(1).await, &dead(true)).await;
    let gone = records(&store).await[0].message.id;
    store.delete(gone, "test").await.unwrap();
    assert_counts_agree(&store).await;
    administrator.query_drop("DELETE FROM outbox_events WHERE status = 'dead'").await.unwrap();
    store.clean(&Retention::default()).await.unwrap();
    assert_eq!(relay.drain(10, &sent()).await.len(), 2, "cleaning finds that the holder is gone");
    let none = Retention { sent: Duration::ZERO, ..Retention::default() };
    administrator.query_drop("UPDATE outbox_events SET sent_at = sent_at - INTERVAL 1 SECOND").await.unwrap();
    assert_eq!(store.clean(&none).await.unwrap(), 2);
    assert_counts_agree(&store).await;
}

#[tokio::test]
async fn the_view_shows_what_is_in_flight_and_until_when() {
    let database = Database::fresh().await;
    let store = open(&database).await;
    let relay = relay(&store).await;
    store.append(vec![Message::new("orders", "1").into(), Message::new("orders", "2").into()]).await.unwrap();
    relay.claim(1).await;
    let mut application = database.application().await;
    let seen: Vec<(String, bool)> = application
        .query("SELECT status, locked_until > utc_timestamp() IS TRUE FROM outbox_status ORDER BY seq")
        .await
        .unwrap();
    assert_eq!(seen, [("in_flight".to_owned(), true), ("pending".to_owned(), false)]);
}

#[tokio::test]
async fn sent_records_are_deleted_with_their_settlement_where_nobody_must_acknowledge() {
    let database = Database::fresh().await;
    let config = Config { sent: Sent::Delete, ..Config::new(database.url()) };
    let store = Arc::new(MysqlStore::connect(config).await.unwrap());
    let relay = relay(&store).await.by(holding);
    let mut asked: store::NewMessage = Message::new("orders", "1").key("a").into();
    asked.ack_groups = Some(vec!["billing".to_owned(), "audit".to_owned()]);
    let asked_id = asked.message.id;
    let plain = || Message::new("orders", "2").key("b").into();
    store.append(vec![asked, plain(), plain()]).await.unwrap();
    relay.settle_all(&relay.claim(10).await, &failed(Duration::ZERO, true)).await;
    assert_eq!(relay.drain(10, &sent()).await.len(), 3);
    let left: Vec<_> = records(&store).await.iter().map(|record| record.message.id).collect();
    assert_eq!(left, [asked_id], "somebody must still acknowledge it");
    assert_counts_agree(&store).await;
    store.acknowledge(vec![(asked_id, "billing".to_owned())]).await.unwrap();
    assert_eq!(records(&store).await.len(), 1);
    store.acknowledge(vec![(asked_id, "audit".to_owned())]).await.unwrap();
    assert!(records(&store).await.is_empty(), "the last one has");
    let counts = store.counts().await.unwrap();
    assert_eq!((counts.sent, counts.publish_success_total, counts.acknowledged_total), (0, 3, 2));
    let mut application = database.application().await;
    for table in ["outbox_attempts", "outbox_acknowledgements", "outbox_unacknowledged", "outbox_holds"] {
        assert_eq!(number(&mut application, &format!("SELECT count(*) FROM {table}")).await, 0, "{table}");
    }
}

#[tokio::test]
async fn partitions_are_made_ahead_and_dropped_when_all_in_them_is_over() {
    let database = Database::fresh().await;
    let config = Config { sent: Sent::Partition, ..Config::new(database.url()) };
    let store = Arc::new(MysqlStore::connect(config.clone()).await.unwrap());
    let relay = relay(&store).await.by(holding);
    let mut application = database.application().await;
    let parts = "SELECT count(DISTINCT partition_name) FROM information_schema.partitions
                 WHERE table_schema = database() AND table_name = 'outbox_events'";
    assert_eq!(number(&mut application, parts).await, 2);

    let message = Message::new("orders", "1").key("a");
    let results = store.append(vec![message.clone().into(), message.clone().into()]).await.unwrap();
    assert_eq!(results, [Ok(Appended::New(message.id)), Err(Turned::IdTaken(message.id))]);
    let results = store.append(vec![message.clone().into()]).await.unwrap();
    assert_eq!(results, [Err(Turned::IdTaken(message.id))]);
    // The numbers have come far: the next partition is due, and this one's writers are past.
    application.query_drop("ALTER TABLE outbox_events AUTO_INCREMENT = 999999").await.unwrap();
    let late: Vec<store::NewMessage> = (0..3).map(|_| Message::new("orders", "2").key("b").into()).collect();
    store.append(late).await.unwrap();
    let keep = Retention::default();
    store.clean(&keep).await.unwrap();
    assert_eq!(number(&mut application, parts).await, 3, "one is made ahead");

    relay.settle_all(&relay.claim(1).await, &dead(true)).await;
    relay.drain(10, &sent()).await;
    assert_counts_agree(&store).await;
    let over = "UPDATE outbox_events SET sent_at = sent_at - INTERVAL 8 DAY WHERE status = 'sent'";
    application.query_drop(over).await.unwrap();
    assert_eq!(store.clean(&keep).await.unwrap(), 0);
    assert_eq!(number(&mut application, parts).await, 3, "a dead message keeps its partition");
    store.requeue(message.id, "test").await.unwrap();
    relay.drain(10, &sent()).await;
    application.query_drop(over).await.unwrap();
    let before = store.counts().await.unwrap().sent;
    let dropped = store.clean(&keep).await.unwrap();
    assert_eq!(number(&mut application, parts).await, 2, "the first is gone, as a whole");
    assert_eq!(store.counts().await.unwrap().sent, before - dropped);
    assert_counts_agree(&store).await;
    assert!(MysqlStore::connect(config).await.is_ok(), "a table in partitions stays as it is");
}
