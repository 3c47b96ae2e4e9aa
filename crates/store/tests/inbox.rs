//! What is SQLite's own in the inbox: handlers on its connection, statements from a configuration, query plans.

#![cfg(feature = "sqlite")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::sync::Arc;
use std::time::Duration;

use message::Message;
use rusqlite::Connection;
use store::sqlite::{SqlHandler, SqliteStore, check_sql};
use store::{Append, Arrival, Handled, Inbox, InboxCounts, InboxRules, Inspect, Receipt, Work};
use tempfile::TempDir;

const GROUP: &str = "billing";

struct Place {
    _folder: TempDir,
    store: SqliteStore,
    application: Connection,
}

impl Place {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let store = SqliteStore::open(folder.path().join("store.db")).unwrap();
        let application = Connection::open(store.path()).unwrap();
        application.busy_timeout(Duration::from_secs(10)).unwrap();
        application.execute_batch("CREATE TABLE charges (n TEXT)").unwrap();
        Self { _folder: folder, store, application }
    }

    fn count(&self, sql: &str) -> usize {
        self.application.query_row(&format!("SELECT count(*) FROM {sql}"), [], |row| row.get(0)).unwrap()
    }
}

fn rules() -> InboxRules {
    InboxRules { acknowledge: false, ..InboxRules::default() }
}

fn arrival(payload: &str) -> Arrival {
    Arrival { message: Message::new("orders", payload.to_owned()), seq: None, delivery: 0 }
}

#[tokio::test]
async fn a_handler_that_panics_fails_its_message_only() {
    let place = Place::new();
    let handler: SqlHandler = Arc::new(|connection, _, arrival| {
        connection.execute("INSERT INTO charges VALUES (?1)", [&arrival.message.payload[..]]).unwrap();
        assert!(&arrival.message.payload[..] != b"odd", "an odd message");
        Handled::Done
    });
    let arrivals = ["1", "odd", "2"].map(arrival).to_vec();
    let receipts = place.store.process_with(GROUP, arrivals, handler, &rules()).await.unwrap();
    assert_eq!((&receipts[0], &receipts[2]), (&Receipt::Done, &Receipt::Done));
    assert!(
        matches!(&receipts[1], Receipt::Parked { error } if error.contains("an odd message")),
        "{receipts:?}"
    );
    assert_eq!(place.count("charges"), 2, "what it did before it panicked is undone");
    let expected = InboxCounts { processed: 2, parked: 1, ..InboxCounts::default() };
    assert_eq!(place.store.inbox_counts(GROUP).await.unwrap(), expected);
}

#[tokio::test]
async fn sql_that_would_end_the_transaction_or_is_not_one_statement_is_refused() {
    let place = Place::new();
    let refused = [
        ("", "empty"),
        (" ; -- nothing", "empty"),
        ("COMMIT", "COMMIT"),
        ("end transaction", "END"),
        ("/* why */ Rollback", "ROLLBACK"),
        ("SAVEPOINT x", "SAVEPOINT"),
        ("RELEASE work", "RELEASE"),
        ("BEGIN", "BEGIN"),
        ("; COMMIT", "COMMIT"),
        ("INSERT OR ROLLBACK INTO charges VALUES (:id)", "OR ROLLBACK"),
        ("UPDATE or /* */ rollback charges SET n = 1", "OR ROLLBACK"),
        ("INSERT INTO charges VALUES (:id); COMMIT", "more than one"),
        ("INSERT INTO charges VALUES (:id); DELETE FROM charges", "more than one"),
        ("INSERT INTO charges VALUES (:amount)", ":amount"),
        ("INSERT INTO no_such_table VALUES (:id)", "no_such_table"),
    ];
    for (sql, reason) in refused {
        let error = check_sql(&place.application, sql).unwrap_err().to_string();
        assert!(error.contains(reason), "{sql}: {error}");
    }
    let fine = [
        "INSERT INTO charges VALUES (:id)",
        "INSERT OR IGNORE INTO charges VALUES ('; COMMIT'); -- done; really",
        "INSERT INTO charges SELECT CASE WHEN :key IS NULL THEN 'it''s; none' ELSE :key END",
        "UPDATE charges SET \"n\" = [n] || `n` WHERE n = 'x OR ROLLBACK'",
    ];
    for sql in fine {
        check_sql(&place.application, sql).unwrap();
    }
}

#[tokio::test]
async fn sql_that_nobody_checked_cannot_end_the_transaction_either() {
    let place = Place::new();
    for sql in ["COMMIT", "INSERT OR ROLLBACK INTO charges VALUES (:id)", "RELEASE work"] {
        let work = Work::Sql(sql.to_owned());
        let receipts = place.store.process(GROUP, vec![arrival("1")], &work, &rules()).await.unwrap();
        assert!(matches!(receipts[0], Receipt::Unavailable { .. }), "{sql}: {receipts:?}");
    }
    assert_eq!(place.store.inbox_counts(GROUP).await.unwrap(), InboxCounts::default());
}

#[tokio::test]
async fn a_trigger_that_ends_the_transaction_undoes_all_of_it_and_is_named() {
    let place = Place::new();
    let trigger = "CREATE TRIGGER no BEFORE INSERT ON charges WHEN NEW.n = 'bad'
                   BEGIN SELECT RAISE(ROLLBACK, 'not this one'); END";
    place.application.execute_batch(trigger).unwrap();
    let work = Work::Sql("INSERT INTO charges VALUES (:payload)".to_owned());
    let arrivals = ["1", "bad", "2"].map(arrival).to_vec();
    let error = place.store.process(GROUP, arrivals.clone(), &work, &rules()).await.unwrap_err().to_string();
    assert!(error.contains("trigger") && error.contains(&arrivals[1].message.id.to_string()), "{error}");
    assert_eq!((place.count("charges"), place.count("inbox_ids")), (0, 0));
    let good = vec![arrivals[0].clone(), arrivals[2].clone()];
    let receipts = place.store.process(GROUP, good, &work, &rules()).await.unwrap();
    assert_eq!(receipts, [Receipt::Done, Receipt::Done], "the store lives on");
}

