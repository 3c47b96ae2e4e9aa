//! One member's standing in its group, shared by the subscription that reads and the task that renews.
//!
//! Redis decides who owns what; this is what the member last heard, how far it has read, and what it has delivered and not
//! finished. A partition that it should give up is no longer read, and leaves once all that was delivered from it is
//! acknowledged or given back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::Value;
use tokio::sync::Notify;

use super::entry::{EntryId, list, number, text};
use super::error::Error;
use super::script::{Call, Link, script};
use crate::unfinished::Unfinished;

script!(BEAT: "beat.lua");
script!(LEAVE: "leave.lua");

/// More than a topic can have: a place for each in the numbers of partitions.
const PARTITIONS: u64 = 1 << 16;

/// A partition in hand.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) topic: Arc<str>,
    /// Its number within the topic.
    pub(super) number: u64,
    pub(super) epoch: String,
    /// Where reading goes on.
    pub(super) next: EntryId,
    /// To be given up: nothing more is delivered from it.
    pub(super) leaving: bool,
}

/// A message that was delivered and is not finished.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delivered {
    pub(super) partition: u64,
    pub(super) offset: i64,
    pub(super) id: EntryId,
}

/// What the member last heard, and what it did since.
#[derive(Debug, Default)]
pub(super) struct Standing {
    pub(super) generation: EntryId,
    pub(super) held: BTreeMap<u64, Held>,
    pub(super) unfinished: Unfinished<Delivered>,
    /// The offset of each partition that was delivered last. Kept when a partition is lost, so that a late word about what
    /// was delivered before means nothing of what is delivered after it came back.
    pub(super) offsets: BTreeMap<u64, i64>,
}

impl Standing {
    /// Partitions with messages that are not finished.
    fn busy(&self) -> BTreeSet<u64> {
        self.unfinished.iter().map(|delivered| delivered.partition).collect()
    }

    /// Partitions that can be given up right now.
    fn done_with(&self) -> Vec<u64> {
        let leaving = self.held.iter().filter(|(_, held)| held.leaving).map(|(partition, _)| *partition);
        let leaving: Vec<u64> = leaving.collect();
        if leaving.is_empty() {
            return leaving;
        }
        let busy = self.busy();
        leaving.into_iter().filter(|partition| !busy.contains(partition)).collect()
    }

    fn lose(&mut self, partition: u64) {
        self.held.remove(&partition);
        self.unfinished.forget(partition);
    }
}

/// A member of a group.
pub(super) struct Member {
    pub(super) tag: String,
    pub(super) group: String,
    /// Its name, which nobody had before.
    pub(super) name: String,
    /// Sorted, so that a partition has the same number in every member that asks for the same.
    pub(super) topics: Vec<Arc<str>>,
    lease: Duration,
    /// On the keeper's thread.
    heart: Arc<Link>,
    standing: Mutex<Standing>,
    /// Rung when the renewing task should look at once.
    look: Notify,
    /// Rung when it has heard.
    pub(super) heard: Notify,
}

impl Member {
    pub(super) fn new(tag: &str, group: &str, topics: &[String], lease: Duration, heart: Arc<Link>) -> Self {
        Self {
            tag: tag.to_owned(),
            group: group.to_owned(),
            name: uuid::Uuid::new_v4().to_string(),
            topics: topics.iter().map(|topic| topic.as_str().into()).collect(),
            lease,
            heart,
            standing: Mutex::default(),
            look: Notify::new(),
            heard: Notify::new(),
        }
    }

