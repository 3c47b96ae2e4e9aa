//! The parts that a configuration asks for, built and taken apart again.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use admin::{Contract, Desk};
use broker::{Connected, Publisher, Subscriber};
use inbox::{Acknowledge, CommandHandler, Group, HttpHandler, Maker, Transform};
use message::{Message, OnDead, Order, Semantics};
use server::{Hearing, listen};
use store::{Inbox, InboxRules, Store, Work};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::super::failure::Failure;
use super::super::inboxes::Inboxes;
use super::super::world;
use super::flow::Flows;
use super::health::Pulse;
use crate::config::{AcknowledgeTo, Config, Consumer, Handler};

/// Open brokers by name, and how it goes to hear acknowledgements from one of them.
#[derive(Clone, Default)]
pub(super) struct Brokers {
    pub(super) open: BTreeMap<String, Connected>,
    pub(super) hearing: Option<Arc<Hearing>>,
}

impl Brokers {
    /// None.
    pub(super) fn new() -> Self {
        Self::default()
    }
}

impl Deref for Brokers {
    type Target = BTreeMap<String, Connected>;

    fn deref(&self) -> &Self::Target {
        &self.open
    }
}

/// What runs in this process.
#[derive(Default)]
pub(super) struct Parts {
    pub(super) listeners: Vec<JoinHandle<()>>,
    pub(super) express: Option<Arc<relay::Direct>>,
    pub(super) consumers: Vec<(Arc<Group>, inbox::Running)>,
    /// Groups whose work is messages, by name.
    pub(super) transforms: Vec<(String, inbox::Running)>,
    pub(super) relay: Option<relay::Running>,
    pub(super) cleaner: Option<JoinHandle<()>>,
    pub(super) flows: Option<Arc<Flows>>,
    pub(super) watchers: Vec<JoinHandle<()>>,
}

/// The way past the store, as the desk knows it.
struct Express(Arc<relay::Direct>);

impl admin::Express for Express {
    fn send(&self, route: &str, message: Message) -> Result<(), String> {
        self.0.send(route, message).map_err(|reason| reason.to_string())
    }
}

impl Parts {
    /// The desk with the way past the store, if there is one.
    pub(super) fn desk(&self, desk: Desk) -> Desk {
        match &self.express {
            Some(direct) => desk.with_express(Arc::new(Express(Arc::clone(direct)))),
            None => desk,
        }
    }

    /// Stops everything, finishing what is in hand.
    pub(super) async fn drain(self) {
        for listener in self.listeners {
            // A listener that panicked has nothing left to finish.
            let _ = listener.await;
        }
        if let Some(express) = self.express {
            express.drain(relay::Settings::default().drain).await;
        }
        // Together: each may have to wait for a handler of its own.
        let consumers = self.consumers.into_iter().map(|(_, consumer)| consumer);
        let consumers = consumers.chain(self.transforms.into_iter().map(|(_, transform)| transform));
        let consumers: Vec<_> = consumers.map(|consumer| tokio::spawn(consumer.drain())).collect();
        for consumer in consumers {
            let _ = consumer.await;
        }
        self.watchers.iter().for_each(JoinHandle::abort);
        if let Some(cleaner) = self.cleaner {
            cleaner.abort();
        }
        if let Some(relay) = self.relay {
            relay.drain().await;
        }
    }
}

/// Opens every broker of the configuration.
pub(super) fn brokers(config: &Config) -> Result<Brokers, Failure> {
    let open = world::brokers(config)?;
    let heard = config.producer.acknowledgements.as_ref();
    let hearing = heard.map(|heard| Arc::new(Hearing::new(&heard.topic, &heard.group)));
    Ok(Brokers { open, hearing })
}

fn broker_of<'a>(brokers: &'a Brokers, name: &str) -> Result<&'a Connected, Failure> {
    brokers.get(name).ok_or_else(|| Failure::usage(format!("there is no broker `{name}`")))
}

fn publisher_of(brokers: &Brokers, name: &str) -> Result<Arc<dyn Publisher>, Failure> {
    Ok(broker_of(brokers, name)?.publisher.clone())
}

