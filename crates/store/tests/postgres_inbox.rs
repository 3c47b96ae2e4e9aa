//! The inbox on PostgreSQL: a handler's SQL, reservations, and locks.

#![cfg(feature = "postgres")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod postgres_server;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use message::{Message, MessageId};
use store::postgres::{Config, MIGRATIONS, PostgresStore};
use store::{Arrival, Handled, Inbox, InboxRules, Receipt, Reservation, Work};
use tokio::task::JoinSet;

use postgres_server::{Database, number};

const PATIENCE: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_handlers_sql_gets_the_types_it_needs() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let application = database.application().await;
    application
        .batch_execute(
            "CREATE TABLE done (id uuid, topic text, kind text, key text, body jsonb, raw bytea, headers jsonb,
                                at timestamptz, millis bigint, seq bigint, grp text)",
        )
        .await
        .unwrap();
    let work = Work::Sql(
        "INSERT INTO done VALUES (:id, :topic, :type, :key, :payload, :payload, :headers, :occurred_at, :occurred_at,
                                  :seq, :group)"
            .to_owned(),
    );
    store.check(&work).await.unwrap();
    let message = Message::new("orders", r#"{"path": "C:\\dir"}"#).key("k").kind("Placed").header("a", "b");
    let arrival = Arrival { message: message.clone(), seq: Some(7), delivery: 0 };
    let rules = InboxRules::default();
    assert_eq!(store.process("billing", vec![arrival], &work, &rules).await.unwrap(), [Receipt::Done]);
    let row = application
        .query_one("SELECT id::text, body->>'path', raw, millis, grp, key, kind FROM done", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, String>(0), message.id.to_string());
    assert_eq!(row.get::<_, String>(1), r"C:\dir");
    assert_eq!(row.get::<_, Vec<u8>>(2), message.payload.to_vec());
    assert_eq!(row.get::<_, i64>(3), message.occurred_at.timestamp_millis());
    assert_eq!(row.get::<_, String>(4), "billing");

    for (sql, expected) in [
        ("INSERT INTO done (id) VALUES (:colour)", ":colour"),
        ("COMMIT", "COMMIT"),
        ("SELECT 1; SELECT 2", "more than one"),
        ("INSERT INTO done (no_such_column) VALUES (:id)", "no_such_column"),
    ] {
        let error = store.check(&Work::Sql(sql.to_owned())).await.unwrap_err();
        assert!(!error.is_transient() && error.to_string().contains(expected), "{error}");
    }
    let missing = store.check(&Work::Sql("INSERT INTO not_yet VALUES (:id)".to_owned())).await.unwrap_err();
    assert!(missing.is_transient(), "a table may come later: {missing}");
}

#[tokio::test]
async fn a_call_with_more_keys_than_a_server_has_locks_for_is_done() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let rules = InboxRules { ordered: true, ..InboxRules::default() };
    let application = database.application().await;
    let room = "SELECT current_setting('max_locks_per_transaction')::bigint
                       * (current_setting('max_connections')::bigint + 100)";
    let keys = usize::try_from(number(&application, room).await).unwrap() * 2;
    let arrival = |key: usize| {
        let message = Message::new("orders", "1").key(key.to_string());
        Arrival { message, seq: None, delivery: 0 }
    };
    let arrivals: Vec<Arrival> = (0..keys).map(arrival).collect();
    let receipts = store.process("billing", arrivals, &Work::Mark, &rules).await.unwrap();
    assert_eq!(receipts, vec![Receipt::Done; keys]);
}

fn unkeyed(payload: &str) -> Arrival {
    Arrival { message: Message::new("orders", payload.to_owned()), seq: None, delivery: 0 }
}

