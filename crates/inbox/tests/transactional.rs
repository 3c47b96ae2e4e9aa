//! Closures in a transaction of the application's own sqlx pool.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use std::sync::Arc;

use inbox::sqlx::{Permanent, Transactional};
use message::Message;
use sqlx::SqlitePool;
use store::{Inbox, Receipt};
use world::{GROUP, TOPIC, World, arrival, messages};

async fn pool(world: &World) -> SqlitePool {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(world.store.path());
    let pool = SqlitePool::connect_with(options).await.expect("a pool");
    sqlx::query("CREATE TABLE charges (n TEXT)").execute(&pool).await.expect("a table");
    pool
}

async fn charges(pool: &SqlitePool) -> Vec<String> {
    sqlx::query_scalar("SELECT n FROM charges ORDER BY rowid").fetch_all(pool).await.expect("rows")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_closures_work_and_the_mark_are_one_transaction() {
    let world = World::new();
    let pool = pool(&world).await;
    let handler = Transactional::new(pool.clone(), |connection, message| {
        Box::pin(async move {
            let number = std::str::from_utf8(&message.payload)?.to_owned();
            sqlx::query("INSERT INTO charges VALUES (?)").bind(&number).execute(connection).await?;
            match number.as_str() {
                "later" => Err("not yet".into()),
                "never" => Err(Permanent("no such order".to_owned()).into()),
                _ => Ok(()),
            }
        })
    });
    let group = world.group(handler.into());
    let arrivals = ["1", "later", "never", "2"].map(|text| arrival(Message::new(TOPIC, text)));
    let receipts = group.process(arrivals.to_vec()).await.unwrap();
    assert_eq!((&receipts[0], &receipts[3]), (&Receipt::Done, &Receipt::Done));
    assert!(matches!(&receipts[1], Receipt::Parked { error } if error == "not yet"));
    assert!(matches!(&receipts[2], Receipt::Dead { error } if error == "no such order"));
    let mut done = charges(&pool).await;
    done.sort();
    assert_eq!(done, ["1", "2"], "what failed left no trace");
    let again = group.process(arrivals[..1].to_vec()).await.unwrap();
    assert_eq!(again, [Receipt::Duplicate]);
    assert_eq!(charges(&pool).await.len(), 2);
    let counts = world.store.inbox_counts(GROUP).await.unwrap();
    assert_eq!((counts.processed, counts.duplicates, counts.dead), (2, 1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_failed_is_done_later_and_its_followers_after_it() {
    let world = World::new();
    let pool = pool(&world).await;
    let failed = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let handler = Transactional::new(pool.clone(), move |connection, message| {
        let failed = Arc::clone(&failed);
        Box::pin(async move {
            let number = std::str::from_utf8(&message.payload)?.to_owned();
            if number == "0" && !failed.swap(true, std::sync::atomic::Ordering::SeqCst) {
                return Err("not yet".into());
            }
            sqlx::query("INSERT INTO charges VALUES (?)").bind(number).execute(connection).await?;
            Ok(())
        })
    });
    world.publish(&messages(1, 5)).await;
    let running = world.start(world.group(handler.into()));
    world.processed(5).await;
    running.drain().await;
    assert_eq!(charges(&pool).await, ["0", "1", "2", "3", "4"]);
    assert_eq!(world.counts().await.parked, 0);
}
