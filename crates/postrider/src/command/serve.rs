//! `serve`: the whole arrow in one process, or some of its parts.
//!
//! Listeners are bound before anything is opened, so that a second start by mistake ends at once and touches
//! nothing. On the first signal things stop in the order in which messages flow out of them: no new requests, then the
//! consumers finish what they have in hand, then the relay gives its lanes back.

mod banner;
mod flow;
mod health;
mod parts;
mod signals;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use store::Store;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::flow::Flows;
use self::health::Pulse;
use self::parts::Parts;
use self::signals::Signals;
use super::arguments::{Part, Serve};
use super::failure::{Exit, Failure};
use super::output::Output;
use super::{backend, contract, fit, inboxes, world};
use crate::config::{Config, Loaded};

/// How often records that have passed their retention are removed.
const CLEANING: Duration = Duration::from_secs(60);

/// Runs until a signal.
pub(super) async fn serve(loaded: Loaded, options: Serve, output: &mut Output) -> Result<(), Failure> {
    let mut config = loaded.config;
    config.producer.listen = options.listen_producer.unwrap_or(config.producer.listen);
    config.consumer.listen = options.listen_consumer.unwrap_or(config.consumer.listen);
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    fit::check(&config)?;
    let runs = |part| options.only.is_empty() || options.only.contains(&part);
    let mut signals = Signals::install()?;

    let producer = listen(runs(Part::Producer), config.producer.listen, "producer").await?;
    let consumer = listen(runs(Part::Consumer), config.consumer.listen, "consumer").await?;
    let backend::Opened { store, promises } = backend::open(&config).await?;
    let inboxes = inboxes::open(&config, &store).await?;
    let past_the_store = config.routes.values().any(|route| route.semantics.bypasses_store());
    let listens = runs(Part::Producer) && config.producer.acknowledgements.is_some();
    let needed = runs(Part::Relay) || runs(Part::Consumer) || past_the_store || listens;
    let brokers = if needed { parts::brokers(&config)? } else { parts::Brokers::new() };

    if runs(Part::Relay) {
        fit::ask(&config, &brokers).await?;
    }

    let flows = Flows::of(&config);
    // What is counted passes through a counter; everything else goes as it did.
    let (counted, doing) = match &flows {
        Some(flows) => (flows.brokers(&brokers), flows.inboxes(&store, &inboxes)),
        None => (brokers.clone(), inboxes.clone()),
    };
    let mut parts = Parts::default();
    if runs(Part::Producer) && past_the_store {
        parts.express = parts::express(&config, &counted)?.map(Arc::new);
    }
    if runs(Part::Relay) {
        parts.relay = Some(parts::relay(&config, store.clone(), &counted)?);
        parts.cleaner = Some(tokio::spawn(clean(config.clone(), store.clone())));
    }
    if runs(Part::Consumer) {
        parts.consumers = parts::consumers(&config, &store, &doing, &brokers).await?;
        parts.transforms = parts::transforming(&config, &brokers)?;
    }
    parts.watchers = flows.iter().flat_map(|flows| flows.watch(&config)).collect();
    parts.flows = flows;
    let pulse = Pulse::of(&parts, &brokers);
    let desk = Arc::new(parts.desk(world::desk(&config, store.clone(), inboxes)));
    let (stop, stopped) = watch::channel(false);
    let running = banner::Running {
        producer: address(producer.as_ref()),
        consumer: address(consumer.as_ref()),
        relay: runs(Part::Relay),
        config: &config,
    };
    banner::print(&running, output)?;

    if let Some(listener) = producer {
        parts.listeners.extend(parts::acknowledgements(&config, &brokers, &desk, stopped.clone())?);
        let contract = contract::draw_up(&config, &brokers, promises);
        let router = server::producer(parts::producer_api(&config, desk.clone(), &pulse, contract));
        parts.listeners.push(run_listener(listener, router, stopped.clone()));
    }
    if let Some(listener) = consumer {
        let router = server::consumer(parts::consumer_api(&config, desk, &pulse, &parts));
        parts.listeners.push(run_listener(listener, router, stopped));
    }

    let signal = signals.next().await;
    tracing::info!("{signal}: finishing what is in hand; a second signal ends at once");
    stop.send_replace(true);
    tokio::select! {
        () = parts.drain() => {
            tracing::info!("drained");
            Ok(())
        }
        signal = signals.next() => Err(Failure::new(
            Exit::Unexpected,
            format!("{signal} again: ended at once; what was in hand is done again by the next start"),
        )),
    }
}

async fn listen(wanted: bool, address: SocketAddr, part: &str) -> Result<Option<TcpListener>, Failure> {
    if !wanted {
        return Ok(None);
    }
    TcpListener::bind(address).await.map(Some).map_err(|error| {
        let reason = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                "another program has the port, perhaps another postrider".to_owned()
            }
            std::io::ErrorKind::PermissionDenied => "the system does not allow it".to_owned(),
            _ => error.to_string(),
        };
        Failure::new(
            Exit::Unavailable,
            format!(
                "cannot listen on {address}: {reason}; choose another with --listen-{part} or {part}.listen"
            ),
        )
    })
}

fn address(listener: Option<&TcpListener>) -> Option<SocketAddr> {
    listener.and_then(|listener| listener.local_addr().ok())
}

fn run_listener(
    listener: TcpListener,
    router: axum::Router,
    mut stopped: watch::Receiver<bool>,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let stop = async move {
            // An error means that the sender is gone, and with it the reason to serve.
            let _ = stopped.wait_for(|stopped| *stopped).await;
        };
        if let Err(error) = server::serve(listener, router, stop).await {
            tracing::error!(%error, "a listener failed");
        }
    })
}

/// Removes what has passed its retention, a little at a time.
async fn clean(config: Config, store: Arc<dyn Store>) {
    loop {
        tokio::time::sleep(CLEANING).await;
        let mut removed = 0;
        loop {
            match store.clean(&config.store.retention).await {
                Ok(0) => break,
                Ok(some) => removed += some,
                Err(error) => {
                    tracing::warn!(%error, "old records could not be removed now; tried again in a minute");
                    break;
                }
            }
        }
        if removed > 0 {
            tracing::info!(removed, "removed records that have passed their retention");
        }
    }
}
