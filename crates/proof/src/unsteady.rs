//! A broker that takes its time and turns some messages away, so that there is something in flight and to retry.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use broker::{Guarantees, Outcome, Outgoing, Publisher, Transactions};
use rand::Rng;

/// See the module.
pub(crate) struct Unsteady {
    pub(crate) broker: Arc<dyn Publisher>,
    /// The longest wait before it stores anything.
    pub(crate) delay: Duration,
    /// The share of messages that it turns away.
    pub(crate) failing: f64,
}

#[async_trait]
impl Publisher for Unsteady {
    fn guarantees(&self) -> Guarantees {
        self.broker.guarantees()
    }

    fn transactions(&self) -> Option<Arc<dyn Transactions>> {
        self.broker.transactions()
    }

    async fn recognises(&self, horizon: Duration) -> Result<(), Outcome> {
        self.broker.recognises(horizon).await
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        if !self.delay.is_zero() {
            let delay = rand::rng().random_range(Duration::ZERO..=self.delay);
            tokio::time::sleep(delay).await;
        }
        // What is turned away is never stored: a second copy in the broker can only come from a second claim.
        let mut failed: HashSet<Option<String>> = HashSet::new();
        let fates: Vec<Option<Outcome>> = batch
            .iter()
            .map(|outgoing| {
                let key = &outgoing.message.key;
                if failed.contains(key) {
                    return Some(Outcome::Held);
                }
                let fails = rand::rng().random_bool(self.failing);
                fails.then(|| {
                    failed.insert(key.clone());
                    Outcome::Deferred { error: "not today".to_owned(), after: None }
                })
            })
            .collect();
        let taken = batch.into_iter().zip(&fates).filter(|(_, fate)| fate.is_none());
        let mut outcomes =
            self.broker.publish(taken.map(|(outgoing, _)| outgoing).collect()).await.into_iter();
        let unheard = || Outcome::Unconfirmed { error: "no outcome came".to_owned() };
        fates.into_iter().map(|fate| fate.or_else(|| outcomes.next()).unwrap_or_else(unheard)).collect()
    }
}
