//! The contract of brokers, rule by rule, on NATS JetStream.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream;
use async_nats::jetstream::stream::Config as Stream;
use async_trait::async_trait;
use broker::nats::{Broker, Config};
use testkit::servers::{Own, url};
use uuid::Uuid;

/// A stream of its own, made by its operator: it keeps two topics, and messages of a few kilobytes.
struct Nats {
    own: Option<Own>,
    url: String,
}

impl Nats {
    async fn at(server: &str, own: Option<Own>) -> Self {
        let prefix = format!("t{}", Uuid::new_v4().simple());
        let client = async_nats::connect(server).await.expect("the server is there");
        let stream = Stream {
            name: prefix.clone(),
            subjects: vec![format!("{prefix}.orders.*"), format!("{prefix}.refunds.*")],
            max_message_size: 8 << 10,
            ..Stream::default()
        };
        jetstream::new(client).create_stream(stream).await.expect("a stream can be made");
        let url = format!("{server}?prefix={prefix}&partitions=4&timeout=3s&lease=1s");
        Self { own, url }
    }

    fn client(&self, more: &str) -> Arc<dyn testkit::broker::Broker> {
        let config = Config::from_url(&format!("{}{more}", self.url)).expect("it is one");
        Arc::new(Broker::open(config).expect("it can be opened"))
    }

    fn own(&self) -> &Own {
        self.own.as_ref().expect("only a server of one's own may be stopped")
    }
}

#[async_trait]
impl testkit::broker::Fixture for Nats {
    async fn fresh() -> Self {
        Self::at(&url("nats"), None).await
    }

    async fn alone() -> Self {
        let own = tokio::task::spawn_blocking(|| Own::start("nats")).await.expect("it starts");
        let server = own.url().to_owned();
        Self::at(&server, Some(own)).await
    }

    async fn open(&self) -> Arc<dyn testkit::broker::Broker> {
        self.client("")
    }

    async fn open_strict(&self) -> Option<Arc<dyn testkit::broker::Broker>> {
        Some(self.client("&create=false"))
    }

    async fn open_silent(&self) -> Arc<dyn testkit::broker::Broker> {
        // Only asked of brokers that are fenced.
        self.client("")
    }

    async fn expire(&self) {}

    async fn stall(&self) -> Box<dyn Any + Send> {
        Box::new(self.own().stall())
    }

    async fn restart(&self) {
        tokio::task::block_in_place(|| self.own().restart());
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn time_limit(&self) -> Duration {
        Duration::from_secs(10)
    }
}

mod nats {
    testkit::broker_conformance!(super::Nats);
}
