//! What years of use and a careless neighbour cost a store on PostgreSQL.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use message::Message;
use store::postgres::{Config, PostgresStore};
use store::{Append, NewMessage, Sent};
use tokio_postgres::{Client, NoTls};

use crate::pull::Puller;
use crate::{Size, arrow};

/// A database of its own, gone when the run is over.
pub(crate) struct Database {
    server: String,
    name: String,
    pub(crate) url: String,
}

impl Database {
    /// Makes one on the server at `server`.
    pub(crate) async fn make(server: &str) -> Result<Self> {
        let name = format!("bench_{}", uuid::Uuid::new_v4().simple());
        connect(server).await?.batch_execute(&format!("CREATE DATABASE {name}")).await?;
        let (address, _) = server.rsplit_once('/').context("the URL names a database")?;
        Ok(Self { server: server.to_owned(), url: format!("{address}/{name}"), name })
    }

    pub(crate) async fn open(&self) -> Result<Arc<PostgresStore>> {
        Ok(Arc::new(PostgresStore::connect(Config::new(&self.url)).await?))
    }

    pub(crate) async fn forget(&self) -> Result<()> {
        let drop = format!("DROP DATABASE {} WITH (FORCE)", self.name);
        Ok(connect(&self.server).await?.batch_execute(&drop).await?)
    }
}

/// A plain connection, such as an application has.
pub(crate) async fn connect(url: &str) -> Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// Throughput with `old` Sent rows as a share of that with none, in interleaved pairs.
pub(crate) async fn history(server: &str, size: Size, pairs: usize, old: u64) -> Result<()> {
    let (young, aged) = (Database::make(server).await?, Database::make(server).await?);
    let stores = (young.open().await?, aged.open().await?);
    let started = Instant::now();
    age(&connect(&aged.url).await?, old).await?;
    println!("{old} Sent rows written in {:.0?}", started.elapsed());
    let mut ratios = Vec::new();
    println!("{:>10}  {:>14}  {:>14}  {:>7}", "pair", "old rows", "none", "share");
    for pair in 1..=pairs {
        let (with, without) = (relay(&stores.1, size).await?, relay(&stores.0, size).await?);
        let rate = |time: Duration| size.messages as f64 / time.as_secs_f64();
        let ratio = rate(with) / rate(without);
        println!("{pair:>10}  {:>10.0} /s  {:>10.0} /s  {ratio:>7.2}", rate(with), rate(without));
        ratios.push(ratio);
        // Both start the next pair as they started this one.
        for database in [&young, &aged] {
            connect(&database.url)
                .await?
                .batch_execute("DELETE FROM outbox_events WHERE topic = 'orders'")
                .await?;
            connect(&database.url).await?.batch_execute("VACUUM outbox_events").await?;
        }
    }
    crate::median(ratios);
    drop(stores);
    young.forget().await?;
    aged.forget().await
}

/// Writes rows that were sent long ago.
async fn age(client: &Client, old: u64) -> Result<()> {
    for step in 0..old.div_ceil(500_000) {
        let rows = (old - step * 500_000).min(500_000);
        client
            .batch_execute(&format!(
                "INSERT INTO outbox_events (topic, key, payload, status, ready, sent_at)
                 SELECT 'history', 'customer-' || n % 1000, repeat('x', 350)::bytea, 'sent', false, now()
                 FROM generate_series(1, {rows}) n"
            ))
            .await?;
    }
    client.batch_execute("VACUUM ANALYZE outbox_events").await?;
    Ok(())
}

/// The time to take and settle messages that were written before.
async fn relay(store: &Arc<PostgresStore>, size: Size) -> Result<Duration> {
    let messages: Vec<NewMessage> =
        (0..size.messages).map(|number| arrow::message(size, number).into()).collect();
    for batch in messages.chunks(1_000) {
        for result in store.append(batch.to_vec()).await? {
            result?;
        }
    }
    let mut puller = Puller::new(store.clone(), arrow::BATCH).await?;
    let started = Instant::now();
    let taken = puller.drain().await?;
    let took = started.elapsed();
    ensure!(taken == size.messages, "{taken} of {} were taken", size.messages);
    puller.leave().await?;
    Ok(took)
}