fn subscriber_of(brokers: &Brokers, name: &str) -> Result<Arc<dyn Subscriber>, Failure> {
    let subscriber = broker_of(brokers, name)?.subscriber.clone();
    subscriber.ok_or_else(|| Failure::usage(format!("nothing can be received from the broker `{name}`")))
}

/// All routes, and what they promise.
fn routes(config: &Config, brokers: &Brokers) -> Result<Vec<(relay::Route, Semantics)>, Failure> {
    let secrets = config.producer.acknowledge_secrets.clone().map(Arc::new);
    let mut once: BTreeMap<&str, Arc<dyn Publisher>> = BTreeMap::new();
    let mut routes = Vec::new();
    for (name, route) in &config.routes {
        let publisher = publisher_of(brokers, &route.broker)?;
        let settle = relay::Settle::keeping(route.semantics, &*publisher);
        let recognised = relay::Route::rests_on(route.semantics, &*publisher, &route.retry);
        let publisher = match route.semantics.sends_again() {
            true => publisher,
            // One for all routes of a broker, which has clients of its own.
            false => {
                Arc::clone(once.entry(&route.broker).or_insert_with(|| publisher.once().unwrap_or(publisher)))
            }
        };
        let route_of = relay::Route {
            name: name.clone(),
            topics: route.topics.clone(),
            broker: route.broker.clone(),
            publisher,
            format: route.format.clone(),
            order: route.order,
            on_dead: route.on_dead,
            retry: route.retry.clone(),
            settle,
            recognised,
            copy_to: route.copy_to.clone(),
            secrets: secrets.clone(),
        };
        routes.push((route_of, route.semantics));
    }
    Ok(routes)
}

/// The way past the store, if some route takes it.
pub(super) fn express(config: &Config, brokers: &Brokers) -> Result<Option<relay::Direct>, Failure> {
    let attempt = |semantics| match semantics {
        Semantics::None => relay::Try::Unconfirmed,
        _ => relay::Try::Confirmed,
    };
    let routes = routes(config, brokers)?.into_iter();
    let routes: Vec<_> = routes
        .filter(|(_, semantics)| semantics.bypasses_store())
        .map(|(route, semantics)| (route, attempt(semantics)))
        .collect();
    Ok(if routes.is_empty() { None } else { Some(relay::Direct::start(routes)) })
}

/// Starts the relay.
pub(super) fn relay(
    config: &Config,
    store: Arc<dyn Store>,
    brokers: &Brokers,
) -> Result<relay::Running, Failure> {
    let routes = routes(config, brokers)?.into_iter().map(|(route, _)| route).collect();
    let topology = Arc::new(world::topology(config));
    let settings = relay::Settings {
        lease: config.relay.lease,
        batch: config.relay.batch,
        bytes: config.relay.bytes,
        poll: config.relay.poll,
        groups: Arc::new(move |topic| topology.groups_of(topic)),
        patience: patience(config),
        claims: claims(config)?,
        ..relay::Settings::default()
    };
    Ok(relay::Relay::start(store, routes, settings))
}

/// How long the groups may take.
fn patience(config: &Config) -> Vec<relay::Patience> {
    let groups = config.consumers.iter().filter_map(|(name, consumer)| Some((name, consumer.acknowledge?)));
    let patience = groups.map(|(name, acknowledge)| relay::Patience {
        group: name.clone(),
        timeout: acknowledge.timeout,
        check_every: acknowledge.check_every,
        max_redeliveries: acknowledge.max_redeliveries,
        remembered: remembered(config, name),
    });
    patience.collect()
}

/// How long every group that hears of what `group` hears of remembers it, of those that promise to.
fn remembered(config: &Config, group: &str) -> Duration {
    let topics = config.consumers.get(group).map(|consumer| &consumer.topics);
    let hears =
        |consumer: &&Consumer| topics.into_iter().flatten().any(|topic| consumer.topics.contains(topic));
    let promise = |consumer: &&Consumer| !consumer.semantics.bypasses_store();
    config
        .consumers
        .values()
        .filter(promise)
        .filter(hears)
        .map(|consumer| consumer.keep_ids)
        .min()
        .unwrap_or_default()
}

