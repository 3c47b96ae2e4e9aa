//! The contract of brokers, rule by rule, on SQS: on standard queues and on FIFO queues.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use broker::sqs::{Broker, Config};
use testkit::servers::{Own, Stalled, url};
use uuid::Uuid;

/// Near the least that SQS allows, one second; a busy machine needs room to renew.
const VISIBILITY: Duration = Duration::from_secs(2);

const TIME_LIMIT: Duration = Duration::from_secs(5);

/// Queues of one kind, under names of their own.
struct Queues {
    /// Where nobody else uses the server.
    own: Option<Own>,
    config: Config,
}

impl Queues {
    fn at(url: &str, own: Option<Own>, fifo: bool) -> Self {
        let prefix = format!("t{}-", Uuid::new_v4().simple());
        let config = Config::from_url(url).expect("the server's URL can be read");
        let visibility = VISIBILITY;
        let timeout = TIME_LIMIT;
        Self { own, config: Config { prefix, fifo, visibility, timeout, max_message: 4_096, ..config } }
    }

    fn fresh(fifo: bool) -> Self {
        Self::at(&url("sqs"), None, fifo)
    }

    async fn alone(fifo: bool) -> Self {
        let own = tokio::task::spawn_blocking(|| Own::start("sqs")).await.expect("it starts");
        let url = own.url().to_owned();
        Self::at(&url, Some(own), fifo)
    }

    fn open(&self, config: Config) -> Arc<dyn testkit::broker::Broker> {
        Arc::new(Broker::open(config).expect("the settings make sense"))
    }

    fn own(&self) -> &Own {
        self.own.as_ref().expect("the server is ours alone")
    }
}

macro_rules! fixture {
    ($name:ident, $fifo:literal) => {
        struct $name(Queues);

        #[async_trait]
        impl testkit::broker::Fixture for $name {
            async fn fresh() -> Self {
                Self(Queues::fresh($fifo))
            }

            async fn alone() -> Self {
                Self(Queues::alone($fifo).await)
            }

            async fn open(&self) -> Arc<dyn testkit::broker::Broker> {
                self.0.open(self.0.config.clone())
            }

            async fn open_strict(&self) -> Option<Arc<dyn testkit::broker::Broker>> {
                Some(self.0.open(Config { create: false, ..self.0.config.clone() }))
            }

            async fn open_silent(&self) -> Arc<dyn testkit::broker::Broker> {
                unreachable!("SQS does not claim that it refuses late acknowledgements")
            }

            async fn expire(&self) {
                unreachable!("nobody falls silent")
            }

            async fn stall(&self) -> Box<dyn Any + Send> {
                let stalled: Stalled = self.0.own().stall();
                Box::new(stalled)
            }

            async fn restart(&self) {
                tokio::task::block_in_place(|| self.0.own().restart());
            }

            fn patience(&self) -> Duration {
                VISIBILITY
            }

            fn time_limit(&self) -> Duration {
                TIME_LIMIT + Duration::from_secs(2)
            }
        }
    };
}

fixture!(Standard, false);
fixture!(Fifo, true);

mod standard {
    testkit::broker_conformance!(super::Standard);
}

mod fifo {
    testkit::broker_conformance!(super::Fifo);
}