/// The time to take and settle, ours and that of a bare client that selects rows and then updates or deletes them.
pub(crate) async fn relay_and_bare(server: &str, size: Size, delete: bool) -> Result<(Duration, Duration)> {
    let database = Database::make(server).await?;
    let sent = if delete { Sent::Delete } else { Sent::Keep };
    let config = Config { sent, ..Config::new(&database.url) };
    let store = Arc::new(PostgresStore::connect(config).await?);
    let ours = relay(&store, size).await?;
    drop(store);
    let bare = bare(&connect(&database.url).await?, size, delete).await?;
    database.forget().await?;
    Ok((ours, bare))
}

/// One client and one table with a partial index: the least that any relay must do.
async fn bare(client: &Client, size: Size, delete: bool) -> Result<Duration> {
    client
        .batch_execute(&format!(
            "CREATE TABLE bare (seq bigserial PRIMARY KEY, id uuid, topic text, key text, payload bytea,
                                ready boolean DEFAULT true, sent_at timestamptz);
             CREATE INDEX bare_ready ON bare (seq) WHERE ready;
             INSERT INTO bare (id, topic, key, payload)
             SELECT gen_random_uuid(), 'orders', 'customer-' || n % {}, repeat('x', {})::bytea
             FROM generate_series(1, {}) n;
             ANALYZE bare",
            size.keys, size.payload, size.messages
        ))
        .await?;
    let take = client
        .prepare(&format!(
            "SELECT seq, id, topic, key, payload FROM bare WHERE ready AND seq > $1 ORDER BY seq LIMIT {}",
            arrow::BATCH
        ))
        .await?;
    let settle = client
        .prepare(match delete {
            true => "DELETE FROM bare WHERE seq = ANY($1)",
            false => "UPDATE bare SET ready = false, sent_at = clock_timestamp() WHERE seq = ANY($1)",
        })
        .await?;
    let started = Instant::now();
    let mut last = 0_i64;
    loop {
        let rows = client.query(&take, &[&last]).await?;
        let seqs: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        let Some(highest) = seqs.last() else { break };
        last = *highest;
        client.execute(&settle, &[&seqs]).await?;
    }
    Ok(started.elapsed())
}

/// Steady traffic beside a transaction that never ends: claims must stay quick, and order kept when a writer
/// commits a low number late.
pub(crate) async fn snapshot(server: &str, rate: u64, time: Duration) -> Result<()> {
    let database = Database::make(server).await?;
    let store = database.open().await?;
    let mut holder = connect(&database.url).await?;
    let held = holder
        .build_transaction()
        .isolation_level(tokio_postgres::IsolationLevel::RepeatableRead)
        .start()
        .await?;
    held.query("SELECT count(*) FROM outbox_events", &[]).await?;

    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writer = tokio::spawn(write(database.url.clone(), rate, stop.clone(), written.clone()));
    let late = tokio::spawn(write_late(database.url.clone(), stop.clone()));
    let mut puller = Puller::new(store.clone(), arrow::BATCH).await?;
    let (mut claims, mut last, mut disordered, mut taken) = (Vec::new(), HashMap::new(), 0, 0_u64);
    let mut backlog = 0;
    let started = Instant::now();
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    loop {
        tick.tick().await;
        let over = started.elapsed() > time;
        if over {
            stop.store(true, Ordering::Relaxed);
        }
        let pulled = puller.pull().await?;
        if !pulled.taken.is_empty() {
            claims.push((started.elapsed(), pulled.took));
        }
        taken += pulled.taken.len() as u64;
        if !over {
            backlog = backlog.max(written.load(Ordering::Relaxed).saturating_sub(taken));
        }
        for (seq, key) in pulled.taken {
            if let Some(before) = last.insert(key, seq) {
                disordered += u64::from(before > seq);
            }
        }
        if over && writer.is_finished() && late.is_finished() {
            break;
        }
    }
    let late = late.await??;
    writer.await??;
    let taken = taken + puller.drain().await? as u64;
    drop(held);
    let written = written.load(Ordering::Relaxed) + late;
    for (name, from, to) in [("first tenth", 0.0, 0.1), ("last tenth", 0.9, 1.0), ("all", 0.0, 1.0)] {
        let of = |share: f64| time.mul_f64(share);
        let mut some: Vec<Duration> =
            claims.iter().filter(|(at, _)| *at >= of(from) && *at < of(to)).map(|(_, took)| *took).collect();
        some.sort_unstable();
        let at = |share: f64| some.get((some.len() as f64 * share) as usize).copied().unwrap_or_default();
        println!("{name:>12}: {} claims, p50 {:.1?}, p99 {:.1?}", some.len(), at(0.5), at(0.99));
    }
    println!("written {written}, taken {taken}, most behind {backlog}, out of key order {disordered}");
    ensure!(written == taken && disordered == 0, "a promise was broken");
    drop(store);
    drop(holder);
    database.forget().await
}

