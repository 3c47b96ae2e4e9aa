//! How fast the embedded broker stores and delivers on this machine's disk.
//!
//! `cargo run --release -p postrider-broker --example embedded_speed [folder]`
//!
//! Batches of 500 messages with payloads of 350 bytes over 1,000 keys, each batch confirmed before the next.

use std::time::Instant;

use broker::embedded::{Broker, Config};
use broker::{Outcome, Outgoing, Publisher, Subscriber};
use message::Message;

const BATCH: usize = 500;
const BATCHES: usize = 400;

#[allow(clippy::print_stdout, reason = "printing is what it is for")]
#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = match std::env::args_os().nth(1) {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    let broker = Broker::open(Config::new(folder.path().join("broker.db")))?;
    let total = BATCH * BATCHES;
    let batches: Vec<Vec<Outgoing>> = (0..BATCHES).map(batch).collect();

    let start = Instant::now();
    for batch in batches {
        let outcomes = broker.publish(batch).await;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed));
    }
    println!("publish:                 {:>9.0} messages/s", total as f64 / start.elapsed().as_secs_f64());

    let mut subscription = broker.subscribe("measure", &["orders".to_owned()]).await?;
    let start = Instant::now();
    let mut received = 0;
    while received < total {
        let deliveries = subscription.receive(BATCH).await?;
        received += deliveries.len();
        let positions: Vec<_> = deliveries.iter().map(|delivery| delivery.position).collect();
        subscription.acknowledge(&positions).await?;
    }
    println!("receive and acknowledge: {:>9.0} messages/s", total as f64 / start.elapsed().as_secs_f64());
    subscription.close().await;
    Ok(())
}

fn batch(number: usize) -> Vec<Outgoing> {
    let message = |n: usize| {
        let key = format!("customer-{}", (number * BATCH + n) * 7919 % 1_000);
        Message::new("orders", vec![b'x'; 350]).key(key).kind("OrderPlaced")
    };
    (0..BATCH).map(|n| Outgoing::new(message(n), (number * BATCH + n) as i64)).collect()
}
