//! PostgreSQL as store: the outbox lives in the application's own database, beside its business data.
//!
//! Every change of a lane's messages happens under the lock of the lane's row, so one lane is worked on by one
//! transaction at a time, whoever that is: a relay, a heartbeat that resolves orphans, or a person. All time
//! arithmetic is in the database's clock. Connections come from a pool and keep no state between transactions, so
//! that a transaction-mode pooler may stand in between; the heartbeat and the doorbell have connections of their own.

mod config;
mod connection;
mod error;
mod migrate;
mod tls;

use std::sync::Arc;

pub use config::Config;
pub use migrate::{MIGRATIONS, Migration, migrate, pending, schema};

use crate::{Error, Sent};
use connection::Connections;

/// A store in a PostgreSQL database. Cheap to clone; clones share the connections.
#[derive(Clone, Debug)]
pub struct PostgresStore {
    connections: Arc<Connections>,
    sent: Sent,
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
        Ok(Self { connections: Arc::new(connections), sent: config.sent })
    }
}
