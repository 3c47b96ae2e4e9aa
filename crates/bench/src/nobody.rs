//! A broker that confirms everything and keeps nothing: what is left is the cost of everything else.

use async_trait::async_trait;
use broker::{Guarantees, Outcome, Outgoing, Publisher};

/// Confirms and forgets.
pub(crate) struct Nobody;

#[async_trait]
impl Publisher for Nobody {
    fn guarantees(&self) -> Guarantees {
        Guarantees { key_order: true, ordered_batches: true, max_batch: 10_000, ..Guarantees::default() }
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        batch.iter().map(|_| Outcome::Confirmed).collect()
    }
}
