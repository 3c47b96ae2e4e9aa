//! A relay whose broker costs nothing: takes, settles and does nothing in between, so that only the store is measured.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use store::{Beat, ClaimOrder, Instance, Lease, Settlement, Store, TopicRule, Turn, Verdict};
use uuid::Uuid;

/// The lease of a run; no run is as long.
const LEASE: Duration = Duration::from_secs(3_600);

/// A relay that sends to nobody.
pub(crate) struct Puller {
    store: Arc<dyn Store>,
    instance: Instance,
    leases: Vec<Lease>,
    batch: usize,
    settlements: Vec<Settlement>,
}

/// What a pull did.
pub(crate) struct Pulled {
    /// The sequence numbers and keys it took, in order.
    pub(crate) taken: Vec<(i64, Option<String>)>,
    /// How long the turn took.
    pub(crate) took: Duration,
}

impl Puller {
    /// Takes all lanes of a store that nobody else works on.
    pub(crate) async fn new(store: Arc<dyn Store>, batch: usize) -> Result<Self> {
        let instance = Instance { id: Uuid::new_v4(), name: "bench".to_owned() };
        let beat = Beat {
            instance: instance.clone(),
            lease: LEASE,
            held: Vec::new(),
            take: true,
            rule: Arc::new(rule),
        };
        let leases = store.beat(&beat).await?.held;
        ensure!(!leases.is_empty(), "somebody else has the lanes");
        Ok(Self { store, instance, leases, batch, settlements: Vec::new() })
    }

    /// Settles what the last pull took and takes more.
    pub(crate) async fn pull(&mut self) -> Result<Pulled> {
        let order = ClaimOrder {
            leases: self.leases.clone(),
            limit: self.batch,
            bytes: usize::MAX,
            rule: Arc::new(rule),
        };
        let settlements = std::mem::take(&mut self.settlements);
        let started = Instant::now();
        let Turn { fenced, batches, .. } = self.store.turn(settlements, Some(order)).await?;
        let took = started.elapsed();
        ensure!(fenced.is_empty(), "the lanes were lost");
        let mut taken = Vec::new();
        for batch in batches {
            taken.extend(batch.messages.iter().map(|claimed| (claimed.seq, claimed.message.key.clone())));
            let sent = |claimed: &store::Claimed| (claimed.seq, Verdict::Sent { ack_groups: Vec::new() });
            self.settlements.push(Settlement {
                batch: batch.id,
                lease: batch.lease,
                verdicts: batch.messages.iter().map(sent).collect(),
                beside: Vec::new(),
            });
        }
        taken.sort_unstable();
        Ok(Pulled { taken, took })
    }

    /// Takes and settles until nothing is left, and answers how many that were.
    pub(crate) async fn drain(&mut self) -> Result<usize> {
        let mut count = 0;
        loop {
            let pulled = self.pull().await?;
            count += pulled.taken.len();
            if pulled.taken.is_empty() {
                return Ok(count);
            }
        }
    }

    /// Gives the lanes back and is gone: the next one takes them all.
    pub(crate) async fn leave(self) -> Result<()> {
        self.store.leave(&self.instance).await?;
        Ok(())
    }
}

fn rule(_: &str) -> TopicRule {
    TopicRule { channel: 0, take: usize::MAX, hold_failed: true, hold_dead: true }
}
