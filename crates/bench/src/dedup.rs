//! What recognising duplicates costs: a consumer that remembers nothing, beside the same one with each kind of memory.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use async_trait::async_trait;
use broker::{Outcome, Outgoing, Publisher, embedded};
use clap::ValueEnum;
use futures::future::try_join_all;
use inbox::{Consumer, Group, Handler};
use message::{Message, MessageId};
use store::hybrid::Hybrid;
use store::redis::RedisStore;
use store::{
    Arrival, Error, Forgetful, Handled, Inbox, InboxCounts, InboxRules, Page, Paged, Parked, Processed,
    Receipt, Remembered, Reservation, Work as Job,
};
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::pool;
use crate::postgres::{Database, connect};
use crate::{Size, arrow};

/// Connections of the application.
pub(crate) const CONNECTIONS: usize = 16;

/// Messages in a transaction of the store's at least, and transactions side by side at most.
const SHARE: usize = 1_000;
const ABREAST: usize = 4;

/// What the handler does with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Work {
    /// It writes a row: the least that there is to do.
    Row,
    /// It reads the balance of an account, takes a hundred from it and writes a row, in a transaction.
    Balance,
}

/// What the handler is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Beside {
    /// A closure with transactions of its own.
    Closure,
    /// A closure in a transaction that makes the marks too.
    Transactional,
    /// A statement in the transaction of the marks.
    Sql,
}

/// Where the servers are.
#[derive(Clone, Copy)]
pub(crate) struct Servers<'a> {
    pub(crate) postgres: &'a str,
    pub(crate) redis: &'a str,
}

pub(crate) const EFFECT: &str = "INSERT INTO effects (message_id, key) VALUES ($1, $2)";
/// The same as a statement of the settings, and as one that pays.
const STATEMENT: &str = "INSERT INTO effects (message_id, key) VALUES (:id, :key)";
const PAYMENT: &str = "WITH paid AS (UPDATE accounts SET balance = balance - 100 WHERE key = :key RETURNING key) \
     INSERT INTO effects (message_id, key) SELECT :id, key FROM paid";
pub(crate) const READ: &str = "SELECT balance FROM accounts WHERE key = $1 FOR UPDATE";
pub(crate) const PAY: &str = "UPDATE accounts SET balance = $2 WHERE key = $1";

/// Where a consumer remembers, and what works beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Nowhere: the handler has a connection of its own.
    None,
    Sql,
    Redis,
    Hybrid,
    /// Nowhere: the handler has a pool of its own.
    PoolWithout,
    /// In the transactions of the handler's pool.
    PoolSql,
    PoolHybrid,
    /// Nowhere: the statement of the handler, many messages in a transaction.
    TogetherWithout,
    /// The same, and PostgreSQL goes from message to message by itself, as it does for the store.
    LoopWithout,
    /// In the transaction of the handler's statement.
    TogetherSql,
    TogetherHybrid,
}

impl Kind {
    /// Each beside the first, which does the same work in the same way and remembers nothing.
    const APART: [Self; 4] = [Self::None, Self::Sql, Self::Redis, Self::Hybrid];
    const POOL: [Self; 3] = [Self::PoolWithout, Self::PoolSql, Self::PoolHybrid];
    const TOGETHER: [Self; 4] =
        [Self::LoopWithout, Self::TogetherSql, Self::TogetherHybrid, Self::TogetherWithout];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none, closure",
            Self::Sql => "sql, closure",
            Self::Redis => "redis, closure",
            Self::Hybrid => "hybrid, closure",
            Self::PoolWithout => "none, pool",
            Self::PoolSql => "sql, pool",
            Self::PoolHybrid => "hybrid, pool",
            Self::TogetherWithout => "none, sql",
            Self::LoopWithout => "none, loop",
            Self::TogetherSql => "sql, sql",
            Self::TogetherHybrid => "hybrid, sql",
        })
    }
}

