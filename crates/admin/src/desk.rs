//! The desk: every request that Postrider answers, whoever asks.

mod bulk;
mod look;
mod mend;
mod send;

use std::sync::Arc;

pub use bulk::{BulkAnswer, Progress};
use message::Limits;
use store::{Record, Store};

use crate::request::message_id;
use crate::{Problem, Topology};

/// Answers requests on one store.
#[derive(Clone)]
pub struct Desk {
    store: Arc<dyn Store>,
    topology: Arc<Topology>,
    limits: Limits,
}

impl Desk {
    /// A desk on `store`, where `topology` says what is configured.
    pub fn new(store: Arc<dyn Store>, topology: Arc<Topology>, limits: Limits) -> Self {
        Self { store, topology, limits }
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
