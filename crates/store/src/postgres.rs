//! PostgreSQL as store: the outbox lives in the application's own database, beside its business data.
//!
//! Every change of a lane's messages happens under the lock of the lane's row, so one lane is worked on by one
//! transaction at a time, whoever that is: a relay, a heartbeat that resolves orphans, or a person. All time
//! arithmetic is in the database's clock. Connections come from a pool and keep no state between transactions, so
//! that a transaction-mode pooler may stand in between; the heartbeat and the doorbell have connections of their own.

mod acknowledge;
mod amend;
mod append;
mod choose;
mod claim;
mod config;
mod connection;
#[cfg(feature = "diesel")]
pub mod diesel;
mod error;
mod examine;
mod hold;
mod inbox;
mod inspect;
mod lanes;
mod mark;
mod migrate;
mod once;
mod partition;
mod retain;
mod row;
#[cfg(feature = "sea-orm")]
pub mod sea_orm;
mod settle;
#[cfg(feature = "sqlx")]
pub mod sqlx;
mod sweep;
mod tally;
mod tls;
mod versions;
mod wake;

use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use tokio_postgres::Row;

pub use append::{append, append_for};
pub use config::Config;
pub use migrate::{MIGRATIONS, Migration, migrate, pending, schema};
pub use once::{acknowledge, once};
pub use versions::{newer, swap};

use crate::{Error, Sent};
use connection::{Connections, Parameters, repeat};
use inspect::Backlog;
use mark::Marks;

/// A store in a PostgreSQL database. Cheap to clone; clones share the connections.
#[derive(Clone, Debug)]
pub struct PostgresStore {
    connections: Arc<Connections>,
    sent: Sent,
    /// The table is in partitions.
    parted: bool,
    bell: Arc<tokio::sync::Notify>,
    doorbell: Option<Arc<wake::Doorbell>>,
    marks: Arc<Marks>,
    backlog: Arc<Backlog>,
    groups: Arc<inbox::Groups>,
    statements: Arc<inbox::Statements>,
    /// How far retention has looked.
    cleaned: Arc<AtomicI64>,
}

impl PostgresStore {
    /// Connects to the database that `config` names and brings its schema up to date, unless told not to.
    ///
    /// # Errors
    /// When the server is too old, is a replica or read-only, or its schema is missing or from a newer program.
    pub async fn connect(config: Config) -> Result<Self, Error> {
        let connections = Connections::open(&config)?;
        let client = connections.dedicated().await?;
        migrate::check_server(&client).await?;
        migrate::prepare(&client, config.migrate).await?;
        if config.sent == Sent::Partition && config.migrate {
            partition::make(&client).await?;
        }
        if config.doorbell {
            migrate::hang_doorbell(&client, config.migrate).await?;
        }
        Ok(Self {
            connections: Arc::new(connections),
            sent: config.sent,
            parted: partition::is_made(&client).await?,
            bell: Arc::default(),
            doorbell: config.doorbell.then(Arc::default),
            marks: Arc::default(),
            backlog: Arc::default(),
            groups: Arc::default(),
            statements: Arc::default(),
            cleaned: Arc::default(),
        })
    }

    /// A transaction of one statement.
    async fn execute(&self, sql: &str, parameters: Parameters<'_>) -> Result<u64, Error> {
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let (begun, done) = tokio::join!(biased; tx.begin(), tx.execute(sql, parameters));
            tx.end(begun.and(done)).await
        })
        .await
    }

    /// A question of one statement.
    async fn read(&self, sql: &str, parameters: Parameters<'_>) -> Result<Vec<Row>, Error> {
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let (begun, rows) = tokio::join!(biased; tx.begin_snapshot(), tx.query(sql, parameters));
            tx.end(begun.and(rows)).await
        })
        .await
    }
}
