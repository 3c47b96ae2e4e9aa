//! What a configuration stands for: the desk, the topology, the brokers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use admin::{ConsumerView, Desk, RouteView, Topology};
use broker::{Abilities, Connected, Surroundings, Unopened};
use message::{Limits, Semantics};

use super::failure::{Exit, Failure};
use super::inboxes::Inboxes;
use super::{backend, inboxes};
use crate::config::{Broker, Config, Place};

/// A desk on the configured store, which is made if need be.
pub(super) async fn make_desk(config: &Config) -> Result<Desk, Failure> {
    let store = backend::open(config).await?.store;
    let inboxes = inboxes::open(config, &store).await?;
    Ok(desk(config, store, inboxes))
}

/// A desk on the configured store, which must exist: a question should not leave a database behind.
pub(super) async fn open_desk(config: &Config) -> Result<Desk, Failure> {
    backend::exists(config)?;
    make_desk(config).await
}

/// A desk on `store`, and on what groups remember elsewhere.
pub(super) fn desk(config: &Config, store: Arc<dyn store::Store>, inboxes: Inboxes) -> Desk {
    let limits = Limits { payload: config.producer.body_limit, ..Limits::default() };
    Desk::new(store, Arc::new(topology(config)), limits)
        .with_inboxes(inboxes)
        .with_secrets(config.producer.acknowledge_secrets.clone())
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
        semantics: consumer.semantics,
        handler: consumer.handler.kind().to_owned(),
        dedup: match consumer.semantics {
            Semantics::None | Semantics::BestEffort => "none".to_owned(),
            Semantics::ExactlyOnce => "offsets".to_owned(),
            _ => consumer.dedup.word().to_owned(),
        },
        // What is sent again, such a group takes for another message.
        keep_ids: match consumer.semantics.leaves_marks() {
            true => consumer.keep_ids,
            false => Duration::ZERO,
        },
    });
    Topology { routes: routes.collect(), consumers: consumers.collect() }
}

/// Opens every broker of the configuration. None need be there yet.
pub(super) fn brokers(config: &Config) -> Result<BTreeMap<String, Connected>, Failure> {
    of_each(config, broker::open)
}

/// What can be had of every broker of the configuration; none is opened.
pub(super) fn abilities(config: &Config) -> Result<BTreeMap<String, Abilities>, Failure> {
    of_each(config, broker::abilities)
}

fn of_each<T>(
    config: &Config,
    get: fn(&str, &Surroundings) -> Result<T, Unopened>,
) -> Result<BTreeMap<String, T>, Failure> {
    let get = |(name, broker): (&String, &Broker)| match get(&broker.url, &surroundings(config, name)) {
        Ok(got) => Ok((name.clone(), got)),
        Err(Unopened::Url(error)) => Err(Failure::usage(format!("brokers.{name}.url: {error}"))),
        Err(Unopened::Broken(error)) => {
            Err(Failure::new(Exit::Unavailable, format!("broker {name}: {error}")))
        }
    };
    config.brokers.iter().map(get).collect()
}

fn surroundings(config: &Config, name: &str) -> Surroundings {
    let folder = match &config.store.place {
        Place::Sqlite(path) => path.parent().map_or_else(PathBuf::new, ToOwned::to_owned),
        _ => PathBuf::from("postrider-data"),
    };
    // Two brokers without a path of their own are two files.
    let file = if name == "main" { "broker.db".to_owned() } else { format!("broker-{name}.db") };
    Surroundings { file: folder.join(file), max_payload: config.producer.body_limit }
}
