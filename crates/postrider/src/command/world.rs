//! What a configuration stands for: the desk, the topology, the brokers.

use std::path::PathBuf;
use std::sync::Arc;

use admin::{ConsumerView, Desk, RouteView, Topology};
use broker::embedded;
use message::Limits;
use store::sqlite::SqliteStore;

use super::failure::{Exit, Failure};
use crate::config::Config;

/// Opens the configured store, making it if need be.
pub(super) fn open_store(config: &Config) -> Result<SqliteStore, Failure> {
    SqliteStore::open(&config.store.path).map_err(|error| {
        let mut failure = Failure::from(error);
        failure.text.push_str("; store.url or POSTRIDER__STORE__URL names another");
        failure
    })
}

/// A desk on the configured store, which is made if need be.
pub(super) fn make_desk(config: &Config) -> Result<Desk, Failure> {
    Ok(desk(config, Arc::new(open_store(config)?)))
}

/// A desk on the configured store, which must exist: a question should not leave a database behind.
pub(super) fn open_desk(config: &Config) -> Result<Desk, Failure> {
    if !config.store.path.exists() {
        return Err(Failure::new(
            Exit::Unavailable,
            format!(
                "there is no store at {} yet: `postrider serve` makes it, and so does `postrider migrate`; or name \
                 another with --config or POSTRIDER__STORE__URL",
                config.store.path.display()
            ),
        ));
    }
    make_desk(config)
}

/// A desk on `store`.
pub(super) fn desk(config: &Config, store: Arc<dyn store::Store>) -> Desk {
    let limits = Limits { payload: config.producer.body_limit, ..Limits::default() };
    Desk::new(store, Arc::new(topology(config)), limits)
}

/// Routes and consumers, for whoever asks.
pub(super) fn topology(config: &Config) -> Topology {
    let routes = config.routes.iter().map(|(name, route)| RouteView {
        name: name.clone(),
        topics: route.topics.clone(),
        broker: route.broker.clone(),
        semantics: route.semantics,
        order: route.order,
        on_dead: route.on_dead,
        retry: route.retry.clone(),
        why: route.why.clone(),
    });
    let consumers = config.consumers.iter().map(|(name, consumer)| ConsumerView {
        group: name.clone(),
        topics: consumer.topics.clone(),
        broker: consumer.broker.clone(),
        handler: consumer.handler.kind().to_owned(),
        dedup: "sql".to_owned(),
    });
    Topology { routes: routes.collect(), consumers: consumers.collect() }
}

/// How the embedded broker `name` is opened.
pub(super) fn broker_config(config: &Config, name: &str, url: &str) -> Result<embedded::Config, Failure> {
    let folder = config.store.path.parent().map_or_else(PathBuf::new, ToOwned::to_owned);
    // Two brokers without a path of their own are two files.
    let beside =
        folder.join(if name == "main" { "broker.db".to_owned() } else { format!("broker-{name}.db") });
    let mut broker =
        embedded::Config::from_url(url, beside).map_err(|error| Failure::usage(error.to_string()))?;
    if !url.contains("max_payload=") {
        // What the producer's API takes, the broker must take, or it would die on the way.
        broker.max_payload = broker.max_payload.max(config.producer.body_limit);
    }
    Ok(broker)
}
