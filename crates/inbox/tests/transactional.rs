//! Closures in transactions of the application's own sqlx pool, on each database that has them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod database;
mod world;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use database::Database;
use futures::future::{BoxFuture, join_all};
use inbox::sqlx::{Marks, Outcome, Permanent, Transactional};
use inbox::{Group, Handler};
use message::Message;
use sqlx::pool::PoolOptions;
use sqlx::{MySql, Pool, Postgres, Sqlite};
use store::mysql::MysqlStore;
use store::postgres::PostgresStore;
use store::sqlite::SqliteStore;
use store::{Arrival, NewMessage, Receipt, Store, Verdict};
use tempfile::TempDir;
use testkit::store::{Relay, free};
use world::{GROUP, TOPIC, World, arrival, messages, rules};

const ACCOUNTS: i64 = 30;

/// Keeps the data for as long as a test runs.
enum Kept {
    Folder { _folder: TempDir },
    Server { _database: Database },
}

/// An application and its database.
struct Place<DB: Marks> {
    store: Arc<dyn Store>,
    pool: Pool<DB>,
    _kept: Kept,
}

/// A database as the application sees it.
trait Application: Marks {
    fn open() -> BoxFuture<'static, Place<Self>>;

    /// Writes down that `text` was charged.
    fn charge<'a>(connection: &'a mut Self::Connection, text: String) -> Outcome<'a>;

    /// Takes one from this account and gives it to that one.
    fn transfer<'a>(connection: &'a mut Self::Connection, from: i64, to: i64) -> Outcome<'a>;

    /// What was charged, in the order of writing.
    fn charges(pool: &Pool<Self>) -> BoxFuture<'_, Vec<String>>;

    fn balances(pool: &Pool<Self>) -> BoxFuture<'_, Vec<i64>>;
}

macro_rules! application {
    ($database:ty, $table:literal, $charge:literal, $transfer:literal, $store:ident: $open:block) => {
        impl Application for $database {
            fn open() -> BoxFuture<'static, Place<Self>> {
                Box::pin(async {
                    let (store, url, kept) = $open;
                    let pool = PoolOptions::new().max_connections(16).connect(&url).await.unwrap();
                    for sql in [$table, "CREATE TABLE accounts (id BIGINT PRIMARY KEY, balance BIGINT)"] {
                        sqlx::query(sql).execute(&pool).await.unwrap();
                    }
                    let accounts: Vec<String> = (0..ACCOUNTS).map(|id| format!("({id}, 100)")).collect();
                    let sql = format!("INSERT INTO accounts VALUES {}", accounts.join(", "));
                    sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&pool).await.unwrap();
                    Place { store: Arc::new(store), pool, _kept: kept }
                })
            }

            fn charge<'a>(connection: &'a mut Self::Connection, text: String) -> Outcome<'a> {
                Box::pin(async move {
                    sqlx::query($charge).bind(text).execute(connection).await?;
                    Ok(())
                })
            }

            fn transfer<'a>(connection: &'a mut Self::Connection, from: i64, to: i64) -> Outcome<'a> {
                Box::pin(async move {
                    for (by, account) in [(-1_i64, from), (1, to)] {
                        sqlx::query($transfer).bind(by).bind(account).execute(&mut *connection).await?;
                    }
                    Ok(())
                })
            }

            fn charges(pool: &Pool<Self>) -> BoxFuture<'_, Vec<String>> {
                Box::pin(async move {
                    sqlx::query_scalar("SELECT n FROM charges ORDER BY place").fetch_all(pool).await.unwrap()
                })
            }

            fn balances(pool: &Pool<Self>) -> BoxFuture<'_, Vec<i64>> {
                Box::pin(async move {
                    sqlx::query_scalar("SELECT balance FROM accounts ORDER BY id")
                        .fetch_all(pool)
                        .await
                        .unwrap()
                })
            }
        }
    };
}

