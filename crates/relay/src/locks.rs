//! One train's claims: locked before its messages are published, given back once they are settled.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use broker::Outcome;
use message::MessageId;
use store::{Batch, BatchId, Seq, Settlement, Verdict};

use crate::breaker::{Breakers, Destination};
use crate::claims::{Answer, Claims, End, Over, Wanted};
use crate::publish::{Outcomes, Place};
use crate::route::Routes;

/// The store's clock and that of the locks do not tick alike: a held message waits a little longer than its lock.
const MARGIN: Duration = Duration::from_millis(100);

/// What a train has locked and must give back.
pub(crate) struct Locks {
    claims: Arc<dyn Claims>,
    /// Attempts of the batches in hand.
    open: HashMap<(BatchId, Seq), Attempt>,
    /// What to give back of them, once the store has taken their settlement.
    judged: Vec<(BatchId, Over)>,
    /// What to give back now.
    over: Vec<Over>,
}

struct Attempt {
    id: MessageId,
    owner: Option<BatchId>,
    /// The attempt is ours, or may be.
    ours: bool,
}

impl Locks {
    pub(crate) fn new(claims: Arc<dyn Claims>) -> Self {
        Self { claims, open: HashMap::new(), judged: Vec::new(), over: Vec::new() }
    }

    /// Locks the messages of `batches`, and says at once what becomes of those that must not be sent.
    pub(crate) async fn take(
        &mut self,
        batches: &[Batch],
        routes: &Routes,
        breakers: &Breakers,
        outcomes: &mut Outcomes,
    ) {
        let (places, wanted) = wanted(batches, routes, outcomes);
        let answers = self.exchange(&wanted, breakers).await;
        for (at, (place, wanted)) in places.into_iter().zip(&wanted).enumerate() {
            let answer = answers.as_ref().map(|answers| answers[at]);
            let (owner, ours) = match answer {
                // Nobody knows what became of the call: it may have locked them all.
                None | Some(Answer::Locked) => (Some(wanted.owner), true),
                Some(Answer::Held { owner, .. }) => (owner, false),
            };
            match answer {
                Some(Answer::Locked) => {}
                Some(Answer::Held { rest, .. }) => outcomes.set(place, held(rest)),
                None => outcomes.set(place, Outcome::Held),
            }
            let seq = batches[place.0].messages[place.1].seq;
            self.open.insert((wanted.owner, seq), Attempt { id: wanted.id, owner, ours });
        }
    }

    /// Notes what is to be given back once these are settled, and never before: a crash in between must leave the
    /// message locked.
    pub(crate) fn judged(&mut self, settlements: &[Settlement]) {
        for settlement in settlements {
            for (seq, verdict) in &settlement.verdicts {
                let Some(attempt) = self.open.remove(&(settlement.batch, *seq)) else { continue };
                let end = match verdict {
                    Verdict::Sent { .. } | Verdict::Dead { .. } => End::Finished,
                    // The lock of whoever died stays for its time.
                    Verdict::Failed { .. } | Verdict::Postponed { .. } | Verdict::Released { .. }
                        if !attempt.ours =>
                    {
                        continue;
                    }
                    Verdict::Failed { .. } => End::Failed,
                    Verdict::Postponed { .. } | Verdict::Released { .. } => End::Released,
                };
                if let Some(owner) = attempt.owner {
                    self.judged.push((settlement.batch, Over { id: attempt.id, owner, end }));
                }
            }
        }
    }

    /// The store has taken the settlements, but for the `fenced`: of those another relay decides.
    pub(crate) fn settled(&mut self, fenced: &[BatchId]) {
        let taken = self.judged.drain(..).filter(|(batch, _)| !fenced.contains(batch));
        self.over.extend(taken.map(|(_, over)| over));
    }

    /// Gives back what is over, if anything is.
    pub(crate) async fn give_back(&mut self, breakers: &Breakers) {
        if !self.over.is_empty() && breakers.gates(Instant::now()).limit(&Destination::Claims) > 0 {
            self.exchange(&[], breakers).await;
        }
    }

