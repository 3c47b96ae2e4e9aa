//! Google Pub/Sub, by Google's own client.
//!
//! - A topic `orders` is the Pub/Sub topic `{prefix}orders`; a group `billing` on it is the subscription
//!   `{prefix}billing.orders`. Both are made where they are missing, unless [`Config::create`] is false.
//! - The key of a message is its ordering key, and a partition of a subscription is one key. Messages without a key have
//!   no order, and each is a partition of its own. What travels beside the payload is in attributes.
//! - [`Outcome::Confirmed`](crate::Outcome::Confirmed) is the service's own answer with the message's id: by then it is
//!   stored in several zones. An emulator keeps everything in memory and forgets it when it ends.
//!
//! What to know of it:
//! - **A subscription gets what is published after it was made.** A group that must miss nothing is named in
//!   [`Config::groups`], so that its subscription is made before the first message; or the topic retains its messages
//!   ([`Config::retain`]), and a subscription that we make starts at the oldest of them.
//! - **The client pauses a key after a failure until it is told to go on.** Every call tells it so for the keys that it
//!   sends, and what was paused all the same is sent again: no key is ever stuck for longer than a call.
//! - **The client has a task for every key that it ever saw**, so it is replaced after ten thousand of them.
//! - **Requests are stored whole or not at all**, and a request has one key. Of a request whose answer was lost, the first
//!   message is `Unconfirmed` and the others of its key are `Held`, although all may be stored: in their order, so that a
//!   second sending repeats messages but reorders none.
//! - **What is given back stays leased to its member and comes again from there**, before anything else of its key: the
//!   service would let later messages overtake it. Other members get it when that one closes or dies.
//! - **The client keeps outages to itself**, so a member that hears nothing for ten seconds asks whether the service is
//!   there, and says so if it is not. Short ones are not noticed in this way: after several of them the client may take up
//!   to a minute to open its stream again.
//! - Acknowledgements are sent in the background, unless a subscription has exactly-once delivery: then they are waited
//!   for. One that is lost on the way means a redelivery.

mod config;
mod error;
mod examine;
mod publish;
mod receive;
mod setup;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use google_cloud_auth::credentials::anonymous;
use google_cloud_gax::retry_policy::{NeverRetry, RetryPolicyExt};
use google_cloud_pubsub::client;
use google_cloud_pubsub::retry_policy::RetryableErrors;
use tokio::sync::OnceCell;

pub use config::Config;

use crate::Unopened;
use config::Endpoint;
use publish::Topic;

/// Something that passes is tried again by the client itself, this often at most: what lasts is the relay's to wait for.
const ATTEMPTS: u32 = 3;

/// What the attributes of CloudEvents begin with: the binding for Pub/Sub that Google's own services speak.
const EVENT_PREFIX: &str = "ce-";

/// Pub/Sub. Cheap to clone: clones share connections.
#[derive(Clone)]
pub struct Broker {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    endpoint: Endpoint,
    clients: OnceCell<Clients>,
    /// Those that are known to exist, by our name for them.
    topics: Mutex<HashMap<String, Arc<Topic>>>,
}

/// Connections; each is made by its first use, and made again by itself when it was lost.
struct Clients {
    topics: client::TopicAdmin,
    subscriptions: client::SubscriptionAdmin,
    publisher: client::BasePublisher,
    subscriber: client::Subscriber,
}

impl Broker {
    /// Prepares everything; the service is first spoken to when there is something to say.
    ///
    /// # Errors
    /// None so far: whether the service can be reached, and takes our credentials, shows in the first call.
    pub fn open(config: Config) -> Result<Self, Unopened> {
        let endpoint = config.endpoint(std::env::var("PUBSUB_EMULATOR_HOST").ok());
        let inner = Inner { config, endpoint, clients: OnceCell::new(), topics: Mutex::default() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The settings it was opened with.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("pubsub::Broker").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

/// Credentials that cannot be found, in the client's words.
#[derive(Clone, Debug, thiserror::Error)]
#[error("no client of Pub/Sub can be made: {0}")]
struct NoClient(String);

impl Inner {
    /// The clients, which are made in the runtime of whoever asks first.
    async fn clients(&self) -> Result<&Clients, NoClient> {
        self.clients.get_or_try_init(|| self.connect()).await
    }

    async fn connect(&self) -> Result<Clients, NoClient> {
        /// The same for every kind of client: they share no trait.
        macro_rules! built {
            ($builder:expr) => {{
                let builder = $builder;
                let builder = match &self.endpoint {
                    Endpoint::Service(None) => builder,
                    Endpoint::Service(Some(place)) => builder.with_endpoint(place),
                    Endpoint::Emulator(place) => {
                        builder.with_endpoint(place).with_credentials(anonymous::Builder::new().build())
                    }
                };
                builder.build().await.map_err(|error| NoClient(error.to_string()))?
            }};
        }
        // Less than a call may take, so that what the client gave up is not stored after we gave it up.
        let limit = self.config.timeout.mul_f64(0.9);
        let retry = || RetryableErrors.with_attempt_limit(ATTEMPTS).with_time_limit(limit);
        Ok(Clients {
            topics: built!(client::TopicAdmin::builder().with_retry_policy(retry())),
            subscriptions: built!(client::SubscriptionAdmin::builder().with_retry_policy(retry())),
            publisher: match self.config.once {
                true => built!(client::BasePublisher::builder().with_retry_policy(NeverRetry)),
                false => built!(client::BasePublisher::builder().with_retry_policy(retry())),
            },
            subscriber: built!(client::Subscriber::builder()),
        })
    }

    fn topic_path(&self, topic: &str) -> String {
        format!("projects/{}/topics/{}{topic}", self.config.project, self.config.prefix)
    }

    fn subscription_path(&self, group: &str, topic: &str) -> String {
        format!("projects/{}/subscriptions/{}{group}.{topic}", self.config.project, self.config.prefix)
    }
}

/// Why `{prefix}{name}` can be no name of a topic or subscription, if it cannot.
fn misnamed(path: &str) -> Option<String> {
    let name = path.rsplit('/').next().unwrap_or_default();
    let letter = name.starts_with(|c: char| c.is_ascii_alphabetic());
    let signs = name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.~+%".contains(c));
    let fits = (3..=255).contains(&name.len()) && letter && signs && !name.starts_with("goog");
    let rule = "names have 3 to 255 letters, digits and -_.~+%, begin with a letter and not with `goog`";
    (!fits).then(|| format!("`{name}` can be no name in Pub/Sub: {rule}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_the_service_would_refuse_is_known_beforehand() {
        let path = |name: &str| format!("projects/shop/topics/{name}");
        for name in ["orders", "a.b-c_d~e+f%20", "Abc", &"x".repeat(255)] {
            assert_eq!(misnamed(&path(name)), None, "{name}");
        }
        for name in ["", "ab", "1abc", "google-orders", "a b c", "ördern", &"x".repeat(256)] {
            let said = misnamed(&path(name)).expect(name);
            assert!(said.contains(name), "{said}");
        }
    }

    #[test]
    fn nothing_is_asked_of_the_network_to_open_it() {
        let broker = Broker::open(Config { emulator: Some("127.0.0.1:1".to_owned()), ..Config::new("shop") });
        let shown = format!("{:?}", broker.expect("nobody has to be there"));
        assert!(shown.contains("shop"), "{shown}");
    }
}
