//! The contract of brokers, rule by rule, on Apache Kafka.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use broker::kafka::{Broker, Config};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use testkit::eventually;
use testkit::servers::{Own, url};
use uuid::Uuid;

/// How long a member may be silent. A case that must end before that has room for one request that Kafka never answers:
/// now and then, on a busy machine, a group's is not.
const SESSION: Duration = Duration::from_secs(25);

/// How often a member says that it lives, and hears of changes.
const HEARTBEAT: Duration = Duration::from_millis(2_500);

/// How long a member lasts that never says that it lives.
const SILENT: Duration = Duration::from_secs(3);

/// Names of their own on a server that all share, or on one of their own.
struct Kafka {
    url: String,
    prefix: String,
    own: Option<Arc<Own>>,
}

impl Kafka {
    fn at(url: String, own: Option<Own>) -> Self {
        Self { url, prefix: format!("t{}.", Uuid::new_v4().simple()), own: own.map(Arc::new) }
    }

    fn config(&self) -> Config {
        let url = format!("{}?prefix={}&timeout=12s&partitions=4&max_payload=4KiB", self.url, self.prefix);
        let config = Config::from_url(&url).expect("the URL is right");
        Config { session: SESSION, heartbeat: HEARTBEAT, ..config }
    }

    fn client(config: Config) -> Arc<dyn testkit::broker::Broker> {
        Arc::new(Broker::open(config).expect("librdkafka can be used"))
    }

    /// Members of the group that the cases use.
    fn members(&self) -> usize {
        let servers = self.url.trim_start_matches("kafka://");
        let client: BaseConsumer =
            ClientConfig::new().set("bootstrap.servers", servers).create().expect("a client can be made");
        let group = format!("{}billing", self.prefix);
        let groups = client.fetch_group_list(Some(&group), Duration::from_secs(10)).expect("Kafka answers");
        groups.groups().iter().map(|group| group.members().len()).sum()
    }
}

#[async_trait]
impl testkit::broker::Fixture for Kafka {
    async fn fresh() -> Self {
        Self::at(url("kafka"), None)
    }

    async fn alone() -> Self {
        let own = tokio::task::spawn_blocking(|| Own::start("kafka")).await.expect("Kafka starts");
        Self::at(own.url().to_owned(), Some(own))
    }

    async fn open(&self) -> Arc<dyn testkit::broker::Broker> {
        Self::client(self.config())
    }

    async fn open_strict(&self) -> Option<Arc<dyn testkit::broker::Broker>> {
        Some(Self::client(Config { create: false, ..self.config() }))
    }

    async fn open_silent(&self) -> Arc<dyn testkit::broker::Broker> {
        // More would be a negative number of microseconds in librdkafka, and no silence at all.
        let heartbeat = Duration::from_secs(1_800);
        Self::client(Config { session: SILENT, heartbeat, ..self.config() })
    }

    async fn expire(&self) {
        let gone = eventually(SESSION * 4, || async { tokio::task::block_in_place(|| self.members()) == 0 });
        assert!(gone.await, "the group still has members");
    }

    async fn stall(&self) -> Box<dyn Any + Send> {
        Box::new(self.own.as_ref().expect("it is alone").stall())
    }

    async fn restart(&self) {
        let own = Arc::clone(self.own.as_ref().expect("it is alone"));
        tokio::task::spawn_blocking(move || own.restart()).await.expect("Kafka starts again");
    }

    fn time_limit(&self) -> Duration {
        Duration::from_secs(16)
    }

    fn patience(&self) -> Duration {
        SESSION
    }
}

testkit::broker_conformance!(Kafka);
