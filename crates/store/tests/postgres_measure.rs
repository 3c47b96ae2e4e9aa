//! How fast turns are, with many sent rows and under a held snapshot. Not a test of right or wrong:
//! `cargo test -p postrider-store --features postgres --test postgres_measure -- --ignored --nocapture`.

#![cfg(feature = "postgres")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement prints, and may panic")]

mod postgres_server;

use std::sync::Arc;
use std::time::{Duration, Instant};

use message::Message;
use postgres_server::Database;
use store::postgres::{Config, PostgresStore};
use store::{Append, Batch, ClaimOrder, Settlement, Store};
use testkit::store::{Relay, free, sent};

async fn open(database: &Database) -> (Arc<PostgresStore>, Relay) {
    let store = Arc::new(PostgresStore::connect(Config::new(database.url())).await.unwrap());
    let relay = Relay::with_all_lanes(store.clone() as Arc<dyn Store>).await;
    (store, relay)
}

fn message(n: usize) -> store::NewMessage {
    Message::new("orders", "{\"total\": 10, \"currency\": \"EUR\"}").key((n % 1_000).to_string()).into()
}

/// Settles the last batches and claims the next ones, as a relay does. How long each turn took.
async fn turns(relay: &Relay, count: usize) -> Vec<Duration> {
    let mut last: Vec<Batch> = Vec::new();
    let mut times = Vec::new();
    let mut moved = 0;
    while moved < count {
        let settlement = |batch: &Batch| Settlement {
            batch: batch.id,
            lease: batch.lease,
            verdicts: batch.messages.iter().map(|claimed| (claimed.seq, sent())).collect(),
        };
        let order =
            ClaimOrder { leases: relay.held.clone(), limit: 500, bytes: 1 << 24, rule: Arc::new(free) };
        let began = Instant::now();
        let turn = relay.store.turn(last.iter().map(settlement).collect(), Some(order)).await.unwrap();
        times.push(began.elapsed());
        moved += last.iter().map(|batch| batch.messages.len()).sum::<usize>();
        last = turn.batches;
    }
    times
}

fn percentile(times: &mut [Duration], part: f64) -> Duration {
    times.sort_unstable();
    times[((times.len() - 1) as f64 * part) as usize]
}

#[tokio::test]
#[ignore = "a measurement"]
async fn turns_with_and_without_a_million_sent_rows() {
    const COUNT: usize = 20_000;
    let (empty, full) = (Database::fresh().await, Database::fresh().await);
    let (a, b) = (open(&empty).await, open(&full).await);
    full.application()
        .await
        .batch_execute(
            "INSERT INTO outbox_events (topic, key, payload, ready, status, sent_at)
             SELECT 'orders', (n % 1000)::text, '{\"total\": 10, \"currency\": \"EUR\"}', false, 'sent', now()
             FROM generate_series(1, 1000000) n",
        )
        .await
        .unwrap();
    let mut ratios = Vec::new();
    for _ in 0..7 {
        let mut rates = Vec::new();
        for (store, relay) in [&a, &b] {
            for chunk in (0..COUNT).collect::<Vec<_>>().chunks(2_000) {
                store.append(chunk.iter().map(|n| message(*n)).collect()).await.unwrap();
            }
            let began = Instant::now();
            turns(relay, COUNT).await;
            rates.push(COUNT as f64 / began.elapsed().as_secs_f64());
        }
        println!("none {:.0}/s, a million {:.0}/s", rates[0], rates[1]);
        ratios.push(rates[1] / rates[0]);
    }
    ratios.sort_by(f64::total_cmp);
    println!("median ratio {:.2}", ratios[3]);
}

#[tokio::test]
#[ignore = "a measurement"]
async fn turns_under_a_held_snapshot() {
    let database = Database::fresh().await;
    let (store, relay) = open(&database).await;
    let holder = database.application().await;
    holder
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox_events")
        .await
        .unwrap();
    let observer = database.application().await;
    for minute in 0..4 {
        let began = Instant::now();
        let mut times = Vec::new();
        for round in 0..600 {
            // 50 messages every 25 ms or so: 2,000 a second.
            store.append((0..50).map(|n| message(round * 50 + n)).collect()).await.unwrap();
            times.extend(turns(&relay, 50).await);
        }
        let rate = 30_000.0 / began.elapsed().as_secs_f64();
        let (half, most) = (percentile(&mut times, 0.5), percentile(&mut times, 0.99));
        // What a busy machine cannot blur: index entries that scans met for each message, the dearest indexes first.
        let met = "SELECT string_agg(format('%s %s', indexrelname, idx_tup_read / 30000), ', ' ORDER BY idx_tup_read DESC)
                   FROM pg_stat_user_indexes WHERE idx_tup_read > 30000";
        let met: Option<String> = observer.query_one(met, &[]).await.unwrap().get(0);
        observer.batch_execute("SELECT pg_stat_reset()").await.unwrap();
        println!(
            "after {} messages: {rate:.0}/s, turn p50 {half:?}, p99 {most:?}; met {}",
            (minute + 1) * 30_000,
            met.unwrap_or_default()
        );
    }
}
