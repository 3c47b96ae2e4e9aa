//! The desk: every request that Postrider answers, whoever asks.

mod bulk;
mod look;
mod mend;
mod reconcile;
mod send;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use bulk::{BulkAnswer, Progress};
use message::{Limits, Message, Secrets};
use store::{Inbox, Record, Store};

use crate::request::message_id;
use crate::{Problem, Topology};

/// Answers requests on one store.
#[derive(Clone)]
pub struct Desk {
    store: Arc<dyn Store>,
    topology: Arc<Topology>,
    limits: Limits,
    inboxes: BTreeMap<String, Arc<dyn Inbox>>,
    express: Option<Arc<dyn Express>>,
    secrets: Option<Secrets>,
}

/// Sends messages past the store.
pub trait Express: Send + Sync {
    /// Takes `message` for `route` and returns at once.
    ///
    /// # Errors
    /// Why it was not taken, for people.
    fn send(&self, route: &str, message: Message) -> Result<(), String>;
}

impl Desk {
    /// A desk on `store`, where `topology` says what is configured.
    pub fn new(store: Arc<dyn Store>, topology: Arc<Topology>, limits: Limits) -> Self {
        Self { store, topology, limits, inboxes: BTreeMap::new(), express: None, secrets: None }
    }

    /// The way past the store, for routes that keep nothing. Without it their messages go through the store too.
    #[must_use]
    pub fn with_express(mut self, express: Arc<dyn Express>) -> Self {
        self.express = Some(express);
        self
    }

    /// Takes acknowledgements only from who can prove to have received the message.
    #[must_use]
    pub fn with_secrets(mut self, secrets: Option<Secrets>) -> Self {
        self.secrets = secrets;
        self
    }

    /// The inboxes of groups that do not remember in the store itself.
    #[must_use]
    pub fn with_inboxes(mut self, inboxes: BTreeMap<String, Arc<dyn Inbox>>) -> Self {
        self.inboxes = inboxes;
        self
    }

    /// Where `group` remembers what it has done.
    fn inbox(&self, group: &str) -> &dyn Inbox {
        match self.inboxes.get(group) {
            Some(inbox) => &**inbox,
            None => &*self.store,
        }
    }

    /// What is configured.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// How much a message may weigh.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    async fn found(&self, id: &str) -> Result<Record, Problem> {
        let id = message_id(id)?;
        self.store.record(id).await?.ok_or_else(|| Problem::no_message(id))
    }
}
