//! A task of the consumer that dies at each step between receiving and forgetting a message.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use fail::FailScenario;
use inbox::Handler;
use world::{World, messages, until};

const POINTS: [&str; 5] =
    ["inbox::received", "inbox::handled", "inbox::marked", "inbox::acknowledged", "inbox::finished"];

#[tokio::test(flavor = "multi_thread")]
async fn whatever_step_it_dies_at_each_effect_happens_once_and_in_order() {
    let scenario = FailScenario::setup();
    let world = World::new();
    let connection = rusqlite::Connection::open(world.store.path()).unwrap();
    connection.execute_batch("CREATE TABLE effects (key TEXT, n INTEGER)").unwrap();
    let sql = "INSERT INTO effects VALUES (:key, :payload)";
    for (round, point) in (1..).zip(POINTS) {
        fail::cfg(point, "1*panic->off").unwrap();
        world.publish(&messages(5, 20)).await;
        let running = world.start(world.group(Handler::Sql(sql.to_owned())));
        world.processed(round * 100).await;
        // Received more than once proves that it died: all but the last point leave the messages with the broker.
        if point != "inbox::finished" {
            until(|| async { running.status().received > 100 }).await;
        }
        running.drain().await;
        fail::remove(point);
        let in_order: Vec<i64> = (0..20).collect();
        for key in 0..5 {
            let effects: Vec<i64> = connection
                .prepare("SELECT n FROM effects WHERE key = ?1 ORDER BY rowid")
                .unwrap()
                .query_map([format!("k{key}")], |row| row.get(0))
                .unwrap()
                .collect::<Result<_, _>>()
                .unwrap();
            assert_eq!(effects, in_order, "{point}, k{key}");
        }
        connection.execute("DELETE FROM effects", []).unwrap();
    }
    scenario.teardown();
}
