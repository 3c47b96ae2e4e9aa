//! Connections and transactions.
//!
//! Statements are unnamed and typed: one round trip each, and nothing of them is left on the connection, so a
//! transaction-mode pooler may give the next transaction to another one. Futures that are polled together go out
//! together: a transaction's `BEGIN` travels with its first statements and its `COMMIT` with its last.

use std::fmt;
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, QueueMode, RecyclingMethod, Runtime};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Connection, Row, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::config::{self, Config};
use super::error::Trouble;
use super::tls;
use crate::Error;

/// How long to wait for a connection of the pool.
const WAIT: Duration = Duration::from_secs(10);

/// A statement's parameters, each with its type.
pub(super) type Parameters<'a> = &'a [(&'a (dyn ToSql + Sync), Type)];

/// A connection's other half, which does its work.
pub(super) type Listening = Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>;

/// What a transaction starts with.
///
/// The time limits keep a transaction whose process or network died from holding its lanes for long. What we ask is
/// answered by seeks in indexes: plans that walk through a whole table or index, or are compiled first, are never right,
/// however stale the statistics are.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; \
    SET LOCAL lock_timeout = '10s'; SET LOCAL idle_in_transaction_session_timeout = '30s'; \
    SET LOCAL enable_seqscan = off; SET LOCAL enable_mergejoin = off; SET LOCAL jit = off";

/// For looking at several things as they were at one moment.
const BEGIN_SNAPSHOT: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; \
    SET LOCAL idle_in_transaction_session_timeout = '30s'; \
    SET LOCAL enable_seqscan = off; SET LOCAL enable_mergejoin = off; SET LOCAL jit = off";

/// For looking: every statement still sees what was committed before it.
const BEGIN_READING: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; \
    SET LOCAL idle_in_transaction_session_timeout = '30s'; \
    SET LOCAL enable_seqscan = off; SET LOCAL enable_mergejoin = off; SET LOCAL jit = off";

/// All ways to the database.
pub(super) struct Connections {
    pool: Pool,
    /// The heartbeat's own, one connection: it must not wait behind those who use the pool. Made by the first beat,
    /// on the heartbeat's own runtime.
    heart: Pool,
    config: tokio_postgres::Config,
    tls: MakeRustlsConnect,
}

/// Nothing of a URL is shown.
impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connections").field("pool", &self.pool.status()).finish_non_exhaustive()
    }
}

impl Connections {
    pub(super) fn open(config: &Config) -> Result<Self, Error> {
        let size = config.pool.max(1);
        let (config, trust) = config::read(&config.url)?;
        let tls = tls::connector(&trust)?;
        let pool = |size| {
            let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
            let manager = Manager::from_config(config.clone(), tls.clone(), recycling);
            Pool::builder(manager)
                .max_size(size)
                // The one that was used last knows the tables, and the places in them where it wrote.
                .queue_mode(QueueMode::Lifo)
                .wait_timeout(Some(WAIT))
                .runtime(Runtime::Tokio1)
                .build()
                .map_err(|error| Error::Broken(error.to_string()))
        };
        Ok(Self { pool: pool(size)?, heart: pool(1)?, config, tls })
    }

    /// A connection that is nobody else's, and what it says of itself.
    pub(super) async fn dedicated(&self) -> Result<Client, Trouble> {
        let (client, connection) = self.config.connect(self.tls.clone()).await?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = %super::error::text(&error), "a connection to PostgreSQL ended");
            }
        });
        Ok(client)
    }

    /// A connection whose notifications somebody must wait for.
    pub(super) async fn listening(&self) -> Result<(Client, Listening), Trouble> {
        Ok(self.config.connect(self.tls.clone()).await?)
    }

    /// A transaction on a connection of the pool. Nothing is sent before [`Transaction::begin`].
    pub(super) async fn transaction(&self) -> Result<Transaction, Trouble> {
        Ok(Transaction { client: Some(self.pool.get().await?) })
    }

    /// A transaction on the heartbeat's connection.
    pub(super) async fn heartbeat(&self) -> Result<Transaction, Trouble> {
        Ok(Transaction { client: Some(self.heart.get().await?) })
    }
}