    pub(super) fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().expect("nobody panics while holding the standing")
    }

    /// Asks the renewing task to look at once.
    pub(super) fn look(&self) {
        self.look.notify_one();
    }

    /// Asks for it if there is something to give up.
    pub(super) fn look_if_done(&self) {
        if !self.standing().done_with().is_empty() {
            self.look();
        }
    }

    /// A partition turned out to be lost: nothing more is delivered from it, and all are looked at again.
    pub(super) fn lost(&self, partition: u64, epoch: &str) {
        let mut standing = self.standing();
        if standing.held.get(&partition).is_some_and(|held| held.epoch == epoch) {
            standing.lose(partition);
        }
        drop(standing);
        self.look();
    }

    /// Renews until it is stopped. Whoever starts it has just renewed.
    pub(super) async fn keep(self: Arc<Self>) {
        let mut wait = self.lease / 3;
        loop {
            // Waiting ends early when there is a reason to look.
            let _ = tokio::time::timeout(wait, self.look.notified()).await;
            wait = match self.renew().await {
                Ok(true) => Duration::ZERO,
                Ok(false) => self.lease / 3,
                Err(error) => {
                    tracing::warn!(
                        ?error,
                        group = self.group,
                        "a lease in Redis was not renewed; trying again"
                    );
                    self.lease / 10
                }
            };
        }
    }

    /// Renews once. `true`: something can be given up right now.
    pub(super) async fn renew(&self) -> Result<bool, Error> {
        let mut call = Call::new(&BEAT, &self.tag);
        call.arg(&self.group).arg(&self.name).arg(millis(self.lease)).arg(self.topics.len());
        for topic in &self.topics {
            call.arg(&**topic);
        }
        {
            let mut standing = self.standing();
            let released = standing.done_with();
            call.arg(released.len());
            for partition in released {
                // Forgotten before it is released, so that nothing can be delivered from it in between.
                let Some(held) = standing.held.remove(&partition) else { continue };
                call.arg(format!("{}:{}", held.topic, held.number)).arg(held.epoch);
            }
        }
        let answer = self.heart.invoke(&call).await?;
        let (generation, shares) =
            shares(answer).ok_or_else(|| Error::Unanswered("its answer makes no sense".to_owned()))?;
        let again = self.apply(generation, shares);
        self.heard.notify_one();
        Ok(again)
    }

    fn apply(&self, generation: EntryId, shares: Vec<Share>) -> bool {
        let mut standing = self.standing();
        standing.generation = generation;
        let mut before = std::mem::take(&mut standing.held);
        for Share { fair, held } in shares {
            let mut share = Vec::with_capacity(held.len());
            for Owned { topic, number, epoch } in held {
                let Some(place) = self.topics.iter().position(|known| **known == *topic) else { continue };
                let partition = place as u64 * PARTITIONS + number;
                let known = before.remove(&partition).filter(|known| known.epoch == epoch);
                let held = known.unwrap_or_else(|| {
                    standing.unfinished.forget(partition);
                    let topic = Arc::clone(&self.topics[place]);
                    Held { topic, number, epoch, next: EntryId::default(), leaving: false }
                });
                share.push((partition, held));
            }
            // Given up first: what was to leave anyway, then what can leave at once.
            let busy = standing.busy();
            share.sort_by_key(|(partition, held)| (held.leaving, !busy.contains(partition), *partition));
            for (rank, (_, held)) in share.iter_mut().enumerate() {
                held.leaving = rank >= fair;
            }
            standing.held.extend(share);
        }
        // What is left belongs to somebody else now.
        before.into_keys().for_each(|partition| standing.unfinished.forget(partition));
        !standing.done_with().is_empty()
    }

    /// Leaves the group. Nobody may renew after it.
    pub(super) async fn leave(&self) -> Result<(), Error> {
        let mut call = Call::new(&LEAVE, &self.tag);
        call.arg(&self.group).arg(&self.name);
        self.heart.invoke(&call).await.map(drop)
    }
}

/// The partitions that this member holds among members that ask for the same topics.
struct Share {
    /// How many it should hold. It may hold more until it is done with them.
    fair: usize,
    held: Vec<Owned>,
}

struct Owned {
    topic: String,
    number: u64,
    epoch: String,
}

/// What a beat answers.
fn shares(answer: Value) -> Option<(EntryId, Vec<Share>)> {
    let mut parts = list(answer)?.into_iter();
    let generation = text(parts.next()?)?.parse().ok()?;
    let share = |value: Value| {
        let [fair, held] = <[Value; 2]>::try_from(list(value)?).ok()?;
        let owned = |value: Value| {
            let [topic, partition, epoch] = <[Value; 3]>::try_from(list(value)?).ok()?;
            let number = u64::try_from(number(&partition)?).ok()?;
            Some(Owned { topic: text(topic)?, number, epoch: text(epoch)? })
        };
        let held = list(held)?.into_iter().map(owned).collect::<Option<_>>()?;
        Some(Share { fair: usize::try_from(number(&fair)?).ok()?, held })
    };
    Some((generation, parts.map(share).collect::<Option<_>>()?))
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