/// Writes `rate` messages a second, a transaction each.
async fn write(url: String, rate: u64, stop: Arc<AtomicBool>, written: Arc<AtomicU64>) -> Result<()> {
    let client = connect(&url).await?;
    let mut tick = tokio::time::interval(Duration::from_secs(1) / u32::try_from(rate)?);
    while !stop.load(Ordering::Relaxed) {
        tick.tick().await;
        let number = written.load(Ordering::Relaxed);
        let message = Message::new("orders", "{}").key(format!("customer-{}", number % 100));
        store::postgres::append(&client, &message).await?;
        written.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Draws a number, dawdles, and commits, again and again: a key of its own, two messages in a row.
async fn write_late(url: String, stop: Arc<AtomicBool>) -> Result<u64> {
    let mut client = connect(&url).await?;
    let mut written = 0;
    while !stop.load(Ordering::Relaxed) {
        let transaction = client.transaction().await?;
        for _ in 0..2 {
            store::postgres::append(&transaction, &Message::new("orders", "{}").key("late")).await?;
        }
        tokio::time::sleep(Duration::from_millis(700)).await;
        transaction.commit().await?;
        written += 2;
    }
    Ok(written)
}

/// Commits a second of 32 writers with the doorbell on, as a share of those without, in interleaved pairs.
pub(crate) async fn doorbell(server: &str, pairs: usize, time: Duration) -> Result<()> {
    const WRITERS: usize = 32;
    let (bell, quiet) = (Database::make(server).await?, Database::make(server).await?);
    let mut ratios = Vec::new();
    println!("{:>10}  {:>14}  {:>14}  {:>7}", "pair", "doorbell", "none", "share");
    for pair in 1..=pairs {
        let mut rates = [0.0; 2];
        // Now this one first, now that: whoever follows finds the server busy with the leavings of the other.
        for place in [pair % 2, (pair + 1) % 2] {
            let database = [&bell, &quiet][place];
            let config = Config { doorbell: place == 0, ..Config::new(&database.url) };
            let store = Arc::new(PostgresStore::connect(config).await?);
            rates[place] = commits(&database.url, store, WRITERS, time).await?;
        }
        let ratio = rates[0] / rates[1];
        println!("{pair:>10}  {:>10.0} /s  {:>10.0} /s  {ratio:>7.2}", rates[0], rates[1]);
        ratios.push(ratio);
    }
    crate::median(ratios);
    bell.forget().await?;
    quiet.forget().await
}

/// Commits a second while a relay takes what is written and sleeps when there is nothing.
async fn commits(url: &str, store: Arc<PostgresStore>, writers: usize, time: Duration) -> Result<f64> {
    let stop = Arc::new(AtomicBool::new(false));
    let count = Arc::new(AtomicU64::new(0));
    let relay = relay::Relay::start(
        store,
        vec![relay::Route::new("main", &["*"], Arc::new(crate::nobody::Nobody))],
        relay::Settings::default(),
    );
    let mut tasks = Vec::new();
    for writer in 0..writers {
        let (client, stop, count) = (connect(url).await?, stop.clone(), count.clone());
        tasks.push(tokio::spawn(async move {
            let message = Message::new("orders", vec![b'x'; 350]).key(format!("customer-{writer}"));
            while !stop.load(Ordering::Relaxed) {
                let message = Message { id: message::MessageId::new(), ..message.clone() };
                store::postgres::append(&client, &message).await?;
                count.fetch_add(1, Ordering::Relaxed);
            }
            Ok::<_, anyhow::Error>(())
        }));
    }
    let started = Instant::now();
    tokio::time::sleep(time).await;
    let committed = count.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await??;
    }
    relay.drain().await;
    Ok(committed)
}