#[tokio::test]
async fn reservations_that_have_ended_are_cleared() {
    let place = Place::new();
    let reserve = async |lease| {
        place.store.reserve(GROUP, vec![arrival("1"), arrival("2")], lease, &rules()).await.unwrap();
    };
    reserve(Duration::ZERO).await;
    reserve(Duration::from_secs(3_600)).await;
    assert_eq!(place.count("inbox_reserved"), 4);
    // Any group's call will do: the one that made them may be gone.
    place.store.forget_ids("audit", Duration::from_secs(3_600)).await.unwrap();
    assert_eq!(place.count("inbox_reserved"), 2);
}

#[tokio::test]
async fn the_space_of_ids_is_estimated_near_the_pages_that_they_take() {
    let place = Place::new();
    for key in ["42", "a-customer-with-a-rather-long-name-of-sixty-four-characters-0042"] {
        let arrivals: Vec<_> = (0..5_000)
            .map(|_| {
                let message = Message::new("order-events", "{}").key(key);
                Arrival { message, seq: Some(1), delivery: 0 }
            })
            .collect();
        for part in arrivals.chunks(500) {
            place.store.process(GROUP, part.to_vec(), &Work::Mark, &rules()).await.unwrap();
        }
        let estimated = place.store.remembered(GROUP).await.unwrap().bytes.unwrap();
        let pages = "SELECT sum(pgsize) FROM dbstat WHERE aggregate = 1 AND name LIKE 'inbox_ids%'";
        let taken: u64 = place.application.query_row(pages, [], |row| row.get(0)).unwrap();
        let ratio = estimated as f64 / taken as f64;
        assert!((0.7..1.4).contains(&ratio), "{estimated} estimated, {taken} taken");
        place.store.forget_ids(GROUP, Duration::ZERO).await.unwrap();
        let all = "DELETE FROM inbox_ids; DELETE FROM inbox_forgotten; DELETE FROM inbox_groups; VACUUM";
        place.application.execute_batch(all).unwrap();
    }
}

/// The plan of a statement, one step a line.
fn plan(connection: &Connection, sql: &str) -> String {
    let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
    let steps = statement.raw_query().mapped(|row| row.get::<_, String>(3)).collect::<Result<Vec<_>, _>>();
    steps.unwrap().join("\n")
}

#[tokio::test]
async fn pages_and_what_is_due_are_found_by_index_and_never_sorted() {
    let place = Place::new();
    let page = |sql: &str, sign, order| sql.replace("{sign}", sign).replace("{order}", order);
    let processed = include_str!("../src/sqlite/inbox/processed.sql");
    let parked = include_str!("../src/sqlite/inbox/list.sql");
    let cases = [
        (page(processed, "<", "DESC"), "USING INDEX inbox_ids_group (grp=? AND rowid<?)"),
        (page(processed, ">", "ASC"), "USING INDEX inbox_ids_group (grp=? AND rowid>?)"),
        (page(parked, "<", "DESC"), "USING INDEX inbox_parked_group (grp=? AND rowid<?)"),
        (page(parked, ">", "ASC"), "USING INDEX inbox_parked_group (grp=? AND rowid>?)"),
        (
            include_str!("../src/sqlite/inbox/due.sql").to_owned(),
            "USING COVERING INDEX inbox_parked_due (grp=? AND next_attempt_at<?)",
        ),
        (include_str!("../src/sqlite/inbox/forget.sql").to_owned(), "INDEX inbox_ids_group (grp=?)"),
    ];
    for (sql, search) in cases {
        let plan = plan(&place.application, &sql);
        assert!(plan.contains(search), "{sql}\n{plan}");
        assert!(!plan.contains("TEMP B-TREE") && !plan.contains("SCAN"), "{sql}\n{plan}");
    }
}

#[tokio::test]
async fn a_message_that_an_inbox_gave_up_is_acknowledged_and_kept_in_the_audit() {
    let place = Place::new();
    let relay = testkit::store::Relay::with_all_lanes(Arc::new(place.store.clone())).await;
    let arrival = arrival("\"too odd\"");
    place.store.append(vec![arrival.message.clone().into()]).await.unwrap();
    relay.drain(10, &store::Verdict::Sent { ack_groups: vec![GROUP.to_owned()] }).await;
    let give_up: SqlHandler = Arc::new(|_, _, _| Handled::Dead { error: "never".to_owned() });
    place.store.process_with(GROUP, vec![arrival.clone()], give_up, &rules()).await.unwrap();
    assert_eq!(place.count("outbox_unacknowledged"), 1);

    place.store.drop_parked(GROUP, arrival.message.id, "a person").await.unwrap();
    assert_eq!((place.count("outbox_unacknowledged"), place.count("outbox_acknowledgements")), (0, 1));
    let page = store::Page { after: None, limit: 1, newest_first: true };
    let audit = place.store.audit(page).await.unwrap().items.remove(0);
    assert_eq!((audit.actor.as_str(), audit.action.as_str()), ("a person", "inbox discard"));
    assert!(audit.detail.contains("too odd"), "{}", audit.detail);
}