/// A transaction. One that is dropped before its end takes its connection with it: a future that is dropped half-way
/// leaves nothing open for the next user of the connection to trip over.
pub(super) struct Transaction {
    client: Option<Object>,
}

impl Transaction {
    fn client(&self) -> &Client {
        self.client.as_ref().expect("a transaction has its connection until its end")
    }

    /// To be polled before the first statement, which need not wait for it.
    pub(super) async fn begin(&self) -> Result<(), Trouble> {
        Ok(self.client().batch_execute(BEGIN).await?)
    }

    /// Like [`begin`](Self::begin), for looking only.
    pub(super) async fn begin_reading(&self) -> Result<(), Trouble> {
        Ok(self.client().batch_execute(BEGIN_READING).await?)
    }

    /// Like [`begin_reading`](Self::begin_reading), with one snapshot for all statements.
    pub(super) async fn begin_snapshot(&self) -> Result<(), Trouble> {
        Ok(self.client().batch_execute(BEGIN_SNAPSHOT).await?)
    }

    pub(super) async fn query(&self, sql: &str, parameters: Parameters<'_>) -> Result<Vec<Row>, Trouble> {
        Ok(self.client().query_typed(sql, parameters).await?)
    }

    pub(super) async fn one(&self, sql: &str, parameters: Parameters<'_>) -> Result<Row, Trouble> {
        Ok(self.client().query_typed_one(sql, parameters).await?)
    }

    pub(super) async fn execute(&self, sql: &str, parameters: Parameters<'_>) -> Result<u64, Trouble> {
        Ok(self.client().execute_typed(sql, parameters).await?)
    }

    /// Statements without parameters or answers: savepoints, say.
    pub(super) async fn batch(&self, sql: &str) -> Result<(), Trouble> {
        Ok(self.client().batch_execute(sql).await?)
    }

    /// The types that PostgreSQL infers for a statement's parameters, and whether it answers with rows.
    pub(super) async fn shape(&self, sql: &str) -> Result<(Vec<Type>, bool), Trouble> {
        let statement = self.client().prepare(sql).await?;
        Ok((statement.params().to_vec(), !statement.columns().is_empty()))
    }

    /// Commits what went well and undoes what did not.
    pub(super) async fn end<T>(mut self, result: Result<T, Trouble>) -> Result<T, Trouble> {
        let verb = if result.is_ok() { "COMMIT" } else { "ROLLBACK" };
        let ended = self.client().batch_execute(verb).await;
        match (result, ended) {
            (result, Ok(())) => {
                // Only now may the connection be used again.
                drop(self.client.take());
                result
            }
            (Ok(_), Err(error)) => Err(Trouble::at_commit(error)),
            (Err(trouble), Err(_)) => Err(trouble),
        }
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if let Some(client) = self.client.take() {
            drop(Object::take(client));
        }
    }
}

/// How often a transaction that the server undid is tried again before its caller hears of it.
const REPEATS: u32 = 4;

/// Runs a transaction again when the server undid it (a deadlock), it was never seen to its end, or it must look first.
pub(super) async fn repeat<T, F>(transaction: impl Fn() -> F) -> Result<T, Error>
where
    F: Future<Output = Result<T, Trouble>>,
{
    let mut left = REPEATS;
    loop {
        match transaction().await {
            // Once at most: from then on it looks.
            Err(Trouble::Marked) => {}
            Err(trouble) if left > 0 && trouble.may_repeat() => {
                left -= 1;
                // Those who met in a deadlock must not meet again at once.
                let wait = rand::random_range(1..20) * u64::from(REPEATS - left);
                tokio::time::sleep(Duration::from_millis(wait)).await;
            }
            result => return result.map_err(Error::from),
        }
    }
}