application!(
    Sqlite,
    "CREATE TABLE charges (place INTEGER PRIMARY KEY, n TEXT)",
    "INSERT INTO charges (n) VALUES (?)",
    "UPDATE accounts SET balance = balance + ? WHERE id = ?",
    SqliteStore: {
        let folder = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(folder.path().join("store.db")).unwrap();
        let url = format!("sqlite://{}", store.path().display());
        (store, url, Kept::Folder { _folder: folder })
    }
);
application!(
    Postgres,
    "CREATE TABLE charges (place bigserial, n text)",
    "INSERT INTO charges (n) VALUES ($1)",
    "UPDATE accounts SET balance = balance + $1 WHERE id = $2",
    PostgresStore: {
        let database = Database::postgres().await;
        store::postgres::migrate(&database.url()).await.unwrap();
        let store = PostgresStore::connect(store::postgres::Config::new(database.url())).await.unwrap();
        (store, database.url(), Kept::Server { _database: database })
    }
);
application!(
    MySql,
    "CREATE TABLE charges (place BIGINT AUTO_INCREMENT PRIMARY KEY, n TEXT)",
    "INSERT INTO charges (n) VALUES (?)",
    "UPDATE accounts SET balance = balance + ? WHERE id = ?",
    MysqlStore: {
        let database = Database::mariadb().await;
        let store = MysqlStore::connect(store::mysql::Config::new(database.url())).await.unwrap();
        (store, database.url(), Kept::Server { _database: database })
    }
);

impl<DB: Application> Place<DB> {
    fn group(&self, handler: impl Into<Handler>) -> Group {
        Group::new(GROUP, Arc::clone(&self.store) as _, handler.into(), rules())
    }

    async fn charges(&self) -> Vec<String> {
        DB::charges(&self.pool).await
    }

    /// Processed, duplicates, parked and dead.
    async fn counted(&self) -> (u64, u64, u64, u64) {
        let counts = self.store.inbox_counts(GROUP).await.unwrap();
        (counts.processed, counts.duplicates, counts.parked, counts.dead)
    }
}

fn text(message: &Message) -> String {
    String::from_utf8(message.payload.to_vec()).unwrap()
}

fn arrivals(texts: &[&str]) -> Vec<Arrival> {
    texts.iter().map(|text| arrival(Message::new(TOPIC, text.to_string()))).collect()
}

/// Charges, and then does as the payload says.
fn obedient<DB: Application>(
    pool: &Pool<DB>,
    runs: &Arc<AtomicUsize>,
) -> Transactional<
    DB,
    impl for<'a> Fn(&'a mut DB::Connection, &'a Message) -> Outcome<'a> + Send + Sync + 'static,
> {
    let runs = Arc::clone(runs);
    Transactional::new(pool.clone(), move |connection, message| {
        runs.fetch_add(1, SeqCst);
        Box::pin(async move {
            let text = text(message);
            DB::charge(connection, text.clone()).await?;
            match text.as_str() {
                "later" => Err("not yet".into()),
                "never" => Err(Permanent("no such order".to_owned()).into()),
                "panic" => panic!("as it was told"),
                _ => Ok(()),
            }
        })
    })
}

async fn the_closures_work_and_the_mark_are_one_transaction<DB: Application>() {
    let place = DB::open().await;
    let group = place.group(obedient(&place.pool, &Arc::default()));
    let arrivals = arrivals(&["1", "later", "never", "panic", "2"]);
    let receipts = group.process(arrivals.clone()).await.unwrap();
    assert_eq!((&receipts[0], &receipts[4]), (&Receipt::Done, &Receipt::Done));
    assert!(matches!(&receipts[1], Receipt::Parked { error } if error == "not yet"), "{receipts:?}");
    assert!(matches!(&receipts[2], Receipt::Dead { error } if error == "no such order"), "{receipts:?}");
    assert!(matches!(&receipts[3], Receipt::Parked { .. }), "{receipts:?}");
    let mut done = place.charges().await;
    done.sort();
    assert_eq!(done, ["1", "2"], "what failed left no trace");
    assert_eq!(group.process(arrivals[..1].to_vec()).await.unwrap(), [Receipt::Duplicate]);
    assert_eq!(place.charges().await.len(), 2);
    assert_eq!(place.counted().await, (2, 1, 2, 1));
}

