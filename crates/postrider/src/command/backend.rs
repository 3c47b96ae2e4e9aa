//! The stores that this build knows: opening them, and the shape of each.
//!
//! The one place that tells them apart; everything else sees [`store::Store`].

use std::sync::Arc;

use message::Finding;
use store::Store;

use super::failure::{Exit, Failure};
use crate::config::{Config, Place, redacted};

/// Steps by their numbers and names, whatever else a store keeps of them.
macro_rules! named {
    ($steps:expr) => {
        $steps.iter().map(|step| Step { version: step.version, name: step.name }).collect()
    };
}

/// A step of a schema.
pub(super) struct Step {
    pub(super) version: u32,
    pub(super) name: &'static str,
}

/// An open store, and what is worth saying of it.
pub(super) struct Opened {
    pub(super) store: Arc<dyn Store>,
    /// What it can and cannot promise, in sentences.
    pub(super) promises: Vec<String>,
}

const SQLITE: [&str; 2] = [
    "A message is written in the transaction of the application, if both use this file, and is on disk before it is answered.",
    "The file is on one machine: who loses its disk loses what was not yet sent.",
];

#[cfg(feature = "postgres")]
const POSTGRES: [&str; 2] = [
    "A message is written in the transaction of the application, and is as durable as that.",
    "A failover to a replica that replicates asynchronously loses the last commits of application and outbox alike; \
     what was sent before cannot be called back.",
];

#[cfg(feature = "mysql")]
const MYSQL: [&str; 2] = [
    "A message is written in the transaction of the application, and is as durable as that (innodb_flush_log_at_trx_commit = 1).",
    "A failover to a replica that replicates asynchronously loses the last commits of application and outbox alike; \
     what was sent before cannot be called back.",
];

/// Opens the configured store, making or upgrading its schema if need be.
pub(super) async fn open(config: &Config) -> Result<Opened, Failure> {
    let settings = &config.store;
    let opened: Result<Opened, store::Error> = match &settings.place {
        Place::Sqlite(path) => store::sqlite::SqliteStore::open(path).map(|store| with(store, &SQLITE)),
        #[cfg(feature = "postgres")]
        Place::Postgres => {
            let config = store::postgres::Config {
                sent: settings.sent,
                doorbell: settings.doorbell,
                pool: settings.connections,
                ..store::postgres::Config::new(&settings.url)
            };
            store::postgres::PostgresStore::connect(config).await.map(|store| with(store, &POSTGRES))
        }
        #[cfg(feature = "mysql")]
        Place::Mysql => {
            let config = store::mysql::Config {
                sent: settings.sent,
                pool: settings.connections,
                ..store::mysql::Config::new(&settings.url)
            };
            store::mysql::MysqlStore::connect(config).await.map(|store| with(store, &MYSQL))
        }
        #[cfg(feature = "redis")]
        Place::Redis => {
            redis(config).await.map(|store| Opened { promises: store.promises(), store: Arc::new(store) })
        }
        #[cfg(not(all(feature = "postgres", feature = "mysql", feature = "redis")))]
        other => return Err(absent(other)),
    };
    opened.map_err(|error| {
        let mut failure = Failure::from(error);
        failure.text.push_str("; store.url or POSTRIDER__STORE__URL names another");
        failure
    })
}

fn with(store: impl Store + 'static, promises: &[&str]) -> Opened {
    Opened { store: Arc::new(store), promises: promises.iter().map(|&promise| promise.to_owned()).collect() }
}

/// The store on Redis as configured.
#[cfg(feature = "redis")]
async fn redis(config: &Config) -> Result<store::redis::RedisStore, store::Error> {
    let settings = &config.store;
    store::redis::RedisStore::connect(store::redis::Config {
        prefix: settings.prefix.clone(),
        replicas: settings.replicas,
        accept_loss: settings.accept_loss.then(|| crate::config::ACCEPT_LOSS.to_owned()),
        ..store::redis::Config::new(&settings.url)
    })
    .await
}