    /// The answers; none when the claims are away. What is over is then kept for the next time.
    async fn exchange(&mut self, wanted: &[Wanted], breakers: &Breakers) -> Option<Vec<Answer>> {
        if self.over.is_empty() && wanted.is_empty() {
            return Some(Vec::new());
        }
        match self.claims.exchange(&self.over, wanted).await {
            Ok(answers) => {
                self.over.clear();
                breakers.succeeded(&Destination::Claims);
                Some(answers)
            }
            Err(error) => {
                let error = format!("nothing is sent without its lock: {error}");
                breakers.failed(&Destination::Claims, &error, false, Instant::now());
                None
            }
        }
    }
}

/// The messages to lock: those that somebody would send. What has spent its attempts is not tried again.
fn wanted(batches: &[Batch], routes: &Routes, outcomes: &mut Outcomes) -> (Vec<Place>, Vec<Wanted>) {
    let mut all = (Vec::new(), Vec::new());
    for (b, batch) in batches.iter().enumerate() {
        for (m, claimed) in batch.messages.iter().enumerate() {
            let Some(way) = routes.of(&claimed.message.topic) else { continue };
            let (attempts, delivery) = (claimed.state.attempts, claimed.state.delivery);
            if attempts >= way.route.retry.max_attempts {
                let error = "its attempts were spent before".to_owned();
                outcomes.set((b, m), Outcome::Deferred { error, after: None });
                continue;
            }
            all.0.push((b, m));
            all.1.push(Wanted { id: claimed.message.id, owner: batch.id, delivery, attempts });
        }
    }
    all
}

/// An attempt that nobody settled is spent; the next one comes when its lock has ended.
fn held(rest: Option<Duration>) -> Outcome {
    let (error, after) = match rest {
        Some(rest) => (
            "another worker held its lock: it died while it was sending, or lost its lane".to_owned(),
            Some(rest + rest / 1_000 + MARGIN),
        ),
        None => ("a worker began to send it and never said what became of it".to_owned(), None),
    };
    Outcome::Deferred { error, after }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use store::Lease;
    use uuid::Uuid;

    use super::*;

    /// Writes down what it is given back.
    #[derive(Default)]
    struct Ledger(Mutex<Vec<Over>>);

    #[async_trait]
    impl Claims for Ledger {
        async fn exchange(&self, over: &[Over], wanted: &[Wanted]) -> Result<Vec<Answer>, String> {
            self.0.lock().expect("no panic").extend(over);
            Ok(vec![Answer::Locked; wanted.len()])
        }
    }

    /// Locks of two batches that were sent and judged.
    fn sent() -> (Arc<Ledger>, Locks, [BatchId; 2]) {
        let (ledger, batches) = (Arc::new(Ledger::default()), [Uuid::new_v4(), Uuid::new_v4()]);
        let mut locks = Locks::new(ledger.clone());
        for batch in batches {
            locks.open.insert((batch, 1), Attempt { id: MessageId::new(), owner: Some(batch), ours: true });
            let lease = Lease { lane: 0, epoch: 1, id: Uuid::nil() };
            let verdicts = vec![(1, Verdict::Sent { ack_groups: Vec::new() })];
            locks.judged(&[Settlement { batch, lease, verdicts, beside: Vec::new() }]);
        }
        (ledger, locks, batches)
    }

    #[tokio::test]
    async fn nothing_is_given_back_before_the_store_has_taken_it() {
        let (ledger, mut locks, _) = sent();
        locks.give_back(&Breakers::default()).await;
        assert!(ledger.0.lock().expect("no panic").is_empty());
        locks.settled(&[]);
        locks.give_back(&Breakers::default()).await;
        assert_eq!(ledger.0.lock().expect("no panic").len(), 2);
    }

    #[tokio::test]
    async fn what_another_relay_decides_is_not_given_back() {
        let (ledger, mut locks, [fenced, settled]) = sent();
        locks.settled(&[fenced]);
        locks.give_back(&Breakers::default()).await;
        locks.give_back(&Breakers::default()).await;
        let owners: Vec<_> = ledger.0.lock().expect("no panic").iter().map(|over| over.owner).collect();
        assert_eq!(owners, [settled], "once");
    }
}
