//! MySQL and MariaDB as store: the outbox where the application's data is.
//!
//! Whoever changes the messages of a lane locks that lane's row in `counters` first, so that each lane's logic runs by
//! itself, as it does on SQLite; steps are statements over whole batches, and their number does not grow with the
//! messages. All time is the server's, in UTC.

mod acknowledge;
mod amend;
mod append;
mod candidate;
mod claim;
#[cfg(feature = "diesel")]
pub mod diesel;
mod error;
mod examine;
mod hold;
mod inbox;
mod inspect;
mod lane;
mod lanes;
mod migrate;
mod once;
mod partition;
mod retain;
mod row;
#[cfg(feature = "sea-orm")]
pub mod sea_orm;
mod server;
mod session;
mod settle;
#[cfg(feature = "sqlx")]
pub mod sqlx;
mod tally;
mod versions;
mod wake;

use std::fmt;
use std::sync::Arc;

use mysql_async::{Conn, Opts, Pool};

pub use append::{append, append_for};
pub use migrate::{MIGRATIONS, Migration, migrate, pending, schema};
pub use once::{acknowledge, once};
pub use versions::{newer, swap};

use crate::{Error, Sent};
use error::Trouble;

/// Where a store is, and how it is kept.
#[derive(Clone)]
pub struct Config {
    /// `mysql://user:password@host:3306/database`; `mariadb://` means the same.
    pub url: String,
    /// What becomes of records once they are sent.
    pub sent: Sent,
    /// Connections at most, besides one for the heartbeat.
    pub pool: usize,
    /// Bring the schema up to date when connecting.
    pub migrate: bool,
}

impl Config {
    /// The store at `url`: sent records are kept, up to 8 connections, the schema is brought up to date.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), sent: Sent::Keep, pool: 8, migrate: true }
    }
}

impl fmt::Debug for Config {
    /// Without the URL: a password may be in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { url: _, sent, pool, migrate } = self;
        f.debug_struct("Config")
            .field("sent", sent)
            .field("pool", pool)
            .field("migrate", migrate)
            .finish_non_exhaustive()
    }
}

/// A store in a MySQL or MariaDB database. Cheap to clone; clones share the connections.
#[derive(Clone)]
pub struct MysqlStore {
    pool: Pool,
    options: Opts,
    sent: Sent,
    /// Rows that are deleted count themselves out.
    trigger: bool,
    /// The table refuses an id that is taken. One in partitions cannot.
    unique: bool,
    bell: Arc<tokio::sync::Notify>,
    /// The heartbeat's own connection: it must not wait for one of the pool.
    heart: Arc<tokio::sync::Mutex<Option<Conn>>>,
    /// How large messages have been.
    weight: Arc<claim::Weight>,
    /// The topics that have been seen.
    topics: Arc<candidate::Topics>,
    /// The last count of a long backlog.
    counted: Arc<inspect::Counted>,
    /// How far retention has looked.
    cleaned: Arc<retain::Cleaned>,
}

impl fmt::Debug for MysqlStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MysqlStore").field("sent", &self.sent).finish_non_exhaustive()
    }
}

/// Makes the database ready. Says whether the trigger is there, and whether the table refuses an id that is taken.
async fn prepare(options: &Opts, config: &Config) -> Result<(bool, bool), Trouble> {
    let mut connection = session::connect(options.clone()).await?;
    server::check(&server::ask(&mut connection).await?)?;
    if config.migrate {
        migrate::bring(&mut connection).await?;
    } else {
        migrate::check(&mut connection).await?;
    }
    server::check_tables(&mut connection).await?;
    if config.sent == Sent::Partition {
        partition::make(&mut connection).await?;
    }
    let trigger = migrate::has_trigger(&mut connection).await?;
    let unique = !partition::is_made(&mut connection).await?;
    session::close(connection).await;
    Ok((trigger, unique))
}

impl MysqlStore {
    /// Connects to the store, checks that the server can keep its promises, and brings the schema up to date.
    ///
    /// # Errors
    /// When the server cannot be reached, is too old, a replica or a Galera node, or its schema is from a newer program.
    pub async fn connect(config: Config) -> Result<Self, Error> {
        let options = session::options(&config.url, config.pool)?;
        let (trigger, unique) = session::persist(|| prepare(&options, &config)).await?;
        Ok(Self {
            pool: Pool::new(options.clone()),
            options,
            sent: config.sent,
            trigger,
            unique,
            bell: Arc::default(),
            heart: Arc::default(),
            weight: Arc::default(),
            topics: Arc::default(),
            counted: Arc::default(),
            cleaned: Arc::default(),
        })
    }
}