#[tokio::test]
async fn a_batch_of_old_and_new_is_answered_in_order_also_when_nobody_expected_the_old() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let application = database.application().await;
    application.batch_execute("CREATE TABLE done (id uuid PRIMARY KEY)").await.unwrap();
    let (work, rules) = (Work::Sql("INSERT INTO done VALUES (:id)".to_owned()), InboxRules::default());
    let process = |arrivals: Vec<Arrival>| store.process("billing", arrivals, &work, &rules);
    let old: Vec<Arrival> = (0..4).map(|n| unkeyed(&n.to_string())).collect();
    process(old.clone()).await.unwrap();
    let mut other = old[3].clone();
    other.message.payload = "other".into();
    // The first meets marks where it takes all for new, the second where it looks.
    for round in 1..=2 {
        let (one, two) = (unkeyed("one"), unkeyed("two"));
        let batch =
            vec![old[0].clone(), one.clone(), old[1].clone(), two, one, other.clone(), old[2].clone()];
        let receipts = process(batch).await.unwrap();
        let (dead, rest) = (&receipts[5], [&receipts[..5], &receipts[6..]].concat());
        assert!(matches!(dead, Receipt::Dead { .. }), "{dead:?}");
        use Receipt::{Done, Duplicate};
        assert_eq!(rest, [Duplicate, Done, Duplicate, Done, Duplicate, Duplicate], "round {round}");
        assert_eq!(number(&application, "SELECT count(*) FROM done").await, 4 + 2 * round);
        assert_eq!(
            number(&application, "SELECT count(*) FROM inbox_ids").await,
            4 + 2 * round,
            "no mark too many"
        );
    }
    let counts = store.inbox_counts("billing").await.unwrap();
    assert_eq!((counts.processed, counts.duplicates, counts.dead), (8, 8, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_comes_again_among_many_parallel_calls_is_a_duplicate() {
    let database = Database::fresh().await;
    // Whoever was surprised waits for its next connection behind calls that meet nothing.
    let store = PostgresStore::connect(Config { pool: 2, ..Config::new(database.url()) }).await.unwrap();
    let old = unkeyed("old");
    let process = |store: PostgresStore, arrival: Arrival| async move {
        store.process("billing", vec![arrival], &Work::Mark, &InboxRules::default()).await.unwrap()
    };
    process(store.clone(), old.clone()).await;
    let mut calls = JoinSet::new();
    for _ in 0..32 {
        let store = store.clone();
        calls.spawn(async move {
            for n in 0..40 {
                assert_eq!(process(store.clone(), unkeyed(&n.to_string())).await, [Receipt::Done]);
            }
        });
    }
    for _ in 0..40 {
        assert_eq!(process(store.clone(), old.clone()).await, [Receipt::Duplicate]);
    }
    calls.join_all().await;
}

/// Takes all of `arrivals` to a handler outside the store, `batch` at a time, until each is done by somebody. Answers how
/// many this worker did.
async fn work_outside(
    store: &PostgresStore,
    arrivals: Vec<Arrival>,
    batch: usize,
    effects: &Mutex<HashMap<MessageId, u32>>,
) -> usize {
    let (mut waiting, mut done) = (arrivals, 0);
    while !waiting.is_empty() {
        let rest = waiting.split_off(batch.min(waiting.len()));
        let reserved =
            store.reserve("billing", waiting.clone(), PATIENCE, &InboxRules::default()).await.unwrap();
        let mut again = Vec::new();
        let mut conclusions = Vec::new();
        for (arrival, reservation) in waiting.into_iter().zip(reserved) {
            match reservation {
                Reservation::Granted(token) => {
                    *effects.lock().unwrap().entry(arrival.message.id).or_default() += 1;
                    conclusions.push((arrival, token, Handled::Done));
                }
                Reservation::Settled(Receipt::Duplicate) => {}
                Reservation::Settled(Receipt::Busy) => again.push(arrival),
                Reservation::Settled(other) => panic!("{other:?}"),
            }
        }
        // One by one and together: what is left of a reservation must stay reserved.
        let last = conclusions.split_off(conclusions.len() / 2);
        for part in [conclusions, last] {
            done += part.len();
            let receipts = store.conclude("billing", part, &InboxRules::default()).await.unwrap();
            assert!(receipts.iter().all(|receipt| *receipt == Receipt::Done), "{receipts:?}");
        }
        waiting = rest;
        waiting.extend(again);
    }
    done
}

#[tokio::test(flavor = "multi_thread")]
async fn of_64_parallel_deliveries_of_each_id_one_reaches_a_handler_outside() {
    let ids = std::env::var("POSTRIDER_TEST_IDS").map_or(200, |ids| ids.parse().expect("a number of ids"));
    let database = Database::fresh().await;
    let store = database.open().await;
    // Every other has no key.
    let arrival = |n: usize| {
        let message = Message::new("orders", n.to_string());
        let message = if n.is_multiple_of(2) { message.key((n % 50).to_string()) } else { message };
        Arrival { message, seq: None, delivery: 0 }
    };
    let arrivals: Vec<Arrival> = (0..ids).map(arrival).collect();
    let effects = Arc::new(Mutex::new(HashMap::new()));
    let mut workers = JoinSet::new();
    for worker in 0..64 {
        let (store, effects, mut arrivals) = (store.clone(), effects.clone(), arrivals.clone());
        arrivals.rotate_left(worker * 7 % ids);
        workers.spawn(async move { work_outside(&store, arrivals, 1 + worker % 40, &effects).await });
    }
    assert_eq!(workers.join_all().await.into_iter().sum::<usize>(), ids);
    let effects = std::mem::take(&mut *effects.lock().unwrap());
    assert!(effects.len() == ids && effects.values().all(|times| *times == 1), "{effects:?}");
    let application = database.application().await;
    assert_eq!(
        number(&application, "SELECT count(*) FROM inbox_reserved").await,
        0,
        "nothing is left reserved"
    );
}

#[tokio::test]
async fn what_was_reserved_before_a_migration_is_concluded_after_it() {
    let database = Database::fresh().await;
    let application = database.application().await;
    for step in &MIGRATIONS[..4] {
        application.batch_execute(step.sql).await.unwrap();
    }
    let one = Arrival { message: Message::new("orders", "1"), seq: None, delivery: 0 };
    let (id, token) = (one.message.id.0, uuid::Uuid::new_v4());
    application
        .batch_execute(&format!(
            "CREATE TABLE postrider_migrations (version integer PRIMARY KEY, name text NOT NULL,
                                                applied_at timestamptz NOT NULL DEFAULT clock_timestamp());
             INSERT INTO postrider_migrations (version, name) SELECT v, 'x' FROM generate_series(1, 4) AS v;
             INSERT INTO inbox_groups (name) VALUES ('billing');
             INSERT INTO inbox_reserved (grp, id, token, until)
             SELECT grp, '{id}', '{token}', clock_timestamp() + interval '1 hour' FROM inbox_groups"
        ))
        .await
        .unwrap();
    let (store, rules) = (database.open().await, InboxRules::default());
    let again = store.reserve("billing", vec![one.clone()], PATIENCE, &rules).await.unwrap();
    assert_eq!(again, [Reservation::Settled(Receipt::Busy)]);
    let concluded = store.conclude("billing", vec![(one, token, Handled::Done)], &rules).await.unwrap();
    assert_eq!(concluded, [Receipt::Done]);
    assert_eq!(number(&application, "SELECT count(*) FROM inbox_reserved").await, 0, "nothing is left of it");
}
