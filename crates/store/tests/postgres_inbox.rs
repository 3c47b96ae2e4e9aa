//! The inbox on PostgreSQL: a handler's SQL, reservations, and locks.

#![cfg(feature = "postgres")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod postgres_server;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use message::{Message, MessageId};
use store::postgres::{Config, MIGRATIONS, PostgresStore};
use store::{Arrival, Handled, Inbox, InboxRules, Page, Processed, Receipt, Reservation, Work};
use tokio::task::JoinSet;
use tokio_postgres::Client;

use postgres_server::{Database, number};

const PATIENCE: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_handlers_sql_gets_the_types_it_needs() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let application = database.application().await;
    application
        .batch_execute(
            "CREATE TYPE colour AS ENUM ('red');
             CREATE TABLE done (id uuid, topic text, kind text, key text, body jsonb, raw bytea, headers jsonb,
                                at timestamptz, millis bigint, seq bigint, grp text, ref uuid, colour colour)",
        )
        .await
        .unwrap();
    let work = Work::Sql(
        "INSERT INTO done VALUES (:id, :topic, :type, :key, :payload, :payload, :headers, :occurred_at, :occurred_at,
                                  :seq, :group, :key, :type)"
            .to_owned(),
    );
    store.check(&work).await.unwrap();
    let reference = MessageId::new();
    let message = || {
        let message = Message::new("orders", r#"{"path": "C:\\dir"}"#).kind("red").header("a", "b");
        Arrival { message: message.key(reference.to_string()), seq: Some(7), delivery: 0 }
    };
    let bare = || Arrival { message: Message::new("orders", "{}"), seq: None, delivery: 0 };
    // Alone, and in company.
    let calls = [vec![message()], vec![bare()], vec![message(), bare(), message()]];
    let mut written = 0;
    for call in calls {
        let receipts = store.process("billing", call.clone(), &work, &InboxRules::default()).await.unwrap();
        assert_eq!(receipts, vec![Receipt::Done; call.len()]);
        for Arrival { message, seq, .. } in &call {
            let row = application
                .query_one(
                    "SELECT body->>'path', raw, millis, grp, key, kind, seq, ref::text, colour::text, topic,
                            headers->>'a', floor(extract(epoch FROM at))::bigint
                     FROM done WHERE id::text = $1",
                    &[&message.id.to_string()],
                )
                .await
                .unwrap();
            let text = |column: usize| row.get::<_, Option<String>>(column);
            assert_eq!(text(0).as_deref(), message.key.as_ref().map(|_| r"C:\dir"));
            assert_eq!(row.get::<_, Vec<u8>>(1), message.payload.to_vec());
            assert_eq!(row.get::<_, i64>(2), message.occurred_at.timestamp_millis());
            assert_eq!(row.get::<_, i64>(11), message.occurred_at.timestamp());
            assert_eq!((text(3).as_deref(), text(9).as_deref()), (Some("billing"), Some("orders")));
            assert_eq!((text(4), text(7)), (message.key.clone(), message.key.clone()));
            assert_eq!((text(5), text(8)), (message.kind.clone(), message.kind.clone()));
            assert_eq!((row.get::<_, Option<i64>>(6), text(10)), (*seq, message.headers.get("a").cloned()));
            written += 1;
        }
    }
    assert_eq!(number(&application, "SELECT count(*) FROM done").await, written);

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

/// How many messages have which effects, when `sql` is their work, one by one or together.
async fn effects_of(database: &Database, sql: &str, together: bool) -> Vec<String> {
    let (store, application) = (database.open().await, database.application().await);
    application.batch_execute("TRUNCATE notes; UPDATE sums SET found = 0").await.unwrap();
    let group = MessageId::new().to_string();
    let arrivals: Vec<Arrival> = ["a", "b'", "c\\", "d", "e"].map(unkeyed).to_vec();
    let calls = if together { vec![arrivals] } else { arrivals.chunks(1).map(<[_]>::to_vec).collect() };
    for call in calls {
        let expected = vec![Receipt::Done; call.len()];
        let work = Work::Sql(sql.to_owned());
        assert_eq!(
            store.process(&group, call, &work, &InboxRules::default()).await.unwrap(),
            expected,
            "{sql}"
        );
    }
    let rows = application
        .query("SELECT coalesce(note, '') FROM notes UNION ALL SELECT found::text FROM sums ORDER BY 1", &[])
        .await
        .unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn a_statement_does_for_many_at_once_what_it_does_for_each() {
    let database = Database::fresh().await;
    let application = database.application().await;
    application
        .batch_execute(
            "CREATE TABLE notes (note text); CREATE TABLE sums (found int); INSERT INTO sums VALUES (0);
             CREATE FUNCTION note_down(note text) RETURNS SETOF int LANGUAGE sql
             AS 'INSERT INTO notes VALUES ($1); SELECT generate_series(1, 100)';
             CREATE PROCEDURE put_down(note text) LANGUAGE sql AS 'INSERT INTO notes VALUES ($1)'",
        )
        .await
        .unwrap();
    for sql in [
        "INSERT INTO notes VALUES (:payload) RETURNING note",
        "INSERT INTO notes VALUES (:payload); -- and no more; not :this",
        "SELECT note_down(:payload)",
        "CALL put_down(:payload)",
        "WITH a AS (SELECT :payload::text AS b) INSERT INTO notes SELECT b FROM a",
        "WITH a AS (INSERT INTO notes VALUES (:payload) RETURNING note) SELECT * FROM a",
        "UPDATE sums SET found = found + 1 WHERE found >= 0 AND :payload <> $a$x$a$",
        "INSERT INTO notes VALUES ('$postrider0$' || $$ :id $$ || :payload)",
        "INSERT INTO notes VALUES (:payload || (SELECT count(*) FROM notes))",
        "MERGE INTO sums USING (VALUES (:payload)) AS new (note) ON true WHEN MATCHED THEN UPDATE SET found = found + 2",
        "VALUES (:payload)",
        "INSERT INTO notes DEFAULT VALUES",
    ] {
        let each = effects_of(&database, sql, false).await;
        assert_eq!(effects_of(&database, sql, true).await, each, "{sql}");
    }
}

#[tokio::test]
async fn domains_and_composite_types_mean_the_same_for_many_as_for_one() {
    let database = Database::fresh().await;
    let (store, application) = (database.open().await, database.application().await);
    application
        .batch_execute(
            "CREATE DOMAIN sku AS varchar(3); CREATE TYPE item AS (sku text, n int);
             CREATE TABLE skus (said sku); CREATE TABLE items (said item)",
        )
        .await
        .unwrap();
    let receipts = |sql: &'static str, payloads: &'static [&'static str]| {
        let arrivals = payloads.iter().map(|payload| unkeyed(payload)).collect();
        let (store, work) = (&store, Work::Sql(sql.to_owned()));
        // Where something is parked, nothing is done together.
        let group = MessageId::new().to_string();
        async move { store.process(&group, arrivals, &work, &InboxRules::default()).await.unwrap() }
    };
    for payloads in [&["abcd"][..], &["abc", "abcd"]] {
        let receipts = receipts("INSERT INTO skus VALUES (:payload)", payloads).await;
        assert!(matches!(receipts.last(), Some(Receipt::Parked { .. })), "it is not cut: {receipts:?}");
    }
    for payloads in [&["(abc,3)"][..], &["(abc,3)", "(abc,3)"]] {
        let receipts = receipts("INSERT INTO items VALUES (:payload)", payloads).await;
        assert_eq!(receipts, vec![Receipt::Done; payloads.len()]);
    }
    let items = "SELECT count(*) FROM items WHERE said = ('abc', 3)::item";
    assert_eq!(number(&application, items).await, 3);
}

#[tokio::test]
async fn postgres_goes_from_message_to_message_by_itself() {
    let database = Database::fresh().await;
    let (store, application) = (database.open().await, database.application().await);
    application.batch_execute("CREATE TABLE done (id uuid, at timestamptz)").await.unwrap();
    let work = Work::Sql("INSERT INTO done VALUES (:id, statement_timestamp())".to_owned());
    let statements = "SELECT count(DISTINCT at) FROM done";
    let process = |arrivals: Vec<Arrival>| async {
        let (count, rules) = (arrivals.len(), InboxRules::default());
        let receipts = store.process("billing", arrivals, &work, &rules).await.unwrap();
        assert_eq!(receipts, vec![Receipt::Done; count]);
    };
    process((0..2_500).map(|n| of_one_key(&n.to_string())).collect()).await;
    assert_eq!(number(&application, statements).await, 3, "a thousand at a time");
    application.batch_execute("TRUNCATE done").await.unwrap();
    process((0..10).map(|_| unkeyed(&"x".repeat(400_000))).collect()).await;
    assert_eq!(number(&application, statements).await, 4, "a mebibyte at a time, about");
}

#[tokio::test]
async fn many_that_take_too_long_for_one_statement_are_done_one_by_one() {
    let database = Database::fresh().await;
    let (store, application) = (database.open().await, database.application().await);
    let name: String = application.query_one("SELECT current_database()", &[]).await.unwrap().get(0);
    let limit = format!(
        "CREATE TABLE done (id uuid, at timestamptz); ALTER DATABASE \"{name}\" SET statement_timeout = '500ms'"
    );
    application.batch_execute(&limit).await.unwrap();
    drop(store);
    let store = database.open().await;
    let work = Work::Sql("INSERT INTO done SELECT :id, statement_timestamp() FROM pg_sleep(0.02)".to_owned());
    let statements = "SELECT count(DISTINCT at) FROM done";
    for (count, expected, why) in [(50, 50, "one by one"), (10, 51, "as many as had time are done together")]
    {
        let arrivals: Vec<Arrival> = (0..count).map(|n| unkeyed(&n.to_string())).collect();
        let receipts = store.process("billing", arrivals, &work, &InboxRules::default()).await.unwrap();
        assert_eq!(receipts, vec![Receipt::Done; count]);
        assert_eq!(number(&application, statements).await, expected, "{why}");
    }
    assert_eq!(number(&application, "SELECT count(*) FROM done").await, 60);
}

#[tokio::test]
async fn a_statement_that_could_not_be_used_for_a_while_is_run_for_many_again() {
    let database = Database::fresh().await;
    let (store, application) = (database.open().await, database.application().await);
    let table = "CREATE TABLE done (id uuid, at timestamptz)";
    application.batch_execute(table).await.unwrap();
    let work = Work::Sql("INSERT INTO done VALUES (:id, statement_timestamp())".to_owned());
    let process = || async {
        let arrivals = ["a", "b", "c"].map(unkeyed).to_vec();
        store.process("billing", arrivals, &work, &InboxRules::default()).await.unwrap()
    };
    assert_eq!(process().await, vec![Receipt::Done; 3]);
    application.batch_execute("DROP TABLE done").await.unwrap();
    for receipt in process().await {
        assert!(matches!(receipt, Receipt::Unavailable { .. }), "{receipt:?}");
    }
    application.batch_execute(table).await.unwrap();
    assert_eq!(process().await, vec![Receipt::Done; 3]);
    assert_eq!(number(&application, "SELECT count(DISTINCT at) FROM done").await, 1);
}

fn unkeyed(payload: &str) -> Arrival {
    Arrival { message: Message::new("orders", payload.to_owned()), seq: None, delivery: 0 }
}

/// However many of them a call has, they are one transaction.
fn of_one_key(payload: &str) -> Arrival {
    let Arrival { message, seq, delivery } = unkeyed(payload);
    Arrival { message: message.key("one"), seq, delivery }
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

/// A database as it was after so many migrations.
async fn migrated(steps: usize) -> (Database, Client) {
    let database = Database::fresh().await;
    let application = database.application().await;
    for step in &MIGRATIONS[..steps] {
        application.batch_execute(step.sql).await.unwrap();
    }
    application
        .batch_execute(&format!(
            "CREATE TABLE postrider_migrations (version integer PRIMARY KEY, name text NOT NULL,
                                                applied_at timestamptz NOT NULL DEFAULT clock_timestamp());
             INSERT INTO postrider_migrations (version, name) SELECT v, 'x' FROM generate_series(1, {steps}) AS v;
             INSERT INTO inbox_groups (name) VALUES ('billing'), ('audit')"
        ))
        .await
        .unwrap();
    (database, application)
}

#[tokio::test]
async fn what_was_reserved_before_a_migration_is_concluded_after_it() {
    let (database, application) = migrated(4).await;
    let one = unkeyed("1");
    let (id, token) = (one.message.id.0, uuid::Uuid::new_v4());
    application
        .batch_execute(&format!(
            "INSERT INTO inbox_reserved (grp, id, token, until)
             SELECT grp, '{id}', '{token}', clock_timestamp() + interval '1 hour' FROM inbox_groups WHERE name = 'billing'"
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

/// All that `billing` has done, by pages, the oldest first or the newest.
async fn listed(store: &PostgresStore, limit: usize, newest_first: bool) -> Vec<Processed> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page = store.processed("billing", Page { after, limit, newest_first }).await.unwrap();
        assert!(page.items.len() <= limit);
        all.extend(page.items);
        after = page.next;
        if after.is_none() {
            return all;
        }
    }
}

#[tokio::test]
async fn marks_of_before_a_migration_are_listed_recognised_and_forgotten_after_it() {
    let (database, application) = migrated(5).await;
    // Of both groups, mixed; the first 1,200 of each are old.
    application
        .batch_execute(
            "INSERT INTO inbox_ids (grp, id, topic, seq, processed_at)
             SELECT g.grp, md5(g.grp || '.' || n)::uuid, 'orders', n,
                    clock_timestamp() - CASE WHEN n <= 1200 THEN interval '8 days' ELSE interval '1 day' END
             FROM generate_series(1, 2500) AS n, inbox_groups g ORDER BY n, g.grp;
             INSERT INTO inbox_counters (grp, processed) SELECT grp, 2500 FROM inbox_groups",
        )
        .await
        .unwrap();
    let store = database.open().await;
    let seqs = |all: Vec<Processed>| all.iter().map(|done| done.seq.unwrap()).collect::<Vec<_>>();
    assert_eq!(seqs(listed(&store, 999, false).await), (1..=2500).collect::<Vec<_>>());
    assert_eq!(seqs(listed(&store, 999, true).await), (1..=2500).rev().collect::<Vec<_>>());

    let last = listed(&store, 1, true).await[0].clone();
    let message = Message { id: last.id, ..Message::new("orders", "whatever it said") };
    let again = Arrival { message, seq: None, delivery: 0 };
    let receipts = store.process("billing", vec![again], &Work::Mark, &InboxRules::default()).await.unwrap();
    assert_eq!(receipts, [Receipt::Duplicate]);

    // A thousand share the time of the youngest of them, so 200 stay a while longer.
    let week = Duration::from_secs(7 * 24 * 60 * 60);
    assert_eq!(store.forget_ids("billing", week).await.unwrap(), 1000);
    assert_eq!(store.forget_ids("billing", week).await.unwrap(), 0);
    assert_eq!(seqs(listed(&store, 999, false).await), (1001..=2500).collect::<Vec<_>>());
    assert_eq!(store.remembered("billing").await.unwrap().ids, 1500);
    assert_eq!(store.remembered("audit").await.unwrap().ids, 2500, "it has not said how long it keeps them");
    assert_eq!(number(&application, "SELECT count(*) FROM inbox_ids").await, 4000);
}

#[tokio::test]
async fn pages_go_through_calls_of_any_size_in_the_order_of_the_work() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let mut done = Vec::new();
    // The last but one is more than a row of what was done has room for.
    for size in [1, 40, 1, 700, 8_200, 3] {
        let arrivals: Vec<Arrival> = (0..size).map(|n| of_one_key(&n.to_string())).collect();
        // Not in the order of their ids, in which they are marked.
        let arrivals: Vec<Arrival> = arrivals.into_iter().rev().collect();
        done.extend(arrivals.iter().map(|arrival| arrival.message.id));
        store.process("billing", arrivals, &Work::Mark, &InboxRules::default()).await.unwrap();
    }
    let ids = |all: &[Processed]| all.iter().map(|done| done.id).collect::<Vec<_>>();
    for limit in [7, 1_000, 100_000] {
        let oldest_first = listed(&store, limit, false).await;
        assert!(oldest_first.is_sorted_by(|one, next| one.position < next.position));
        assert_eq!(ids(&oldest_first), done, "pages of {limit}");
        let mut newest_first = listed(&store, limit, true).await;
        newest_first.reverse();
        assert_eq!(ids(&newest_first), done, "pages of {limit}, the newest first");
    }
}

#[tokio::test]
async fn only_the_message_is_parked_whose_value_is_too_deep_or_breaks_what_is_checked_late() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let application = database.application().await;
    application
        .batch_execute(
            "CREATE TABLE customers (name text PRIMARY KEY);
             INSERT INTO customers VALUES ('ann');
             CREATE TABLE orders (body jsonb, customer text REFERENCES customers DEFERRABLE INITIALLY DEFERRED);
             CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN RAISE EXCEPTION 'not today' USING ERRCODE = 'AB123'; END $$;
             CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW
             WHEN (new.body = '\"refuse\"') EXECUTE FUNCTION refuse()",
        )
        .await
        .unwrap();
    let work = Work::Sql("INSERT INTO orders VALUES (:payload, :type)".to_owned());
    let order = |payload: &str, customer: &str| {
        let message = Message::new("orders", payload.to_owned()).kind(customer);
        Arrival { message, seq: None, delivery: 0 }
    };
    let deep = "[".repeat(100_000);
    for (payload, customer, why) in
        [(&*deep, "ann", "stack depth"), ("1", "nobody", "foreign key"), ("\"refuse\"", "ann", "not today")]
    {
        let alone = vec![order(payload, customer)];
        let among = vec![order("1", "ann"), order(payload, customer), order("2", "ann")];
        for call in [alone, among] {
            let bad = call.len() / 2;
            let receipts = store.process("shop", call, &work, &InboxRules::default()).await.unwrap();
            for (place, receipt) in receipts.into_iter().enumerate() {
                match receipt {
                    Receipt::Parked { error } => {
                        assert!(place == bad && error.contains(why), "{why}: {error}")
                    }
                    other => assert!(place != bad && other == Receipt::Done, "{why}: {other:?}"),
                }
            }
        }
    }
}

#[tokio::test]
async fn a_mark_that_a_handler_makes_meanwhile_outlives_a_call_that_parks_its_message() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let (application, other) = (database.application().await, database.application().await);
    let rules = InboxRules::default();
    let of_key = || Arrival { message: Message::new("orders", "1").key("k"), seq: None, delivery: 0 };
    let (first, second) = (of_key(), of_key());
    let id = second.message.id;
    // The first fails, so the second has to wait behind it.
    let granted = store.reserve("shop", vec![first.clone()], PATIENCE, &rules).await.unwrap();
    let [Reservation::Granted(token)] = granted[..] else { panic!("{granted:?}") };
    let failed = Handled::Retry { error: "not now".to_owned(), after: Some(PATIENCE) };
    store.conclude("shop", vec![(first, token, failed)], &rules).await.unwrap();
    // Nobody can park it as long as this row may come to be.
    other
        .batch_execute(&format!(
            "BEGIN; INSERT INTO inbox_parked (grp, id, digest, topic, payload, content_type, headers, occurred_at, delivery,
                                              attempts, dead, error)
             SELECT grp, '{id}', '', '', '', '', '{{}}', now(), 0, 0, false, '' FROM inbox_groups"
        ))
        .await
        .unwrap();
    let parking = tokio::spawn({
        let (store, rules, second) = (store.clone(), rules.clone(), second.clone());
        async move { store.reserve("shop", vec![second], PATIENCE, &rules).await }
    });
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let begun = std::time::Instant::now();
    while number(&application, waits).await == 0 {
        assert!(begun.elapsed() < PATIENCE, "nobody waits");
        tokio::task::yield_now().await;
    }
    let once = format!("SELECT postrider_once('shop', '{id}')");
    assert!(application.query_one(&once, &[]).await.unwrap().get::<_, bool>(0));
    other.batch_execute("ROLLBACK").await.unwrap();
    let parked = parking.await.unwrap().unwrap();
    assert!(matches!(parked[..], [Reservation::Settled(Receipt::Parked { .. })]), "{parked:?}");
    assert_eq!(number(&application, &format!("SELECT count(*) FROM inbox_ids WHERE id = '{id}'")).await, 1);
}
