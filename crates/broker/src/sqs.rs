//! Amazon SQS, or another server that speaks its protocol.
//!
//! - **A topic is a queue**: `prefix` + topic with dashes for dots (`orders.eu` is `orders-eu`), with `.fifo` at its end
//!   where the URL says `fifo=true`. A queue that is missing is made, unless the URL says `create=false`. It keeps messages
//!   that nobody takes for 14 days at most: that is all SQS offers.
//! - **There are no groups.** Whoever subscribes to a topic takes from its one queue, whatever it calls its group. For
//!   fan-out, publish to one topic for each group, or let SNS copy to one queue for each.
//! - **A standard queue has no order**, and may deliver a message twice without being asked. Every delivery is a partition
//!   of its own.
//! - **A FIFO queue keeps the order of a key**: the key is the message group, and a message without a key is a group of its
//!   own. SQS gives no more of a group while some of it is unfinished, so at most ten of a key are out at a time. It
//!   recognises for five minutes what it was sent before, by the message's id and its delivery: sending again on purpose is
//!   another delivery, and goes through.
//! - **Messages are confirmed one by one.** SQS answers a request of ten with a list; what is not in the list is
//!   [`Outcome::Unconfirmed`](crate::Outcome), what failed is sent again alone.
//! - **What a member has received is hidden** from others for `visibility`, again and again until it is finished. If SQS
//!   says that somebody else has it, the member forgets it. Twelve hours is the most that SQS allows.
//! - A member that goes without a farewell leaves its messages hidden for `visibility`, and so does one that is killed
//!   while it waits: SQS may have answered.

mod config;
mod error;
mod examine;
mod keep;
mod letter;
mod publish;
mod queue;
mod receive;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::retry::RetryConfig;
use aws_sdk_sqs::config::timeout::TimeoutConfig;
use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region, StalledStreamProtectionConfig};
use tokio::sync::OnceCell;

use crate::Unopened;
pub use config::{Config, Login};
use queue::Queue;

/// How long to try to connect: then the server is away.
const CONNECT_WITHIN: Duration = Duration::from_secs(3);

/// SQS. Cheap to clone: clones share connections and what is known of queues.
#[derive(Clone)]
pub struct Broker {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    client: OnceCell<Client>,
    /// Queues that were found, by topic.
    queues: Mutex<HashMap<String, Arc<Queue>>>,
}

impl Broker {
    /// Takes the settings. Connects to nothing: SQS is found by the first who wants something of it.
    ///
    /// # Errors
    /// When a setting makes no sense.
    pub fn open(config: Config) -> Result<Self, Unopened> {
        config.check()?;
        let inner = Inner { config, client: OnceCell::new(), queues: Mutex::default() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The settings it was opened with.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    async fn client(&self) -> &Client {
        self.inner.client.get_or_init(|| client(&self.inner.config)).await
    }
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("sqs::Broker").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

/// A client that tries once: what to do after a failure is decided by whoever asked.
async fn client(config: &Config) -> Client {
    let mut loader = aws_config::defaults(BehaviorVersion::latest())
        .region(Region::new(config.region.clone()))
        .retry_config(RetryConfig::disabled())
        .timeout_config(TimeoutConfig::builder().connect_timeout(CONNECT_WITHIN.min(config.timeout)).build())
        // It would take the silence of a long poll for a connection that hangs.
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled());
    if let Some(endpoint) = &config.endpoint {
        loader = loader.endpoint_url(endpoint);
    }
    if let Some(Login { key, secret }) = &config.login {
        loader = loader.credentials_provider(Credentials::new(key, secret.reveal(), None, None, "URL"));
    }
    Client::new(&loader.load().await)
}
