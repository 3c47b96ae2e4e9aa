//! The contract of brokers, rule by rule, on a real RabbitMQ.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use broker::rabbitmq::{Broker, Config};
use testkit::servers::Own;

#[path = "rabbitmq_server/severed.rs"]
mod severed;

use severed::Severed;

/// Names of its own on a server that it may share with others.
struct RabbitMq {
    url: String,
    prefix: String,
    own: Option<Own>,
    severed: Severed,
}

/// All topics and groups that the suite knows: what is made is removed.
const TOPICS: [&str; 3] = ["orders", "refunds", "no-such-topic"];
const GROUPS: [&str; 3] = ["billing", "shipping", "late"];

impl RabbitMq {
    async fn at(url: String, own: Option<Own>) -> Self {
        let place = url.rsplit('@').next().unwrap_or_default().to_owned();
        let severed = Severed::before(place).await;
        Self { url, prefix: format!("test-{}", uuid::Uuid::new_v4().simple()), own, severed }
    }

    fn config(&self) -> Config {
        // RabbitMQ keeps nothing for groups that it has not heard of.
        let groups = GROUPS.join(",");
        // The limit is put to the test where the server is alone; elsewhere many make their queues at the same time.
        let timeout = if self.own.is_some() { "10s" } else { "60s" };
        let settings = format!("partitions=2&max_payload=4KiB&timeout={timeout}");
        let url = format!("{}?prefix={}&groups={groups}&{settings}", self.url, self.prefix);
        Config::from_url(&url).expect("it is a URL of RabbitMQ")
    }

    fn client(config: Config) -> Arc<dyn testkit::broker::Broker> {
        Arc::new(Broker::open(config).expect("the settings make sense"))
    }

    fn own(&self) -> &Own {
        self.own.as_ref().expect("only a broker that is alone is stalled or restarted")
    }
}

#[async_trait]
impl testkit::broker::Fixture for RabbitMq {
    async fn fresh() -> Self {
        Self::at(testkit::servers::url("rabbitmq"), None).await
    }

    async fn alone() -> Self {
        let own = tokio::task::spawn_blocking(|| Own::start("rabbitmq")).await.expect("it starts");
        Self::at(own.url().to_owned(), Some(own)).await
    }

    async fn open(&self) -> Arc<dyn testkit::broker::Broker> {
        Self::client(self.config())
    }

    async fn open_strict(&self) -> Option<Arc<dyn testkit::broker::Broker>> {
        Some(Self::client(Config { create: false, ..self.config() }))
    }

    async fn open_silent(&self) -> Arc<dyn testkit::broker::Broker> {
        Self::client(Config { hosts: vec![self.severed.address()], ..self.config() })
    }

    async fn expire(&self) {
        self.severed.sever();
    }

    async fn stall(&self) -> Box<dyn Any + Send> {
        Box::new(self.own().stall())
    }

    async fn restart(&self) {
        tokio::task::block_in_place(|| self.own().restart());
    }

    fn time_limit(&self) -> Duration {
        Duration::from_secs(13)
    }

    fn patience(&self) -> Duration {
        // It waits for as long as the connection lives; nothing has to be said meanwhile.
        Duration::from_millis(500)
    }
}

impl Drop for RabbitMq {
    fn drop(&mut self) {
        if self.own.is_some() {
            return;
        }
        let config = self.config();
        // The runtime of the case is about to end.
        let removed = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("it starts");
            runtime.block_on(async {
                let broker = Broker::open(config).expect("the settings make sense");
                for group in GROUPS {
                    broker.forget(group, &TOPICS.map(str::to_owned)).await.expect("queues can be removed");
                }
            });
        });
        drop(removed.join());
    }
}

mod rabbitmq {
    testkit::broker_conformance!(super::RabbitMq);
}
