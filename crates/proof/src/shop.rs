//! The application: it takes orders, and writes each with its message in one transaction of its own.
//!
//! One file for each store, with the driver that an application would use. The outbox is filled in the application's
//! transaction, the handler writes its effect in the transaction of the mark, and the tables are read as they are:
//! the checker believes no store's own word.

#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod sqlite;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use async_trait::async_trait;
use inbox::Handler;
use message::Message;
use rand::Rng;
use store::{Seq, Store};

/// The topic of all orders.
pub const TOPIC: &str = "orders";

/// An order: the `n`-th of its customer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Order {
    /// Whose; the key of its message.
    pub customer: String,
    /// Rises by one with each order of a customer.
    pub n: u64,
}

impl Order {
    /// What the world should hear of it.
    fn message(&self) -> Result<Message> {
        let note = "x".repeat(rand::rng().random_range(0..300));
        let payload = serde_json::json!({ "n": self.n, "note": note });
        Ok(Message::json(TOPIC, &payload)?.key(&self.customer).kind("OrderPlaced"))
    }
}

/// The name of a customer, such that keys spread over all slots.
pub fn customer(number: u64) -> String {
    format!("customer-{number}")
}

/// A transaction to be.
#[derive(Clone, Debug)]
pub struct Sale {
    /// An order for each of these. One whom another till is serving is left out: nobody waits for a lock.
    pub customers: Vec<String>,
    /// How long it stays open once everything is written.
    pub hold: Hold,
    /// Whether it is kept in the end.
    pub commit: bool,
}

/// What keeps a transaction open.
#[derive(Clone, Copy, Debug)]
pub enum Hold {
    /// It takes its time.
    For(Duration),
    /// Its process is stopped by a signal until somebody lets it go on.
    Stopped,
}

impl Hold {
    async fn wait(self) -> Result<()> {
        match self {
            Self::For(time) if time.is_zero() => Ok(()),
            Self::For(time) => {
                tokio::time::sleep(time).await;
                Ok(())
            }
            Self::Stopped => {
                Ok(rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)?)
            }
        }
    }
}

/// One writer, on a connection of its own.
#[async_trait]
pub trait Till: Send {
    /// Makes a sale in one transaction. Answers the number of orders that were committed.
    async fn sell(&mut self, sale: &Sale) -> Result<u64>;
}

/// How many messages the outbox has, and how many are not where they should be in the end.
#[derive(Clone, Copy, Debug)]
pub struct Outbox {
    /// All of them.
    pub messages: u64,
    /// Those that are not Sent.
    pub unsent: u64,
    /// Those that no consumer acknowledged.
    pub unacknowledged: u64,
}

/// Reads the outbox as a naive relay would: whatever lies behind the last number it saw.
#[async_trait]
pub trait Cursor: Send + Sync {
    /// The numbers after `last` that can be seen now, in order.
    async fn after(&self, last: Seq) -> Result<Vec<Seq>>;
}

/// An application on one kind of store.
#[async_trait]
pub trait Shop: Send + Sync {
    /// The store that its outbox is in.
    fn store(&self) -> Arc<dyn Store>;

    /// Wakes a relay in the same process, as an application does after its commit.
    fn ring(&self);

    /// What its consumer does with a message: an effect that nothing keeps from happening twice but the inbox.
    fn handler(&self) -> Handler;

    /// Makes its tables, with this many customers.
    async fn furnish(&self, customers: u64) -> Result<()>;

    /// A connection to sell with.
    async fn till(&self) -> Result<Box<dyn Till>>;

    /// All orders that were committed.
    async fn orders(&self) -> Result<Vec<Order>>;

    /// What the handler did, in the order in which it did it.
    async fn effects(&self) -> Result<Vec<Order>>;

    /// What became of the messages.
    async fn outbox(&self) -> Result<Outbox>;

    /// How a naive relay reads, where transactions overlap and a low number can commit late.
    fn cursor(&self) -> Option<&dyn Cursor>;

    /// The orders whose messages the proof's group has acknowledged.
    async fn acknowledged(&self) -> Result<Vec<Order>>;

    /// Runs a statement (on Redis, a script) that does damage: the checker has to find it.
    async fn tamper(&self, statement: &str) -> Result<()>;
}

/// Where a shop's database is. The URL may hold a password, so there is no way to print it.
#[derive(Clone)]
pub struct Address {
    /// The URL of the server; `sqlite:` for a file.
    pub store: String,
    /// The database, the prefix of all keys, or the file.
    pub name: String,
}

impl Address {
    /// The kind of store: the URL's scheme.
    pub fn kind(&self) -> &str {
        self.store.split(':').next().unwrap_or_default()
    }

    /// Makes the empty database.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub async fn create(&self) -> Result<()> {
        match self.kind() {
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => postgres::create(self).await,
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => mysql::create(self).await,
            _ => Ok(()),
        }
    }

    /// Removes the database with all that is in it.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub async fn remove(&self) -> Result<()> {
        match self.kind() {
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => postgres::remove(self).await,
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => mysql::remove(self).await,
            #[cfg(feature = "redis")]
            "redis" | "rediss" => redis::remove(self).await,
            _ => Ok(()),
        }
    }

    /// Opens the shop, with its store.
    ///
    /// # Errors
    /// When the store cannot be used, or this build does not know it.
    pub async fn open(&self) -> Result<Arc<dyn Shop>> {
        Ok(match self.kind() {
            "sqlite" => Arc::new(sqlite::SqliteShop::open(self)?),
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => Arc::new(postgres::PostgresShop::open(self).await?),
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => Arc::new(mysql::MysqlShop::open(self).await?),
            #[cfg(feature = "redis")]
            "redis" | "rediss" => Arc::new(redis::RedisShop::open(self).await?),
            other => bail!(
                "there is no proof on `{other}` in this build: give --store a URL that begins with sqlite:, \
                 postgres://, mysql:// or redis://, and build with that feature"
            ),
        })
    }

    /// The server's URL with this database in it.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    fn url(&self) -> String {
        let (rest, parameters) = match self.store.split_once('?') {
            Some((rest, parameters)) => (rest, format!("?{parameters}")),
            None => (&*self.store, String::new()),
        };
        let authority = rest.find("://").map_or(0, |colon| colon + 3);
        let end = rest[authority..].find('/').map_or(rest.len(), |slash| authority + slash);
        format!("{}/{}{parameters}", &rest[..end], self.name)
    }
}

#[cfg(all(test, any(feature = "postgres", feature = "mysql")))]
mod tests {
    use super::*;

    #[test]
    fn the_database_takes_the_place_of_the_urls_own() {
        let cases = [
            ("postgres://u:p@host:1", "postgres://u:p@host:1/fresh"),
            ("postgres://u:p@host:1/", "postgres://u:p@host:1/fresh"),
            ("postgres://u@host/postgres?sslmode=disable", "postgres://u@host/fresh?sslmode=disable"),
            ("mysql://root@127.0.0.1:3306/a", "mysql://root@127.0.0.1:3306/fresh"),
        ];
        for (store, expected) in cases {
            let address = Address { store: store.to_owned(), name: "fresh".to_owned() };
            assert_eq!(address.url(), expected);
        }
    }
}