/// Runs each kind `rounds` times, in turns and every other round backwards, and prints the medians.
pub(crate) async fn run(
    servers: Servers<'_>,
    size: Size,
    rounds: usize,
    workers: usize,
    work: Work,
    handler: Option<Beside>,
) -> Result<()> {
    let scenarios = [
        (Beside::Closure, &Kind::APART[..]),
        (Beside::Transactional, &Kind::POOL),
        (Beside::Sql, &Kind::TOGETHER),
    ];
    for (_, kinds) in scenarios.into_iter().filter(|(beside, _)| handler.is_none_or(|only| only == *beside)) {
        let mut rates: Vec<Vec<f64>> = vec![Vec::new(); kinds.len()];
        for round in 1..=rounds {
            let mut order: Vec<_> = kinds.iter().zip(&mut rates).collect();
            if round.is_multiple_of(2) {
                order.reverse();
            }
            for (kind, rates) in order {
                let (took, calls) = consume(*kind, servers, size, workers, work).await?;
                let rate = size.messages as f64 / took.as_secs_f64();
                println!("round {round}  {kind:<16} {rate:>9.0} /s{calls}");
                rates.push(rate);
            }
        }
        println!("\n{:<16}  {:>12}  {:>7}", "dedup, handler", "throughput", "share");
        for (kind, with) in kinds.iter().zip(&rates) {
            let shares = with.iter().zip(&rates[0]).map(|(with, without)| with / without);
            println!("{kind:<16}  {:>9.0} /s  {:>7.2}", median(with.clone()), median(shares.collect()));
        }
        println!();
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The time from the start of a consumer until it has done all that waits in its broker, and what it asked its memory.
async fn consume(
    kind: Kind,
    servers: Servers<'_>,
    size: Size,
    workers: usize,
    work: Work,
) -> Result<(Duration, String)> {
    let folder = tempfile::tempdir()?;
    let broker = embedded::Broker::open(embedded::Config::new(folder.path().join("broker.db")))?;
    fill(&broker, size).await?;
    let database = Database::make(servers.postgres).await?;
    let application = connect(&database.url).await?;
    application
        .batch_execute(
            "CREATE TABLE effects (position bigserial PRIMARY KEY, message_id uuid, key text);
             CREATE TABLE accounts (key text PRIMARY KEY, balance bigint NOT NULL) WITH (fillfactor = 50)",
        )
        .await?;
    for key in 0..size.keys {
        let key = arrow::message(size, key).key;
        application.execute("INSERT INTO accounts VALUES ($1, 1000000000)", &[&key]).await?;
    }
    let rules = InboxRules { acknowledge: false, ..InboxRules::default() };
    let inbox = memory(kind, &database, servers.redis, work).await?;
    let group = Group::new("bench", inbox, handler(kind, &database, work).await?, rules).concurrency(workers);
    let group = Arc::new(group);
    let started = Instant::now();
    let consumer = Consumer::new(Arc::clone(&group), Arc::new(broker), vec!["orders".to_owned()]).start();
    while consumer.status().done < size.messages as u64 {
        ensure!(consumer.status().lost == 0, "the handler failed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let took = started.elapsed();
    consumer.drain().await;
    let effects: i64 = application.query_one("SELECT count(*) FROM effects", &[]).await?.try_get(0)?;
    ensure!(effects == size.messages as i64, "{effects} effects of {} messages", size.messages);
    drop(application);
    database.forget().await?;
    for keys in ["{bench}:*", "postrider:seen:*:bench:*"] {
        sweep(servers.redis, keys).await?;
    }
    let calls = group.deduplication().into_iter().map(|(step, times)| {
        let calls: u64 = times.counts.iter().sum();
        format!("  {step}: {calls} calls of {:.1?}", times.sum / u32::try_from(calls.max(1)).unwrap_or(1))
    });
    Ok((took, calls.collect()))
}

/// Removes what a run has left in Redis.
async fn sweep(redis: &str, keys: &str) -> Result<()> {
    let mut connection = redis::Client::open(redis)?.get_multiplexed_async_connection().await?;
    let mut cursor = 0_u64;
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(keys).arg("COUNT").arg(10_000);
        let found: Vec<Vec<u8>>;
        (cursor, found) = scan.query_async(&mut connection).await?;
        if !found.is_empty() {
            redis::cmd("UNLINK").arg(found).exec_async(&mut connection).await?;
        }
        if cursor == 0 {
            return Ok(());
        }
    }
}

/// Messages that wait in the broker.
async fn fill(broker: &embedded::Broker, size: Size) -> Result<()> {
    let messages: Vec<_> = (0..size.messages)
        .map(|number| Outgoing::new(arrow::message(size, number), number as i64 + 1))
        .collect();
    for batch in messages.chunks(1_000) {
        let outcomes = broker.publish(batch.to_vec()).await;
        ensure!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    }
    Ok(())
}

async fn memory(kind: Kind, database: &Database, redis: &str, work: Work) -> Result<Arc<dyn Inbox>> {
    Ok(match kind {
        Kind::None | Kind::PoolWithout => Arc::new(Forgetful::default()),
        Kind::TogetherWithout => {
            // Numbered as the store does it, with the types that it finds.
            let statement = statement(work).replace(":key", "$2").replace(":id", "$1::uuid");
            Arc::new(Nothing::Statement(connect(&database.url).await?, statement))
        }
        Kind::LoopWithout => {
            let statement = statement(work).replace(":key", "v_key").replace(":id", "v_id");
            let clients = try_join_all((0..ABREAST).map(|_| connect(&database.url))).await?;
            Arc::new(Nothing::Block(clients, format!("{BLOCK}{statement}; END LOOP; END $$")))
        }
        Kind::Sql | Kind::PoolSql | Kind::TogetherSql => database.open().await?,
        Kind::Redis => {
            let prefix = "{bench}".to_owned();
            let config = store::redis::Config { prefix, ..store::redis::Config::new(redis) };
            Arc::new(RedisStore::connect(config).await?)
        }
        Kind::Hybrid | Kind::PoolHybrid | Kind::TogetherHybrid => {
            let config = store::hybrid::Config::new(redis, Uuid::new_v4().to_string());
            Arc::new(Hybrid::new(database.open().await?, &config)?)
        }
    })
}

/// The same work for all. Apart from the memory, as an application does it by itself; together with it, as a statement
/// of the settings.
async fn handler(kind: Kind, database: &Database, work: Work) -> Result<Handler> {
    match kind {
        Kind::PoolWithout => return pool::alone(&database.url, work).await,
        Kind::PoolSql | Kind::PoolHybrid => return pool::transactional(&database.url, work).await,
        _ if Kind::TOGETHER.contains(&kind) => return Ok(Handler::Sql(statement(work).to_owned())),
        _ => {}
    }
    let mut workers = Vec::with_capacity(CONNECTIONS);
    for _ in 0..CONNECTIONS {
        let client = connect(&database.url).await?;
        let (read, pay, effect) =
            (client.prepare(READ).await?, client.prepare(PAY).await?, client.prepare(EFFECT).await?);
        workers.push(tokio::sync::Mutex::new((client, read, pay, effect)));
    }
    let (workers, next) = (Arc::new(workers), Arc::new(AtomicUsize::new(0)));
    Ok(Handler::closure(move |message: Message| {
        let (workers, next) = (Arc::clone(&workers), next.fetch_add(1, Ordering::Relaxed));
        async move {
            let mut worker = workers[next % CONNECTIONS].lock().await;
            let (client, read, pay, effect) = &mut *worker;
            if work == Work::Row {
                return client.execute(&*effect, &[&message.id.0, &message.key]).await.map(drop);
            }
            let transaction = client.transaction().await?;
            let balance: i64 = transaction.query_one(&*read, &[&message.key]).await?.try_get(0)?;
            transaction.execute(&*pay, &[&message.key, &(balance - 100)]).await?;
            transaction.execute(&*effect, &[&message.id.0, &message.key]).await?;
            transaction.commit().await
        }
    }))
}

/// The work as a statement of the settings.
fn statement(work: Work) -> &'static str {
    match work {
        Work::Row => STATEMENT,
        Work::Balance => PAYMENT,
    }
}

/// Takes ids and keys from a cursor, which the store has for the same purpose.
const CURSOR: &str = "DECLARE messages CURSOR FOR SELECT $1::uuid[], $2::text[]";
const BLOCK: &str = "DO $$ DECLARE messages refcursor := 'messages'; ids uuid[]; keys text[]; v_id uuid; v_key text; \
     BEGIN FETCH messages INTO ids, keys; CLOSE messages; FOR v_id, v_key IN SELECT unnest(ids), unnest(keys) LOOP ";

/// An inbox that remembers nothing and does the work of a statement, many messages in a transaction.
enum Nothing {
    /// A statement for each message.
    Statement(Client, String),
    /// A block for all of them, on as many connections as the store uses.
    Block(Vec<Client>, String),
}

impl Nothing {
    async fn work(&self, arrivals: &[Arrival]) -> Result<(), tokio_postgres::Error> {
        match self {
            Self::Statement(client, statement) => {
                client.batch_execute("BEGIN").await?;
                let statement = client.prepare(statement).await?;
                let rows = arrivals.iter().map(|arrival| async {
                    client.execute(&statement, &[&arrival.message.id.0, &arrival.message.key]).await
                });
                // All on their way before the first answer.
                try_join_all(rows).await?;
                client.batch_execute("COMMIT").await
            }
            Self::Block(clients, block) => {
                let count = (arrivals.len() / SHARE).clamp(1, clients.len());
                let mut shares = vec![Vec::new(); count];
                for arrival in arrivals {
                    let mut hash = DefaultHasher::new();
                    arrival.message.key.hash(&mut hash);
                    shares[(hash.finish() % count as u64) as usize].push(arrival);
                }
                let shares =
                    clients.iter().zip(&shares).map(|(client, share)| run_block(client, block, share));
                try_join_all(shares).await.map(drop)
            }
        }
    }
}

/// Does the work of these in one transaction.
async fn run_block(client: &Client, block: &str, arrivals: &[&Arrival]) -> Result<(), tokio_postgres::Error> {
    client.batch_execute("BEGIN").await?;
    for part in arrivals.chunks(1_000) {
        let ids: Vec<Uuid> = part.iter().map(|arrival| arrival.message.id.0).collect();
        let keys: Vec<_> = part.iter().map(|arrival| arrival.message.key.as_deref()).collect();
        let values: [(&(dyn ToSql + Sync), Type); 2] = [(&ids, Type::UUID_ARRAY), (&keys, Type::TEXT_ARRAY)];
        let (opened, done) =
            tokio::join!(biased; client.execute_typed(CURSOR, &values), client.batch_execute(block));
        opened?;
        done?;
    }
    client.batch_execute("COMMIT").await
}

#[async_trait]
impl Inbox for Nothing {
    async fn check(&self, _: &Job) -> Result<(), Error> {
        Ok(())
    }

    async fn process(
        &self,
        _: &str,
        arrivals: Vec<Arrival>,
        _: &Job,
        _: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        self.work(&arrivals).await.map_err(|error| Error::Broken(error.to_string()))?;
        Ok(vec![Receipt::Done; arrivals.len()])
    }

    async fn reserve(
        &self,
        _: &str,
        _: Vec<Arrival>,
        _: Duration,
        _: &InboxRules,
    ) -> Result<Vec<Reservation>, Error> {
        Err(elsewhere())
    }

    async fn conclude(
        &self,
        _: &str,
        _: Vec<(Arrival, Uuid, Handled)>,
        _: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        Err(elsewhere())
    }

    async fn due(&self, _: &str, _: usize) -> Result<Vec<Arrival>, Error> {
        Ok(Vec::new())
    }

    async fn processed(&self, _: &str, _: Page) -> Result<Paged<Processed>, Error> {
        Ok(Paged { items: Vec::new(), next: None })
    }

    async fn parked(&self, _: &str, _: Page) -> Result<Paged<Parked>, Error> {
        Ok(Paged { items: Vec::new(), next: None })
    }

    async fn unpark(&self, _: &str, _: MessageId, _: &str) -> Result<(), Error> {
        Ok(())
    }

    async fn drop_parked(&self, _: &str, _: MessageId, _: &str) -> Result<(), Error> {
        Ok(())
    }

    async fn inbox_counts(&self, _: &str) -> Result<InboxCounts, Error> {
        Ok(InboxCounts::default())
    }

    async fn remembered(&self, _: &str) -> Result<Remembered, Error> {
        Ok(Remembered::default())
    }

    async fn forget_ids(&self, _: &str, _: Duration) -> Result<u64, Error> {
        Ok(0)
    }
}

/// A statement is all that is done here.
fn elsewhere() -> Error {
    Error::Refused("a handler that works elsewhere has another inbox".to_owned())
}