/// Whether there is a store yet. A file is only made by those who mean to; a server is there or it is not.
pub(super) fn exists(config: &Config) -> Result<(), Failure> {
    match &config.store.place {
        Place::Sqlite(path) if !path.exists() => Err(Failure::new(
            Exit::Unavailable,
            format!(
                "there is no store at {} yet: `postrider serve` makes it, and so does `postrider migrate`; or name \
                 another with --config or POSTRIDER__STORE__URL",
                path.display()
            ),
        )),
        _ => Ok(()),
    }
}

/// Every step of the configured store's schema. None where nothing needs one.
pub(super) fn steps(config: &Config) -> Result<Vec<Step>, Failure> {
    Ok(match &config.store.place {
        Place::Sqlite(_) => named!(store::sqlite::MIGRATIONS),
        #[cfg(feature = "postgres")]
        Place::Postgres => named!(store::postgres::MIGRATIONS),
        #[cfg(feature = "mysql")]
        Place::Mysql => named!(store::mysql::MIGRATIONS),
        Place::Redis => Vec::new(),
        #[cfg(not(all(feature = "postgres", feature = "mysql")))]
        other => return Err(absent(other)),
    })
}

/// The steps that the configured store has not seen yet. Changes nothing.
pub(super) async fn pending(config: &Config) -> Result<Vec<Step>, Failure> {
    Ok(match &config.store.place {
        Place::Sqlite(path) => named!(
            store::sqlite::pending(path)
                .map_err(|error| Failure::new(Exit::Unavailable, error.to_string()))?
        ),
        #[cfg(feature = "postgres")]
        Place::Postgres => named!(store::postgres::pending(&config.store.url).await?),
        #[cfg(feature = "mysql")]
        Place::Mysql => named!(store::mysql::pending(&config.store.url).await?),
        Place::Redis => Vec::new(),
        #[cfg(not(all(feature = "postgres", feature = "mysql")))]
        other => return Err(absent(other)),
    })
}

/// The whole schema, for those who apply it with a tool of their own.
pub(super) fn schema(place: &Place) -> Result<String, Failure> {
    match place {
        Place::Sqlite(_) => Ok(store::sqlite::schema()),
        #[cfg(feature = "postgres")]
        Place::Postgres => Ok(store::postgres::schema()),
        #[cfg(feature = "mysql")]
        Place::Mysql => Ok(store::mysql::schema()),
        Place::Redis => {
            Err(Failure::usage("Redis has no schema: nothing needs to be made before the first message"))
        }
        #[cfg(not(all(feature = "postgres", feature = "mysql")))]
        other => Err(absent(other)),
    }
}

/// Looks at the configured store. Changes nothing, so its schema must be there.
pub(super) async fn examine(config: &Config) -> Result<Vec<Finding>, Failure> {
    exists(config)?;
    let settings = &config.store;
    Ok(match &settings.place {
        Place::Sqlite(path) => store::sqlite::SqliteStore::open(path)?.examine().await?,
        #[cfg(feature = "postgres")]
        Place::Postgres => {
            let config =
                store::postgres::Config { migrate: false, ..store::postgres::Config::new(&settings.url) };
            store::postgres::PostgresStore::connect(config).await?.examine().await?
        }
        #[cfg(feature = "mysql")]
        Place::Mysql => {
            let config = store::mysql::Config { migrate: false, ..store::mysql::Config::new(&settings.url) };
            store::mysql::MysqlStore::connect(config).await?.examine().await?
        }
        #[cfg(feature = "redis")]
        Place::Redis => redis(config).await?.examine(),
        #[cfg(not(all(feature = "postgres", feature = "mysql", feature = "redis")))]
        other => return Err(absent(other)),
    })
}

/// What a person calls the store.
pub(super) fn name(config: &Config) -> String {
    match &config.store.place {
        Place::Sqlite(path) => path.display().to_string(),
        _ => redacted(&config.store.url),
    }
}

#[cfg(not(all(feature = "postgres", feature = "mysql", feature = "redis")))]
fn absent(place: &Place) -> Failure {
    Failure::usage(format!("this build has no {place:?} store: build with `--features full`"))
}