/// Locks and counters in Redis, if the relay shall have them.
fn claims(config: &Config) -> Result<Option<Arc<dyn relay::claims::Claims>>, Failure> {
    #[cfg(feature = "redis")]
    if let Some(claims) = &config.relay.claims {
        let settings = relay::claims::redis::Config {
            url: claims.url.clone(),
            prefix: claims.prefix.clone(),
            ttl: claims.ttl,
            keep: claims.keep,
        };
        return Ok(Some(Arc::new(relay::claims::redis::RedisClaims::new(&settings)?)));
    }
    // Without Redis in the build the configuration was refused.
    let _ = config;
    Ok(None)
}

/// Whether the work of a group is messages.
fn transforms(consumer: &Consumer) -> bool {
    consumer.semantics == Semantics::ExactlyOnce
}

/// Starts every group whose work is messages.
pub(super) fn transforming(
    config: &Config,
    brokers: &Brokers,
) -> Result<Vec<(String, inbox::Running)>, Failure> {
    let mut running = Vec::new();
    for (name, consumer) in config.consumers.iter().filter(|(_, consumer)| transforms(consumer)) {
        let maker = match &consumer.handler {
            Handler::Http { url, timeout } => Maker::http(http(name, url, *timeout)?),
            Handler::Command { line, timeout } => Maker::command(command(line, *timeout)?),
            other => {
                return Err(Failure::usage(format!("consumers.{name}.handler: {} makes none", other.kind())));
            }
        };
        let together = subscriber_of(brokers, &consumer.broker)?.together();
        let together = together
            .ok_or_else(|| Failure::usage(format!("the broker `{}` has no transactions", consumer.broker)))?;
        let group = Transform::new(name, maker, consumer.retry.clone());
        running.push((name.clone(), group.start(together, consumer.topics.clone())));
    }
    Ok(running)
}

fn http(group: &str, url: &str, timeout: Duration) -> Result<HttpHandler, Failure> {
    let wrong = |error: inbox::BadHandler| Failure::usage(format!("consumers.{group}.handler: {error}"));
    Ok(HttpHandler::new(url).map_err(wrong)?.timeout(timeout))
}

fn command(line: &[String], timeout: Duration) -> Result<CommandHandler, Failure> {
    let (program, arguments) =
        line.split_first().ok_or_else(|| Failure::usage("a command without a program"))?;
    Ok(CommandHandler::new(program, arguments).timeout(timeout))
}

/// Starts every other consumer group.
pub(super) async fn consumers(
    config: &Config,
    store: &Arc<dyn Store>,
    inboxes: &Inboxes,
    brokers: &Brokers,
) -> Result<Vec<(Arc<Group>, inbox::Running)>, Failure> {
    let mut running = Vec::new();
    for (name, consumer) in config.consumers.iter().filter(|(_, consumer)| !transforms(consumer)) {
        let inbox = inboxes.get(name).cloned().unwrap_or_else(|| store.clone());
        let acknowledge = match acknowledge_to(config, brokers)? {
            Some(elsewhere) if consumer.semantics.leaves_marks() => elsewhere,
            // With marks in Redis the acknowledgement cannot be in their transaction; the store is told afterwards.
            None if config.remembers_apart(consumer) => Acknowledge::Store(store.clone()),
            _ => Acknowledge::InStore,
        };
        let group = Arc::new(group(acknowledge, name, consumer, inbox).await?);
        let subscriber = subscriber_of(brokers, &consumer.broker)?;
        let started = inbox::Consumer::new(group.clone(), subscriber, consumer.topics.clone()).start();
        running.push((group, started));
    }
    Ok(running)
}

/// Where groups acknowledge, if not in a store.
fn acknowledge_to(config: &Config, brokers: &Brokers) -> Result<Option<Acknowledge>, Failure> {
    let wrong = |error| Failure::usage(format!("consumer.acknowledge_to: {error}"));
    match &config.consumer.acknowledge_to {
        Some(AcknowledgeTo::Http(url)) => Acknowledge::http(url).map(Some).map_err(wrong),
        Some(AcknowledgeTo::Topic { topic, broker }) => {
            let publisher = publisher_of(brokers, broker)?;
            Ok(Some(Acknowledge::Topic { publisher, topic: topic.clone() }))
        }
        None => Ok(None),
    }
}

