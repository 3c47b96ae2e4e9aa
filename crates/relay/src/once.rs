//! Sent once at most: settled first, and then sent, whatever becomes of it.
//!
//! By the store's account such a message is Sent before its broker hears of it, so neither a crash nor another relay
//! sends it again. What the broker does not confirm after that is lost, and counted.

use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use broker::Outcome;
use futures::future::join_all;
use message::Message;
use store::{Batch, BatchId, Claimed, Seq, Settlement, Verdict};

use crate::Shared;
use crate::breaker::Destination;
use crate::deliver::{Failures, log};
use crate::publish::{Outcomes, at, loads};
use crate::train::STORE_WAIT;
use crate::verdict::unsendable;

/// What a route has lost since the relay started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Which route.
    pub route: String,
    /// How many messages.
    pub messages: u64,
    /// Why the last of them.
    pub error: String,
}

/// What all routes have lost.
#[derive(Debug, Default)]
pub(crate) struct Losses(Mutex<BTreeMap<String, (u64, String)>>);

impl Losses {
    pub(crate) fn count(&self, route: &str, messages: u64, error: &str) {
        let mut all = self.0.lock().expect("nothing panics while it counts");
        let (lost, last) = all.entry(route.to_owned()).or_default();
        *lost += messages;
        error.clone_into(last);
    }

    pub(crate) fn views(&self) -> Vec<Loss> {
        let all = self.0.lock().expect("nothing panics while it counts");
        let view = |(route, (messages, error)): (&String, &(u64, String))| Loss {
            route: route.clone(),
            messages: *messages,
            error: error.clone(),
        };
        all.iter().map(view).collect()
    }
}

/// Settles `batches`, then sends those that were still ours to settle. Answers how many messages were confirmed.
pub(crate) async fn deliver(shared: &Shared, batches: Vec<Batch>) -> usize {
    let settled = settle(shared, &batches).await;
    fail::fail_point!("relay::promised");
    let mut batches: Vec<Batch> =
        batches.into_iter().filter(|batch| settled.batches.contains(&batch.id)).collect();
    for batch in &mut batches {
        batch.messages.retain(|claimed| !settled.unsent.contains(&claimed.seq));
    }
    let mut outcomes = Outcomes::new(&batches);
    let route = |topic: &str| shared.routes.of(topic).cloned();
    let sending = loads(&batches, route, &mut outcomes).into_iter().map(|load| {
        let (way, batches) = (load.way.clone(), &batches);
        // No lease matters any more: nobody else will send these.
        async move { (way, load.publish(batches, || Some(Instant::now() + shared.settings.lease)).await) }
    });
    let mut confirmed = 0;
    for (way, done) in join_all(sending).await {
        let route = &way.route;
        let fine = done.iter().filter(|(_, outcome)| *outcome == Outcome::Confirmed).count();
        if fine > 0 {
            shared.breakers.succeeded(&Destination::Broker(route.broker.clone()));
        }
        confirmed += fine;
        let mut failures = Failures::default();
        let mut fine_topics: HashSet<&str> = HashSet::new();
        for (place, outcome) in done {
            let message = &at(&batches, place).message;
            let Some(error) = outcome.error() else {
                fine_topics.insert(&message.topic);
                continue;
            };
            if let Some(destination) = failures.kind(&outcome, &message.topic, Some(route), fine > 0) {
                failures.note(destination, error, false);
            }
            shared.losses.count(&route.name, 1, error);
            tracing::error!(
                message_id = %message.id, topic = message.topic, route = route.name, error,
                "lost: it is sent at most once, and the broker did not confirm it"
            );
        }
        for topic in fine_topics {
            shared.breakers.succeeded(&Destination::Topic(topic.to_owned()));
        }
        failures.tell(shared);
    }
    confirmed
}

/// What is settled now, and by us. The other batches may be in the hands of another relay.
#[derive(Default)]
struct Settled {
    batches: HashSet<BatchId>,
    /// What is not sent now: its time has not come, or is over.
    unsent: HashSet<Seq>,
}

/// Settles all of `batches`, however long the store needs to be there.
async fn settle(shared: &Shared, batches: &[Batch]) -> Settled {
    let mut unsent = HashSet::new();
    let mut verdict = |claimed: &Claimed| {
        let verdict = unsendable(claimed);
        if let Some(verdict) = &verdict {
            unsent.insert(claimed.seq);
            log(claimed, verdict);
        }
        (claimed.seq, verdict.unwrap_or(Verdict::Sent { ack_groups: Vec::new() }))
    };
    let mut settlements: Vec<Settlement> = batches
        .iter()
        .map(|batch| Settlement {
            batch: batch.id,
            lease: batch.lease,
            verdicts: batch.messages.iter().map(&mut verdict).collect(),
            beside: Vec::new(),
        })
        .collect();
    for (settlement, batch) in settlements.iter_mut().zip(batches) {
        let sent = batch.messages.iter().filter(|claimed| !unsent.contains(&claimed.seq));
        settlement.beside = sent.filter_map(|claimed| copy(shared, &claimed.message)).collect();
    }
    let (mut wait, mut doubted) = (STORE_WAIT, false);
    loop {
        match shared.store.turn(settlements.clone(), None).await {
            Ok(turn) => {
                let fenced: HashSet<BatchId> = turn.fenced.into_iter().collect();
                let ours = batches.iter().filter(|batch| !fenced.contains(&batch.id));
                if doubted {
                    let fenced = batches.iter().filter(|batch| fenced.contains(&batch.id));
                    let messages = fenced.flat_map(|batch| &batch.messages);
                    forget(shared, messages.filter(|claimed| !unsent.contains(&claimed.seq)));
                }
                return Settled { batches: ours.map(|batch| batch.id).collect(), unsent };
            }
            Err(error) if error.is_transient() || !*shared.stopping.borrow() => {
                tracing::warn!(%error, "the store does not answer; trying again");
                doubted = true;
            }
            Err(error) => {
                tracing::error!(%error, "leaving with unsettled batches: they were not sent");
                return Settled::default();
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(Duration::from_secs(5));
    }
}

/// What is sent of a message whatever becomes of it, if its route has such copies.
fn copy(shared: &Shared, message: &Message) -> Option<Message> {
    let topic = shared.routes.of(&message.topic)?.route.copy_to.as_deref()?;
    Some(message.copy_to(topic))
}

/// These were settled by us and the answer was lost, or another relay has them: nobody can tell, so they are not sent.
fn forget<'a>(shared: &Shared, messages: impl Iterator<Item = &'a Claimed>) {
    let error = "the store did not say whether it was settled";
    for claimed in messages {
        let message = &claimed.message;
        let route = shared.routes.of(&message.topic).map_or("", |way| &way.route.name);
        shared.losses.count(route, 1, error);
        tracing::error!(message_id = %message.id, topic = message.topic, route, error, "perhaps lost");
    }
}
