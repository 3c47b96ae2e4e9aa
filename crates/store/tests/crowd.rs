//! One effect for each id, however many deliver it at once, with the marks in SQL alone and with a Redis before them that
//! forgets all the time.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod mysql_database;
mod postgres_server;
mod redis_place;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use message::Message;
use mysql_async::prelude::Queryable;
use redis::Commands;
use redis_place::Server;
use store::hybrid::{Config, Hybrid};
use store::mysql::MysqlStore;
use store::sqlite::SqliteStore;
use store::{Arrival, Inbox, InboxRules, Receipt, Store, Work};

/// The handler: nothing keeps its rows from being there twice but the inbox.
const EFFECT: &str = "INSERT INTO effects VALUES (:group, :id)";

/// How many effects a group has, and of how many ids.
const COUNT: &str = "SELECT count(*), count(DISTINCT id) FROM effects WHERE grp = ";

/// Groups that remember in SQL, and behind Redis.
const GROUPS: [&str; 2] = ["sql", "hybrid"];

/// Ids that are delivered in parallel; `POSTRIDER_TEST_IDS` sets another number.
fn ids() -> usize {
    std::env::var("POSTRIDER_TEST_IDS").map_or(500, |text| text.parse().expect("a number of ids"))
}

fn arrivals() -> Arc<Vec<Arrival>> {
    let message = |n: usize| Message::new("orders", n.to_string()).key(format!("k{n}"));
    Arc::new((0..ids()).map(|n| Arrival { message: message(n), seq: Some(1), delivery: 0 }).collect())
}

/// Delivers `arrivals` until each was done, by this call or another, and answers how many by this one.
async fn deliver(inbox: &dyn Inbox, group: &str, mut arrivals: Vec<Arrival>) -> usize {
    let rules = InboxRules { acknowledge: false, ..InboxRules::default() };
    let (work, mut done) = (Work::Sql(EFFECT.to_owned()), 0);
    while !arrivals.is_empty() {
        let receipts = match inbox.process(group, arrivals.clone(), &work, &rules).await {
            Ok(receipts) => receipts,
            // As when a database chooses one of two that wait for each other: the broker delivers again.
            Err(error) if error.is_transient() => continue,
            Err(error) => panic!("{error}"),
        };
        done += receipts.iter().filter(|receipt| **receipt == Receipt::Done).count();
        let mut receipts = receipts.into_iter();
        arrivals.retain(|_| match receipts.next().expect("one for each") {
            Receipt::Done | Receipt::Duplicate => false,
            Receipt::Busy => true,
            other => panic!("{other:?}"),
        });
    }
    done
}

/// Delivers each of `arrivals` 64 times, side by side, and answers how often the work was done.
async fn deliver_in_parallel(
    inbox: Arc<dyn Inbox>,
    group: &'static str,
    arrivals: &Arc<Vec<Arrival>>,
) -> usize {
    let deliveries: Vec<_> = (0..64)
        .map(|number| {
            let (inbox, arrivals) = (Arc::clone(&inbox), Arc::clone(arrivals));
            tokio::spawn(async move {
                let mut done = 0;
                let chunks: Vec<&[Arrival]> = arrivals.chunks(100).collect();
                // Eight at a time begin with the same.
                for place in 0..chunks.len() {
                    let chunk = chunks[(place + number / 8) % chunks.len()];
                    done += deliver(&*inbox, group, chunk.to_vec()).await;
                }
                done
            })
        })
        .collect();
    let mut done = 0;
    for delivery in deliveries {
        done += delivery.await.expect("no panic");
    }
    done
}

/// Does all that on `store`; `effects` counts what is in its table.
async fn one_effect_for_each(store: Arc<dyn Store>, effects: impl AsyncFn(&str) -> (usize, usize)) {
    let (server, arrivals) = (Server::start(&[]), arrivals());
    let flushing = Arc::new(AtomicBool::new(true));
    let forget = std::thread::spawn({
        let (flushing, mut redis) = (Arc::clone(&flushing), server.connection());
        move || {
            let mut flushes = 0;
            while flushing.load(Ordering::Relaxed) {
                redis.flushall::<()>().expect("flushed");
                flushes += 1;
                std::thread::sleep(Duration::from_millis(flushes % 7));
            }
            flushes
        }
    });
    // Patient, so that a busy machine does not turn Redis into one that is away.
    let config = Config { patience: Duration::from_secs(10), ..Config::new(server.url(), "crowd") };
    let hybrid = Hybrid::new(store.clone(), &config).expect("an inbox");
    let inboxes: [Arc<dyn Inbox>; 2] = [store, Arc::new(hybrid)];
    for (group, inbox) in GROUPS.into_iter().zip(inboxes) {
        let began = std::time::Instant::now();
        assert_eq!(deliver_in_parallel(inbox, group, &arrivals).await, arrivals.len(), "{group}");
        assert_eq!(effects(group).await, (arrivals.len(), arrivals.len()), "{group}");
        eprintln!("{group}: 64 × {} deliveries, one effect each, in {:.1?}", arrivals.len(), began.elapsed());
    }
    flushing.store(false, Ordering::Relaxed);
    assert!(forget.join().expect("no panic") > 0, "Redis was never flushed");
}

mod of_64_parallel_deliveries_of_each_id_one_is_done_also_when_redis_forgets_all_the_time {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn sqlite() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store.db");
        let store = SqliteStore::open(&path).expect("a store");
        let file = rusqlite::Connection::open(path).expect("the store's file");
        file.busy_timeout(Duration::from_secs(60)).expect("a setting");
        file.execute_batch("CREATE TABLE effects (grp TEXT NOT NULL, id TEXT NOT NULL)").expect("a table");
        one_effect_for_each(Arc::new(store), async |group| {
            file.query_row(&format!("{COUNT}'{group}'"), [], |row| Ok((row.get(0)?, row.get(1)?)))
                .expect("a count")
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn postgres() {
        let database = postgres_server::Database::fresh().await;
        let (store, application) = (database.open().await, database.application().await);
        application.batch_execute("CREATE TABLE effects (grp text, id uuid)").await.expect("a table");
        one_effect_for_each(store, async |group| {
            let row = application.query_one(&format!("{COUNT}'{group}'"), &[]).await.expect("a count");
            let number = |column: usize| usize::try_from(row.get::<_, i64>(column)).expect("a count");
            (number(0), number(1))
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn mariadb() {
        let database = mysql_database::Database::fresh().await;
        let store = MysqlStore::connect(store::mysql::Config::new(database.url())).await.expect("a store");
        let mut application = database.application().await;
        let table = "CREATE TABLE effects (grp VARCHAR(20) NOT NULL, id VARCHAR(36) NOT NULL)";
        application.query_drop(table).await.expect("a table");
        one_effect_for_each(Arc::new(store), async |group| {
            let mut application = database.application().await;
            let counted = application.query_first(format!("{COUNT}'{group}'")).await.expect("a count");
            counted.expect("a row")
        })
        .await;
    }
}
