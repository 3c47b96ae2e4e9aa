//! The contract of brokers, rule by rule, on Google Pub/Sub.

mod pubsub_line;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use broker::pubsub::{Broker, Config};
use pubsub_line::Line;

/// A corner of the shared emulator with names of its own; clients that may be cut off have a line of their own to it.
struct PubSub {
    prefix: String,
    line: Option<Line>,
}

/// The shortest lease that there is.
const ACK_DEADLINE: Duration = Duration::from_secs(10);

const TIMEOUT: Duration = Duration::from_secs(3);

/// How long a restart takes.
const OUTAGE: Duration = Duration::from_secs(1);

impl PubSub {
    fn config(&self) -> Config {
        let mut config = Config::from_url(&testkit::servers::url("pubsub")).expect("its URL can be read");
        if let Some(line) = &self.line {
            config.emulator = Some(line.place());
        }
        Config {
            prefix: self.prefix.clone(),
            // For groups that come later: the suite publishes first.
            retain: Some(Duration::from_secs(600)),
            timeout: TIMEOUT,
            ack_deadline: ACK_DEADLINE,
            max_payload: 4_096,
            ..config
        }
    }

    fn client(&self, config: Config) -> Arc<dyn testkit::broker::Broker> {
        Arc::new(Broker::open(config).expect("the broker can be opened"))
    }
}

#[async_trait]
impl testkit::broker::Fixture for PubSub {
    async fn fresh() -> Self {
        Self { prefix: format!("t{}-", uuid::Uuid::new_v4().simple()), line: None }
    }

    async fn alone() -> Self {
        let fresh = Self::fresh().await;
        let place = fresh.config().emulator.expect("the tests use an emulator");
        Self { line: Some(Line::to(place).await), ..fresh }
    }

    async fn open(&self) -> Arc<dyn testkit::broker::Broker> {
        self.client(self.config())
    }

    async fn open_strict(&self) -> Option<Arc<dyn testkit::broker::Broker>> {
        Some(self.client(Config { create: false, ..self.config() }))
    }

    async fn open_silent(&self) -> Arc<dyn testkit::broker::Broker> {
        unreachable!("late acknowledgements are not fenced off")
    }

    async fn expire(&self) {
        unreachable!("late acknowledgements are not fenced off")
    }

    async fn stall(&self) -> Box<dyn Any + Send> {
        Box::new(self.line.as_ref().expect("it is alone").block())
    }

    async fn restart(&self) {
        let _away = self.line.as_ref().expect("it is alone").cut();
        tokio::time::sleep(OUTAGE).await;
    }

    fn patience(&self) -> Duration {
        ACK_DEADLINE
    }

    fn time_limit(&self) -> Duration {
        TIMEOUT + Duration::from_secs(2)
    }
}

mod pubsub {
    testkit::broker_conformance!(super::PubSub);
}
