//! The producer's ear: its HTTP API, or the topic that it listens to. Groups elsewhere acknowledge there.

use std::net::TcpListener as Probe;
use std::sync::Arc;

use admin::{Contract, Desk, Topology};
use anyhow::{Context, Result};
use broker::{Publisher, Subscriber};
use inbox::Acknowledge;
use message::Limits;
use server::{Hearing, Hosts, Producer};
use store::Store;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Bytes of a request at most.
const BODY: usize = 1 << 16;

/// Where acknowledgements are said that go by a topic, and as whom the producer hears them.
const SAID: &str = "done";
const PRODUCER: &str = "producer";

/// The base URL of an API that can be started on this machine.
pub(crate) fn free_url() -> Result<String> {
    let free = Probe::bind("127.0.0.1:0").and_then(|listener| listener.local_addr())?;
    Ok(format!("http://{free}"))
}

/// How a group acknowledges to a producer at this URL: of its API, or of the broker that has the topic.
pub(crate) fn acknowledge(url: &str, broker: Option<Arc<dyn Publisher>>) -> Result<Acknowledge> {
    match broker {
        Some(publisher) => Ok(Acknowledge::Topic { publisher, topic: SAID.to_owned() }),
        None => Ok(Acknowledge::http(url)?),
    }
}

/// Listens until the sender of `stopped` says so.
pub(crate) async fn start(
    url: &str,
    broker: Option<Arc<dyn Subscriber>>,
    store: Arc<dyn Store>,
    mut stopped: watch::Receiver<bool>,
) -> Result<JoinHandle<Result<()>>> {
    let desk = Arc::new(Desk::new(store, Arc::new(Topology::default()), Limits::default()));
    if let Some(subscriber) = broker {
        let hearing = Arc::new(Hearing::new(SAID, PRODUCER));
        return Ok(tokio::spawn(async move {
            server::listen(subscriber, hearing, desk, stopped).await;
            Ok(())
        }));
    }
    let address = url.trim_start_matches("http://");
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen at {address}"))?;
    let api = server::producer(Producer {
        desk,
        health: Arc::new(Vec::new),
        lost: Arc::new(Vec::new),
        overdue: Arc::new(Vec::new),
        transactions: Arc::new(Vec::new),
        flows: Arc::new(Vec::new),
        contract: Arc::new(Contract::default()),
        body_limit: BODY,
        hosts: Hosts::default(),
    });
    Ok(tokio::spawn(async move {
        let stop = async move {
            // The sender that is gone says so too.
            let _ = stopped.wait_for(|stopped| *stopped).await;
        };
        Ok(server::serve(listener, api, stop).await?)
    }))
}
