//! PostgreSQL with sent records in partitions: the same contract, and partitions that come and go.

#![cfg(feature = "postgres")]

mod postgres_server;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use message::Message;
use postgres_server::{Database, Schema};
use store::postgres::{Config, PostgresStore};
use store::{Amend, Append, Inspect, Retention, Sent, Store, Turned, Work};
use testkit::store::{Relay, dead, sent};

/// A schema of its own for each case.
struct Parted {
    schema: Schema,
}

#[async_trait]
impl testkit::store::Fixture for Parted {
    async fn fresh() -> Self {
        Self { schema: Schema::fresh().await }
    }

    async fn open(&self) -> Arc<dyn Store> {
        let config = Config { pool: 4, sent: Sent::Partition, ..Config::new(self.schema.url()) };
        Arc::new(PostgresStore::connect(config).await.expect("the store can be opened"))
    }

    fn work(&self) -> Work {
        // No index over all partitions refuses an id: the statement does so itself.
        let sql = "INSERT INTO outbox_events (id, topic, payload)
                   SELECT i.id::uuid, 'effects', convert_to(:id, 'UTF8') FROM (SELECT :payload AS id) i
                   WHERE 1 / (CASE WHEN EXISTS (SELECT 1 FROM outbox_events o WHERE o.id = i.id::uuid) THEN 0 ELSE 1 END) = 1";
        Work::Sql(sql.to_owned())
    }

    fn impossible_work(&self) -> Work {
        Work::Sql("INSERT INTO no_such_table VALUES (:id)".to_owned())
    }
}

// The random histories run on the table that is whole; they take long.
testkit::store_cases! { store_tests (Parted) }

async fn parted(database: &Database) -> Arc<PostgresStore> {
    let config = Config { sent: Sent::Partition, ..Config::new(database.url()) };
    Arc::new(PostgresStore::connect(config).await.expect("the store can be opened"))
}

/// The partitions by name.
async fn partitions(database: &Database) -> Vec<String> {
    let rows = database
        .application()
        .await
        .query(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox_events'::regclass ORDER BY 1",
            &[],
        )
        .await
        .expect("the catalogue can be read");
    rows.iter().map(|row| row.get(0)).collect()
}

async fn write(store: &Arc<PostgresStore>, count: usize) {
    let messages = (0..count).map(|_| Message::new("orders", "{}").key("k").into()).collect();
    for result in store.append(messages).await.expect("messages can be appended") {
        result.expect("each is new");
    }
}

async fn skip_to(database: &Database, seq: i64) {
    let sql = format!("SELECT setval('outbox_seq', {seq})");
    database.application().await.query(&sql, &[]).await.expect("the sequence can be set");
}

#[tokio::test]
async fn partitions_are_made_ahead_and_dropped_as_a_whole() {
    let database = Database::fresh().await;
    // A table that has been in use becomes the first partition.
    let whole = Arc::new(PostgresStore::connect(Config::new(database.url())).await.expect("a store"));
    write(&whole, 3).await;
    drop(whole);
    let store = parted(&database).await;
    let relay = Relay::with_all_lanes(store.clone() as Arc<dyn Store>).await;
    assert_eq!(partitions(&database).await, ["outbox_events_beyond", "outbox_events_p0"]);
    let now = Retention { sent: Duration::ZERO, ..Retention::default() };
    let week = Retention::default();

    skip_to(&database, 600_000).await;
    write(&store, 2).await;
    store.clean(&week).await.expect("cleaned");
    assert_eq!(partitions(&database).await.len(), 3, "the next one is made when the last is half full");
    skip_to(&database, 1_100_000).await;
    write(&store, 2).await;
    let beyond = "SELECT count(*) FROM outbox_events_beyond";
    let beyond: i64 = database.application().await.query_one(beyond, &[]).await.expect("a count").get(0);
    assert_eq!(beyond, 0);

    store.clean(&now).await.expect("cleaned");
    assert_eq!(partitions(&database).await.len(), 3, "nothing unsent is dropped");
    assert_eq!(relay.drain(10, &sent()).await.len(), 7);
    store.clean(&week).await.expect("cleaned");
    assert_eq!(store.counts().await.expect("counts").sent, 7, "nothing young is dropped");
    write(&store, 1).await;
    store.clean(&now).await.expect("cleaned");
    assert!(!partitions(&database).await.contains(&"outbox_events_p0".to_owned()));
    assert_eq!(relay.drain(10, &sent()).await.len(), 1);
    let counts = store.counts().await.expect("counts");
    assert_eq!((counts.sent, counts.pending, counts.publish_success_total), (1, 0, 8));
}

#[tokio::test]
async fn a_partition_with_a_dead_message_stays() {
    let database = Database::fresh().await;
    let store = parted(&database).await;
    let relay = Relay::with_all_lanes(store.clone() as Arc<dyn Store>).await;
    write(&store, 1).await;
    assert_eq!(relay.drain(10, &dead(true)).await.len(), 1);
    skip_to(&database, 600_000).await;
    write(&store, 1).await;
    store.clean(&Retention::default()).await.expect("cleaned");
    skip_to(&database, 1_100_000).await;
    write(&store, 1).await;
    let now = Retention { sent: Duration::ZERO, ..Retention::default() };
    store.clean(&now).await.expect("cleaned");
    assert!(partitions(&database).await.contains(&"outbox_events_p0".to_owned()));
    assert_eq!(store.counts().await.expect("counts").dead, 1);
}

#[tokio::test]
async fn an_id_is_refused_twice_although_no_index_can() {
    let database = Database::fresh().await;
    let store = parted(&database).await;
    let message = Message::new("orders", "{}");
    let results = store.append(vec![message.clone().into(), message.clone().into()]).await.expect("appended");
    assert!(results[0].is_ok());
    assert_eq!(results[1], Err(Turned::IdTaken(message.id)));
    let again = store.append(vec![message.clone().into()]).await.expect("appended");
    assert_eq!(again, [Err(Turned::IdTaken(message.id))]);
}

#[tokio::test]
async fn a_partitioned_table_goes_on_where_partitions_are_no_longer_wanted() {
    let database = Database::fresh().await;
    drop(parted(&database).await);
    let store = Arc::new(PostgresStore::connect(Config::new(database.url())).await.expect("a store"));
    write(&store, 2).await;
    let relay = Relay::with_all_lanes(store.clone() as Arc<dyn Store>).await;
    assert_eq!(relay.drain(10, &sent()).await.len(), 2);
}
