//! How fast messages get into Redis Streams, against a client that does nothing but pipelined XADD with the same entries
//! and the same window.
//!
//! `cargo xtask servers up redis && cargo bench -p postrider-broker --features redis-streams --bench redis_streams`

use std::time::{Duration, Instant};

use broker::redis_streams::{Broker, Config};
use broker::{Outcome, Outgoing, Publisher};
use message::Message;

const MESSAGES: i64 = 50_000;
const WINDOW: i64 = 500;
const PAYLOAD: usize = 256;
const ROUNDS: usize = 5;

fn batch(from: i64) -> Vec<Outgoing> {
    let message = |seq: i64| {
        Message::new("orders", vec![b'x'; PAYLOAD]).key(format!("key-{}", seq % 200)).kind("Placed")
    };
    (from..from + WINDOW).map(|seq| Outgoing::new(message(seq), seq)).collect()
}

async fn ours(broker: &Broker) -> Duration {
    let batches: Vec<_> = (0..MESSAGES).step_by(WINDOW as usize).map(batch).collect();
    let begun = Instant::now();
    for batch in batches {
        let outcomes = broker.publish(batch).await;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    }
    begun.elapsed()
}

/// The same entries, as they were stored, by one pipeline after another.
async fn bare(
    connection: &mut redis::aio::MultiplexedConnection,
    tag: &str,
    entries: &[Vec<String>],
) -> Duration {
    let begun = Instant::now();
    for window in entries.chunks(WINDOW as usize) {
        let mut pipe = redis::pipe();
        for (place, entry) in window.iter().enumerate() {
            pipe.cmd("XADD").arg(format!("{tag}:bare:{}", place % 16)).arg("*").arg(entry);
        }
        let ids: Vec<String> = pipe.query_async(connection).await.expect("entries can be added");
        assert_eq!(ids.len(), window.len());
    }
    begun.elapsed()
}

fn rate(took: Duration) -> f64 {
    MESSAGES as f64 / took.as_secs_f64()
}

#[tokio::main]
async fn main() {
    let url = testkit::servers::url("redis");
    let client = redis::Client::open(url.as_str()).expect("the server's URL can be read");
    let mut connection = client.get_multiplexed_async_connection().await.expect("it can be reached");
    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        let prefix = format!("bench-{}", uuid::Uuid::new_v4());
        let tag = format!("{{{prefix}}}");
        let config = Config { prefix, ..Config::from_url(&url).expect("the server's URL can be read") };
        let broker = Broker::open(config).expect("the broker can be opened");
        let with = rate(ours(&broker).await);
        let mut entries = Vec::new();
        for partition in 0..16 {
            let stream = format!("{tag}:stream:orders:{partition}");
            let stored: Vec<(String, Vec<String>)> = redis::cmd("XRANGE")
                .arg(stream)
                .arg("-")
                .arg("+")
                .query_async(&mut connection)
                .await
                .expect("entries");
            entries.extend(stored.into_iter().map(|(_, texts)| texts));
        }
        assert_eq!(entries.len() as i64, MESSAGES);
        let without = rate(bare(&mut connection, &tag, &entries).await);
        eprintln!("round {round}: {with:.0}/s, bare {without:.0}/s, ratio {:.2}", with / without);
        ratios.push(with / without);
        let keys: Vec<String> =
            redis::cmd("KEYS").arg(format!("{tag}:*")).query_async(&mut connection).await.expect("keys");
        let _: i64 =
            redis::cmd("UNLINK").arg(keys).query_async(&mut connection).await.expect("they can be removed");
    }
    ratios.sort_by(f64::total_cmp);
    eprintln!("median ratio {:.2}", ratios[ROUNDS / 2]);
}
