//! A relay that does only what a case tells it to.

use std::sync::Arc;
use std::time::Duration;

use message::Message;
use store::{
    Batch, Beat, Beaten, ClaimOrder, Claimed, Instance, Lease, Settlement, Store, TopicRule, Turn, Verdict,
};
use uuid::Uuid;

/// A relay in hand.
pub struct Relay {
    /// Its handle.
    pub store: Arc<dyn Store>,
    /// Who it is.
    pub instance: Instance,
    /// What it believes to hold.
    pub held: Vec<Lease>,
    /// How long its leases last.
    pub lease: Duration,
    /// How it treats each topic.
    pub rule: fn(&str) -> TopicRule,
}

impl Relay {
    /// A relay that holds nothing yet, whose leases outlast any case.
    pub fn new(store: Arc<dyn Store>) -> Self {
        let id = Uuid::new_v4();
        let instance = Instance { id, name: format!("relay {id}") };
        Self { store, instance, held: Vec::new(), lease: Duration::from_secs(3_600), rule: free }
    }

    /// A relay that holds every lane.
    pub async fn with_all_lanes(store: Arc<dyn Store>) -> Self {
        let mut relay = Self::new(store);
        relay.beat().await;
        relay
    }

    /// The same, treating topics by `rule`.
    #[must_use]
    pub fn by(mut self, rule: fn(&str) -> TopicRule) -> Self {
        self.rule = rule;
        self
    }

    /// The same, with leases that end soon.
    #[must_use]
    pub fn leasing(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Beats, wanting more lanes.
    pub async fn beat(&mut self) -> Beaten {
        self.ask(true).await
    }

    /// Beats, wanting no more than it has.
    pub async fn renew(&mut self) -> Beaten {
        self.ask(false).await
    }

    async fn ask(&mut self, take: bool) -> Beaten {
        let beat = Beat {
            instance: self.instance.clone(),
            lease: self.lease,
            held: self.held.clone(),
            take,
            rule: Arc::new(self.rule),
        };
        let beaten = self.store.beat(&beat).await.expect("a beat is answered");
        self.held = beaten.held.clone();
        beaten
    }

    /// Takes up to `limit` messages.
    pub async fn claim(&self, limit: usize) -> Vec<Batch> {
        self.look(limit).await.batches
    }

    /// Takes up to `limit` messages, treating topics by `rule`.
    pub async fn claim_by(&self, rule: fn(&str) -> TopicRule, limit: usize) -> Vec<Batch> {
        self.look_by(rule, limit).await.batches
    }

    /// The same, and says all that the store answered.
    pub async fn look_by(&self, rule: fn(&str) -> TopicRule, limit: usize) -> Turn {
        let order = ClaimOrder { leases: self.held.clone(), limit, bytes: usize::MAX, rule: Arc::new(rule) };
        self.store.turn(Vec::new(), Some(order)).await.expect("a turn is answered")
    }

    /// Takes up to `limit` messages, and says all that the store answered.
    pub async fn look(&self, limit: usize) -> Turn {
        self.look_by(self.rule, limit).await
    }

    /// Says what became of each message of `batch`.
    pub async fn settle(&self, batch: &Batch, verdict: impl Fn(&Claimed) -> Verdict) -> Turn {
        self.settle_beside(batch, verdict, Vec::new()).await
    }

    /// The same, with messages that are to be written with it.
    pub async fn settle_beside(
        &self,
        batch: &Batch,
        verdict: impl Fn(&Claimed) -> Verdict,
        beside: Vec<Message>,
    ) -> Turn {
        let verdicts = batch.messages.iter().map(|claimed| (claimed.seq, verdict(claimed))).collect();
        let settlement = Settlement { batch: batch.id, lease: batch.lease, verdicts, beside };
        self.store.turn(vec![settlement], None).await.expect("a settlement is answered")
    }

    /// Says the same of all messages of all `batches`.
    pub async fn settle_all(&self, batches: &[Batch], verdict: &Verdict) {
        for batch in batches {
            let turn = self.settle(batch, |_| verdict.clone()).await;
            assert!(turn.fenced.is_empty(), "the owner of a lane may settle its batch");
        }
    }

    /// Takes and settles until nothing is left to take; what it took, in the order of taking.
    pub async fn drain(&self, limit: usize, verdict: &Verdict) -> Vec<Claimed> {
        let mut taken = Vec::new();
        loop {
            let turn = self.look(limit).await;
            if turn.batches.is_empty() && !turn.more {
                return taken;
            }
            self.settle_all(&turn.batches, verdict).await;
            taken.extend(turn.batches.into_iter().flat_map(|batch| batch.messages));
        }
    }

    /// Is gone for good, leaving open what it had.
    pub async fn leave(&self) {
        self.store.leave(&self.instance).await.expect("leaving is possible");
    }
}

/// Take all there is; nobody waits for anybody.
pub fn free(_: &str) -> TopicRule {
    TopicRule { channel: 0, take: usize::MAX, hold_failed: false, hold_dead: false }
}

/// Take all there is; the later messages of a failed or Dead one's key wait.
pub fn holding(_: &str) -> TopicRule {
    TopicRule { channel: 0, take: usize::MAX, hold_failed: true, hold_dead: true }
}

/// The broker has it; nobody must acknowledge.
pub fn sent() -> Verdict {
    Verdict::Sent { ack_groups: Vec::new() }
}

/// It failed.
pub fn failed(retry_after: Duration, hold: bool) -> Verdict {
    Verdict::Failed { error: "no luck".to_owned(), retry_after, hold }
}

/// It is Dead.
pub fn dead(hold: bool) -> Verdict {
    Verdict::Dead { reason: "rejected".to_owned(), error: "never".to_owned(), attempted: true, hold }
}

/// It is what it was.
pub fn released() -> Verdict {
    Verdict::Released { error: None }
}
