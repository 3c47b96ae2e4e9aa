//! Publishing what was claimed: grouped by broker, each key in order, one outcome for each message.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use broker::{Outcome, Outgoing};
use futures::FutureExt;
use message::{CAPABILITY, Order};
use store::{Batch, Claimed};

use crate::route::{Route, Settle, Way};

/// A message's place in the batches of a turn: which batch, which message of it.
pub(crate) type Place = (usize, usize);

/// The messages of one broker, in the order in which they must go.
pub(crate) struct Load {
    pub(crate) way: Arc<Way>,
    places: VecDeque<Place>,
    /// Messages that are not sent now: those of their keys wait for them.
    refused: Vec<Place>,
}

/// The outcome of every message of some batches.
pub(crate) struct Outcomes(Vec<Vec<Option<Outcome>>>);

impl Outcomes {
    pub(crate) fn new(batches: &[Batch]) -> Self {
        Self(batches.iter().map(|batch| vec![None; batch.messages.len()]).collect())
    }

    pub(crate) fn set(&mut self, place: Place, outcome: Outcome) {
        self.0[place.0][place.1] = Some(outcome);
    }

    fn is_known(&self, place: Place) -> bool {
        self.0[place.0][place.1].is_some()
    }

    /// Takes the outcome of a message; one that was never tried is as it was.
    pub(crate) fn take(&mut self, place: Place) -> Outcome {
        self.0[place.0][place.1].take().unwrap_or(Outcome::Held)
    }
}

/// Sorts the messages of `batches` by broker. Those whose outcome is known are not sent, and those that no route takes
/// are judged at once.
pub(crate) fn loads(
    batches: &[Batch],
    route: impl Fn(&str) -> Option<Arc<Way>>,
    outcomes: &mut Outcomes,
) -> Vec<Load> {
    let mut loads: Vec<Load> = Vec::new();
    let mut by_topic: HashMap<&str, Option<usize>> = HashMap::new();
    for (b, batch) in batches.iter().enumerate() {
        for (m, claimed) in batch.messages.iter().enumerate() {
            let topic = claimed.message.topic.as_str();
            let load = *by_topic.entry(topic).or_insert_with(|| {
                let way = route(topic)?;
                let same = |load: &Load| {
                    load.way.route.broker == way.route.broker && load.way.route.name == way.route.name
                };
                Some(loads.iter().position(same).unwrap_or_else(|| {
                    loads.push(Load { way, places: VecDeque::new(), refused: Vec::new() });
                    loads.len() - 1
                }))
            });
            match load {
                Some(load) if outcomes.is_known((b, m)) => loads[load].refused.push((b, m)),
                Some(load) => loads[load].places.push_back((b, m)),
                None => {
                    let error = format!("no route takes the topic `{topic}`");
                    outcomes.set((b, m), Outcome::Misconfigured { error });
                }
            }
        }
    }
    loads
}

impl Load {
    /// Publishes everything and returns the outcomes. `lease` says until when the shortest lease among them stands:
    /// nothing is sent after that, because another relay may be sending it by then.
    pub(crate) async fn publish(
        mut self,
        batches: &[Batch],
        lease: impl Fn() -> Option<Instant>,
    ) -> Vec<(Place, Outcome)> {
        let mut done = Vec::with_capacity(self.places.len());
        let refused = self.refused.iter().map(|place| at(batches, *place));
        let mut blocked: HashSet<(&str, &str)> =
            refused.filter_map(|claimed| self.ordered_key(claimed)).collect();
        let mut again = VecDeque::new();
        while !self.places.is_empty() {
            if lease().is_none() {
                tracing::warn!(
                    messages = self.places.len(),
                    "the lease ended before these were sent: giving them back"
                );
                done.extend(self.places.drain(..).map(|place| (place, Outcome::Held)));
                break;
            }
            let call = self.next_call(batches, &mut blocked, &mut done);
            if call.is_empty() {
                continue;
            }
            let outgoing = call.iter().map(|place| outgoing(at(batches, *place), &self.way.route)).collect();
            let outcomes = self.call(outgoing, &lease).await;
            let silent = outcomes.iter().all(is_silence);
            for (place, outcome) in call.into_iter().zip(outcomes) {
                if self.way.route.settle == Settle::Before {
                    // It can no longer wait for an earlier one of its key; not tried, it may still be sent.
                    match outcome {
                        Outcome::Held if !silent => again.push_back(place),
                        _ => done.push((place, outcome)),
                    }
                    continue;
                }
                if outcome != Outcome::Confirmed
                    && let Some(key) = self.ordered_key(at(batches, place))
                {
                    blocked.insert(key);
                }
                done.push((place, outcome));
            }
            again.append(&mut self.places);
            self.places = std::mem::take(&mut again);
            if silent {
                // Nobody is there: the rest would only wait as long again, one call after another.
                done.extend(self.places.drain(..).map(|place| (place, Outcome::Held)));
            }
        }
        done
    }

