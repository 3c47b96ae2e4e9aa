//! Redis as store: messages, leases and the inbox under one key prefix, every change one atomic script.
//!
//! All keys share a hash tag (`{postrider}:…`), so one store lies in one slot and on one node of a cluster. Redis runs
//! one script at a time: what a transaction and its locks are elsewhere, a script is here. Scripts are bounded, so that
//! nobody waits long. Time is the server's own (`TIME`).
//!
//! | key | what |
//! |---|---|
//! | `:m:<seq>` `:b:<seq>` | a message, a hash with a field for each column, and its payload |
//! | `:ids` | id → seq |
//! | `:unsent` `:sent` `:dead` | seqs by status: what lists, counts and retention read |
//! | `:ready:<lanes>:<lane>:<topic>` | seqs that may be claimed; the claim reads nothing else |
//! | `:topics:<lanes>:<lane>` | topics with such |
//! | `:due` | seqs that wait for their next attempt, by when |
//! | `:holds` `:draining` `:held:<topic>:<key>` | keys that are held, and who waits behind |
//! | `:lanes` `:instances` `:batches` `:settings` | leases, relays, what is in flight, the number of lanes |
//! | `:attempts:<seq>` `:acks:<seq>` `:unacked:<group>` | tries in vain, acknowledgements, who still owes one |
//! | `:once` `:once_order` `:audit` `:counters` | idempotency keys, what operators did, totals |
//! | `:in:<group>:…` | the inbox of a group |
//! | `:versions:<scope>` | entity → the version that was applied last |
//!
//! Rust programs send with [`append()`] in their own MULTI or with [`script`]. Everybody else calls a function that the
//! store loads into Redis 7 and newer ([`library`]), alone or in a MULTI; for older servers there is [`send_script`]. After
//! the payload may follow an id, headers, a type and a content type, each of which may be empty:
//!
//! ```sh
//! redis-cli FCALL postrider_send 1 '{postrider}' orders 42 '{"total": 10}'
//! redis-cli FCALL postrider_send 1 '{postrider}' orders 42 '{}' 0190a5c4-6b2e-7d3f-8a4b-5c6d7e8f9a0b '{"traceparent":"00-ab"}' OrderPlaced
//! redis-cli FCALL postrider_once 1 '{postrider}' billing 0190a5c4-6b2e-7d3f-8a4b-5c6d7e8f9a0b
//! redis-cli FCALL postrider_newer 1 '{postrider}' billing price-42 7 HSET '{postrider}:price:42' price 200
//! redis-cli FCALL postrider_swap 1 '{postrider}' billing price-42 7 8 HSET '{postrider}:price:42' price 300
//! ```
//!
//! The first two answer the id. The third marks a message as done by a group: 1 when it was not before, so that a
//! consumer in another language does its work once, in the same MULTI or script. The last two run the command that
//! follows if the version is newer than any that was applied, or if the one before it was applied last.

mod amend;
mod append;
mod claim;
mod config;
mod error;
mod examine;
mod hold;
mod inbox;
mod inspect;
mod lanes;
mod migrate;
mod promise;
mod reply;
mod retain;
mod script;
mod settle;
mod wake;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};

use ::redis::Client;
use ::redis::aio::{ConnectionManager, ConnectionManagerConfig};
use tokio::sync::{Notify, OnceCell};

pub use append::{append, script};
pub use config::Config;
pub use migrate::{library, send_script};

use crate::Error;
use promise::Server;
use retain::Cleaned;

/// A store in Redis. Cheap to clone; clones share connections.
#[derive(Clone)]
pub struct RedisStore {
    client: Client,
    connection: ConnectionManager,
    /// For writes that wait for replicas: nobody who only looks must wait with them. The same one where none do.
    writer: ConnectionManager,
    /// The heartbeat's own connection, made on the runtime of its first beat: a busy runtime must not delay it.
    heart: Arc<OnceCell<ConnectionManager>>,
    bell: Arc<Notify>,
    prefix: Arc<str>,
    replicas: u32,
    server: Arc<Server>,
    /// The topics that were met so far: each turn tells its script how to treat them.
    topics: Arc<Mutex<BTreeSet<String>>>,
    /// How far retention has looked.
    cleaned: Arc<Cleaned>,
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl RedisStore {
    /// Connects, checks that the server can keep what it is given, and makes the store ready if it is new.
    ///
    /// # Errors
    /// When the server is out of reach, is a replica, or may lose messages and the configuration does not accept that.
    pub async fn connect(config: Config) -> Result<Self, Error> {
        let prefix = config.checked_prefix()?;
        let client = config.client()?;
        let connection = client.get_connection_manager_with_config(patience()).await?;
        let server = Server::look(&mut connection.clone()).await?;
        server.check(&config)?;
        let writer = match config.replicas {
            0 => connection.clone(),
            _ => client.get_connection_manager_with_config(patience()).await?,
        };
        let store = Self {
            client,
            connection,
            writer,
            heart: Arc::default(),
            bell: Arc::default(),
            prefix: prefix.into(),
            replicas: config.replicas,
            server: Arc::new(server),
            topics: Arc::default(),
            cleaned: Arc::default(),
        };
        store.prepare().await?;
        Ok(store)
    }

    /// The start of all its keys: what `FCALL postrider_send 1 <prefix> …` names.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// What this server promises and what it does not, one sentence each, from its settings as they are.
    pub fn promises(&self) -> Vec<String> {
        self.server.promises(&self.prefix, self.replicas)
    }

    async fn heart(&self) -> Result<ConnectionManager, Error> {
        let connect = || self.client.get_connection_manager_with_config(patience());
        Ok(self.heart.get_or_try_init(connect).await?.clone())
    }
}

/// How long to wait for Redis: past a pause for its disk, and not so long that nobody hears that it is gone.
fn patience() -> ConnectionManagerConfig {
    use std::time::Duration;
    ConnectionManagerConfig::new()
        .set_connection_timeout(Some(Duration::from_secs(2)))
        .set_response_timeout(Some(script::ANSWER))
        .set_number_of_retries(2)
        .set_max_delay(Duration::from_millis(500))
        // Callers wait in the queue to the socket, not in front of it.
        .set_pipeline_buffer_size(1_024)
}