async fn a_message_that_failed_is_done_later_and_its_followers_after_it<DB: Application>() {
    let (place, world) = (DB::open().await, World::new());
    let failed = Arc::new(AtomicUsize::new(0));
    let handler = Transactional::new(place.pool.clone(), move |connection, message| {
        let failed = Arc::clone(&failed);
        Box::pin(async move {
            let number = text(message);
            // Together with its followers, and alone.
            if number == "1" && failed.fetch_add(1, SeqCst) < 2 {
                return Err("not yet".into());
            }
            DB::charge(connection, number).await
        })
    });
    world.publish(&messages(1, 5)).await;
    let running = world.start(place.group(handler));
    world::until(|| async { place.counted().await.0 == 5 }).await;
    running.drain().await;
    assert_eq!(place.charges().await, ["0", "1", "2", "3", "4"]);
    assert_eq!(place.counted().await, (5, 0, 0, 0));
}

async fn messages_that_share_a_transaction_are_done_once_whichever_of_them_fails<DB: Application>() {
    let (place, runs) = (DB::open().await, Arc::default());
    let group = place.group(obedient(&place.pool, &runs));
    let mut texts: Vec<String> = (0..300).map(|number| number.to_string()).collect();
    let call = |texts: &[String]| arrivals(&texts.iter().map(String::as_str).collect::<Vec<_>>());
    let first = call(&texts);
    assert_eq!(group.process(first.clone()).await.unwrap(), vec![Receipt::Done; 300]);
    assert_eq!(runs.load(SeqCst), 300, "each ran once");

    // Every tenth fails, and others were done before.
    for (place, text) in texts.iter_mut().enumerate() {
        *text = if place % 10 == 5 { "later".to_owned() } else { format!("{text}b") };
    }
    let mut second = call(&texts);
    second.extend_from_slice(&first[..50]);
    let receipts = group.process(second).await.unwrap();
    let told = |is: fn(&Receipt) -> bool| receipts.iter().filter(|receipt| is(receipt)).count();
    assert_eq!(told(|receipt| *receipt == Receipt::Done), 270);
    assert_eq!(told(|receipt| *receipt == Receipt::Duplicate), 50);
    assert_eq!(told(|receipt| matches!(receipt, Receipt::Parked { .. })), 30);
    assert!(runs.load(SeqCst) > 600, "those beside them ran again: they shared their transactions");

    let charges = place.charges().await;
    let once: BTreeMap<&String, usize> = charges.iter().fold(BTreeMap::new(), |mut counts, text| {
        *counts.entry(text).or_default() += 1;
        counts
    });
    assert_eq!(once.len(), 570);
    assert!(once.values().all(|count| *count == 1), "{once:?}");
    assert_eq!(place.counted().await, (570, 50, 30, 0));
}

async fn of_64_parallel_deliveries_one_is_done<DB: Application>() {
    let place = DB::open().await;
    let group = Arc::new(place.group(obedient(&place.pool, &Arc::default())));
    let arrivals: Vec<Arrival> = messages(10, 10).into_iter().map(arrival).collect();
    let deliveries = (0..64).map(|_| {
        let (group, arrivals) = (Arc::clone(&group), arrivals.clone());
        tokio::spawn(async move {
            // What another delivery is busy with comes again, as seldom as from a broker.
            let mut left = arrivals;
            while !left.is_empty() {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let receipts = group.process(left.clone()).await.unwrap();
                let undone = |receipt: &Receipt| !matches!(receipt, Receipt::Done | Receipt::Duplicate);
                left = left
                    .into_iter()
                    .zip(receipts)
                    .filter(|(_, told)| undone(told))
                    .map(|(one, _)| one)
                    .collect();
            }
        })
    });
    join_all(deliveries).await.into_iter().for_each(|ended| ended.unwrap());
    assert_eq!(place.charges().await.len(), 100);
    assert_eq!(place.counted().await.0, 100);
}

