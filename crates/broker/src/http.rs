//! HTTP destinations: every message is a POST to one URL, signed by Standard Webhooks.
//!
//! - A message is confirmed when the destination answers 2xx. What that promises is the destination's word: answer it
//!   after the work is committed, and remember `webhook-id`, because a message whose answer was lost comes again.
//! - The topic is a header (`postrider-topic`), not a part of the URL: another URL is another broker. Id, key, type and
//!   the rest are headers too, in Postrider's names or in those of CloudEvents. [`read`] is the way back.
//! - Keys stay in order because the relay has one message of a key under way; several of one call may overtake each
//!   other.
//! - There is nothing to subscribe to. A receiver of this program's messages that is written in Rust has [`verify`] and
//!   [`read`].
//!
//! Its traps, and what is done about them:
//!
//! - A URL, or the DNS entry behind its name, may lead into our own network. Every address is judged where the
//!   connection is made, and only what was judged is connected to. Redirects are answers, never followed; proxies of the
//!   environment are not used.
//! - A destination may be hostile or broken: a request has a total time, its answer limited headers, a limited body and
//!   a limited number of informational answers before it.
//! - A slow destination has a window of its own; it cannot use up another's.
//! - `410 Gone` ends it: nothing more is sent there until the program is started again. After `Retry-After` nothing is
//!   sent until the time is over, a minute at most.

mod config;
mod connect;
mod error;
mod examine;
mod guard;
mod publish;
mod sign;
mod turn;
mod write;

use std::fmt;
use std::sync::{Arc, OnceLock};

use hyper::HeaderMap;

pub use config::Config;
pub use connect::{Lookup, SystemDns};
pub use guard::Allow;
pub use sign::{BadKey, Key, Refusal, Verified, verify, verify_at};
pub use write::{Received, read};

use crate::Unopened;
use connect::Client;
use turn::Turns;

/// One destination. Cheap to clone: clones share its connections and its limits.
#[derive(Clone)]
pub struct Broker {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    client: Client,
    turns: Turns,
    /// What every request has: the login, and who we are.
    headers: HeaderMap,
    /// What the destination said when it answered 410.
    gone: OnceLock<String>,
}

impl Broker {
    /// Makes everything ready to send. Connects to nothing yet.
    ///
    /// # Errors
    /// When a setting makes no sense, or no certificate authority is known for a destination that needs one.
    pub fn open(config: Config) -> Result<Self, Unopened> {
        Self::open_with(config, Arc::new(SystemDns))
    }

    /// The same with other means than the system's to find the addresses of a name. They are judged all the same.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(config: Config, lookup: Arc<dyn Lookup>) -> Result<Self, Unopened> {
        config.check()?;
        let client = Client::new(&config, lookup)?;
        let headers = write::always(&config)?;
        let turns = Turns::new(config.concurrency, config.rate);
        Ok(Self { inner: Arc::new(Inner { config, client, turns, headers, gone: OnceLock::new() }) })
    }

    /// The settings it was opened with.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("http::Broker").field("config", &self.inner.config).finish_non_exhaustive()
    }
}