    /// One call to the broker: one outcome for each message, whatever the publisher does.
    async fn call(&self, outgoing: Vec<Outgoing>, lease: impl Fn() -> Option<Instant>) -> Vec<Outcome> {
        let count = outgoing.len();
        let unconfirmed = |error: String| vec![Outcome::Unconfirmed { error }; count];
        let sending = AssertUnwindSafe(self.send(outgoing)).catch_unwind();
        tokio::pin!(sending);
        loop {
            // The heartbeat goes on renewing while the broker takes its time.
            let until = lease().unwrap_or_else(Instant::now);
            let answer = tokio::select! {
                answer = &mut sending => answer,
                () = tokio::time::sleep_until(until.into()) => match lease() {
                    Some(later) if later > until => continue,
                    _ => return unconfirmed("the broker did not answer before the lease ended".to_owned()),
                },
            };
            return match answer {
                Ok(outcomes) if outcomes.len() == count => outcomes,
                Ok(outcomes) => {
                    unconfirmed(format!("the broker answered {} of {count} messages", outcomes.len()))
                }
                Err(_) => {
                    tracing::error!(broker = self.way.route.broker, "the publisher panicked");
                    unconfirmed("the publisher panicked".to_owned())
                }
            };
        }
    }

    /// Sends to a broker that can keep what is promised; to another, nothing.
    async fn send(&self, outgoing: Vec<Outgoing>) -> Vec<Outcome> {
        let Route { publisher, recognised, .. } = &self.way.route;
        if let Some(horizon) = *recognised
            && let Err(outcome) = publisher.recognises(horizon).await
        {
            return vec![outcome; outgoing.len()];
        }
        publisher.publish(outgoing).await
    }

    /// The key by which this message is kept in order, if it is.
    fn ordered_key<'a>(&self, claimed: &'a Claimed) -> Option<(&'a str, &'a str)> {
        let key = claimed.message.key.as_deref().filter(|_| self.way.route.order == Order::Key)?;
        Some((&claimed.message.topic, key))
    }

    /// The messages of the next call. Those of a blocked key are not sent; where the broker may reorder a
    /// call, there is one message of a key in it.
    fn next_call<'a>(
        &mut self,
        batches: &'a [Batch],
        blocked: &mut HashSet<(&'a str, &'a str)>,
        done: &mut Vec<(Place, Outcome)>,
    ) -> Vec<Place> {
        let most = self.way.guarantees.max_batch.max(1);
        let mut call = Vec::with_capacity(most.min(self.places.len()));
        let mut keys = HashSet::new();
        let mut later = VecDeque::new();
        while let Some(place) = self.places.pop_front() {
            let key = self.ordered_key(at(batches, place));
            if key.is_some_and(|key| blocked.contains(&key)) {
                done.push((place, Outcome::Held));
            } else if key.is_some_and(|key| !self.way.guarantees.ordered_batches && !keys.insert(key)) {
                later.push_back(place);
            } else {
                call.push(place);
                if call.len() == most {
                    break;
                }
            }
        }
        later.append(&mut self.places);
        self.places = later;
        call
    }
}

/// The broker did not answer.
pub(crate) fn is_silence(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Unreachable { .. } | Outcome::Unconfirmed { .. } | Outcome::Held)
}

pub(crate) fn at(batches: &[Batch], place: Place) -> &Claimed {
    &batches[place.0].messages[place.1]
}

/// A message as it goes to the broker.
pub(crate) fn outgoing(claimed: &Claimed, route: &Route) -> Outgoing {
    let mut message = Arc::clone(&claimed.message);
    if let Some(secrets) = &route.secrets {
        let capability = secrets.capability(message.id, claimed.state.delivery);
        Arc::make_mut(&mut message).headers.insert(CAPABILITY.to_owned(), capability);
    }
    Outgoing { message, seq: claimed.seq, delivery: claimed.state.delivery, format: route.format.clone() }
}
