//! Servers of a run's own: how their clients find them, and a way to one on which answers get lost.

use std::net::TcpListener;

use anyhow::{Context, Result};
use testkit::Line;
use testkit::servers::Own;

/// Starts the server of this name, and answers the URL by which the run uses it.
pub(crate) async fn start(name: &'static str) -> Result<(Own, String)> {
    let server = blocking(move || Own::start(name)).await?;
    let parameters = match name {
        // Groups are declared before the first message: what nobody has asked for, some brokers do not keep.
        "rabbitmq" | "pubsub" => "prefix=proof&groups=proof",
        "sqs" => "prefix=proof&fifo=true",
        _ => "prefix=proof",
    };
    let joint = if server.url().contains('?') { '&' } else { '?' };
    let url = format!("{}{joint}{parameters}", server.url());
    Ok((server, url))
}

/// A Kafka with two ways to it.
pub(crate) struct Kafka {
    server: Own,
    /// The one that can be cut.
    pub(crate) line: Line,
}

impl Kafka {
    /// Starts it. Its clients are told to come back by the way that they came.
    pub(crate) async fn start() -> Result<Self> {
        let port = free_port()?;
        let line = Line::to(format!("127.0.0.1:{port}")).await;
        let place = line.place();
        let settings = format!(
            "listeners={{listeners}},LINE://127.0.0.1:{port}\n\
             advertised.listeners={{advertised}},LINE://{place}\n\
             listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,LINE:PLAINTEXT\n"
        );
        let server = blocking(move || Own::start_with("kafka", |_| settings)).await?;
        Ok(Self { server, line })
    }

    /// For whoever comes by the line.
    pub(crate) fn url(&self) -> String {
        format!("kafka://{}?prefix=proof", self.line.place())
    }

    /// For whoever must hear everything.
    pub(crate) fn direct_url(&self) -> String {
        format!("{}?prefix=proof", self.server.url())
    }

    pub(crate) async fn close(self) -> Result<()> {
        blocking(move || drop(self)).await
    }
}

/// Below those that the kernel gives to clients.
fn free_port() -> Result<u16> {
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (0..100).map(|_| 10_000 + rand::random::<u16>() % 9_000).find(free).context("no port is free")
}

/// Servers are started and stopped by a program that is waited for.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    Ok(tokio::task::spawn_blocking(work).await?)
}