/// Each takes from one account and gives to another, in all directions: transactions wait for each other in circles.
async fn transactions_that_lock_each_other_end_well<DB: Application>() {
    let (place, world) = (DB::open().await, World::new());
    let handler = Transactional::new(place.pool.clone(), |connection, message| {
        Box::pin(async move {
            let name = format!("{}-{}", message.key.as_deref().unwrap_or_default(), text(message));
            let number = i64::try_from(message.id.0.as_u128() % 1_000_003)?;
            DB::transfer(connection, number % ACCOUNTS, number * 7 % ACCOUNTS).await?;
            DB::charge(connection, name).await
        })
    });
    world.publish(&messages(40, 15)).await;
    let running = world.start(place.group(handler));
    world::until(|| async { place.counted().await.0 == 600 }).await;
    running.drain().await;
    assert_eq!(place.counted().await, (600, 0, 0, 0));
    let balances = DB::balances(&place.pool).await;
    assert_eq!(balances.iter().sum::<i64>(), 100 * ACCOUNTS, "{balances:?}");
    assert_eq!(place.charges().await.len(), 600);
}

async fn a_database_that_is_away_costs_no_message_an_attempt<DB: Application>() {
    let place = DB::open().await;
    let closed = PoolOptions::<DB>::new().connect_lazy_with((*place.pool.connect_options()).clone());
    closed.close().await;
    let group = place.group(obedient(&closed, &Arc::default()));
    let receipts = group.process(arrivals(&["1", "2", "3"])).await.unwrap();
    assert!(receipts.iter().all(|receipt| matches!(receipt, Receipt::Unavailable { .. })), "{receipts:?}");
    assert_eq!(place.counted().await, (0, 0, 0, 0));
}

async fn work_mark_and_acknowledgement_are_one<DB: Application>() {
    let place = DB::open().await;
    let written: Vec<NewMessage> =
        ["1", "2", "later", "3"].map(|text| Message::new(TOPIC, text).key(text).into()).to_vec();
    let sent: Vec<Arrival> = written.iter().map(|new| arrival(new.message.clone())).collect();
    place.store.append(written).await.unwrap();
    let relay = Relay::with_all_lanes(Arc::clone(&place.store)).await.by(free);
    let verdict = Verdict::Sent { ack_groups: vec![GROUP.to_owned()] };
    assert_eq!(relay.drain(100, &verdict).await.len(), 4);

    let handler = obedient(&place.pool, &Arc::default()).acknowledging();
    place.group(handler).process(sent.clone()).await.unwrap();
    for arrival in sent {
        let record = place.store.record(arrival.message.id).await.unwrap().unwrap();
        let done = text(&arrival.message) != "later";
        assert_eq!(record.acknowledgements.len(), usize::from(done), "{}", text(&arrival.message));
    }
}

macro_rules! on_each_database {
    ($($case:ident)*) => {
        on_each_database!(sqlite: Sqlite, $($case)*);
        on_each_database!(postgres: Postgres, $($case)*);
        on_each_database!(mariadb: MySql, $($case)*);
    };
    ($module:ident: $database:ident, $($case:ident)*) => {
        mod $module {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    super::$case::<sqlx::$database>().await;
                }
            )*
        }
    };
}

on_each_database!(
    the_closures_work_and_the_mark_are_one_transaction
    a_message_that_failed_is_done_later_and_its_followers_after_it
    messages_that_share_a_transaction_are_done_once_whichever_of_them_fails
    of_64_parallel_deliveries_one_is_done
    transactions_that_lock_each_other_end_well
    a_database_that_is_away_costs_no_message_an_attempt
    work_mark_and_acknowledgement_are_one
);