/// Listens to those who acknowledge by a topic.
pub(super) fn acknowledgements(
    config: &Config,
    brokers: &Brokers,
    desk: &Arc<Desk>,
    stopped: watch::Receiver<bool>,
) -> Result<Option<JoinHandle<()>>, Failure> {
    let (Some(heard), Some(hearing)) = (&config.producer.acknowledgements, &brokers.hearing) else {
        return Ok(None);
    };
    let subscriber = subscriber_of(brokers, &heard.broker)?;
    let listening = listen(subscriber, hearing.clone(), desk.clone(), stopped);
    Ok(Some(tokio::spawn(listening)))
}

async fn group(
    acknowledge: Acknowledge,
    name: &str,
    consumer: &Consumer,
    inbox: Arc<dyn Inbox>,
) -> Result<Group, Failure> {
    let handler = match &consumer.handler {
        Handler::Log => inbox::Handler::Log,
        Handler::Sql(statement) => {
            check(name, &*inbox, Work::Sql(statement.clone())).await?;
            inbox::Handler::Sql(statement.clone())
        }
        Handler::Script(script) => {
            check(name, &*inbox, Work::Script(script.clone())).await?;
            inbox::Handler::Script(script.clone())
        }
        Handler::Http { url, timeout } => inbox::Handler::Http(http(name, url, *timeout)?),
        Handler::Command { line, timeout } => inbox::Handler::Command(command(line, *timeout)?),
    };
    let rules = InboxRules {
        retry: consumer.retry.clone(),
        ordered: consumer.order == Order::Key,
        hold_dead: consumer.order == Order::Key && consumer.on_dead == OnDead::Hold,
        acknowledge: matches!(acknowledge, Acknowledge::InStore),
    };
    let group = Group::new(name, inbox, handler, rules).acknowledge(acknowledge).keep_ids(consumer.keep_ids);
    Ok(match consumer.semantics {
        // Its inbox remembers nothing; the broker forgets before the work begins.
        Semantics::None | Semantics::AtMostOnce => group.at_most_once(),
        _ => group,
    })
}

/// Asks the store whether it can do the work of a group.
async fn check(group: &str, store: &dyn Inbox, work: Work) -> Result<(), Failure> {
    match store.check(&work).await {
        Ok(()) => Ok(()),
        // The application may make its table later; until then the group waits and loses nothing.
        Err(error) if error.is_transient() => {
            tracing::warn!(group, %error, "the handler must wait");
            Ok(())
        }
        Err(error) => Err(Failure::usage(format!("consumers.{group}.handler: {error}"))),
    }
}

/// What the producer's listener needs.
pub(super) fn producer_api(
    config: &Config,
    desk: Arc<Desk>,
    pulse: &Pulse,
    contract: Contract,
) -> server::Producer {
    server::Producer {
        desk,
        health: pulse.of_producer(),
        lost: pulse.lost_by_routes(config),
        overdue: pulse.overdue(),
        transactions: pulse.transactions(),
        flows: pulse.flows_of_routes(),
        contract: Arc::new(contract),
        body_limit: config.producer.body_limit,
        hosts: server::Hosts::default(),
    }
}

/// What the consumer's listener needs.
pub(super) fn consumer_api(
    config: &Config,
    desk: Arc<Desk>,
    pulse: &Pulse,
    parts: &Parts,
) -> server::Consumer {
    server::Consumer {
        desk,
        groups: parts.consumers.iter().map(|(group, _)| group.clone()).collect(),
        health: pulse.of_consumer(),
        lost: pulse.lost_by_groups(config),
        dead_letters: pulse.dead_letters(),
        flows: pulse.flows_of_groups(),
        body_limit: config.producer.body_limit,
        hosts: server::Hosts::default(),
    }
}
