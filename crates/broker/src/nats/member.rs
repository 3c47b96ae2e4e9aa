//! One member's standing in its group, shared by the subscription that hands out, the tasks that fetch and the task that
//! renews.
//!
//! The group's record decides who holds what; this is what the member last heard. A partition that it should give up
//! is no longer handed out from, and leaves once all that was handed out from it is acknowledged or given back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_nats::jetstream::kv;
use bytes::Bytes;
use futures::future::join_all;
use tokio::sync::Notify;

use super::Inner;
use super::acknowledge::{IN_PROGRESS, Item, NAK, tell};
use super::error::Trouble;
use super::fetch::{self, Fetching, Slot};
use super::roster::{Applicant, Roster, Share, Watch};
use super::shelf::{Count, Shelf};
use crate::unfinished::Unfinished;

/// Times that the record is rewritten before another member is let go first.
const TRIES: usize = 50;

/// A partition in hand.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) topic: Arc<str>,
    number: u32,
    epoch: u64,
    /// To be given up: nothing more is handed out from it.
    pub(super) leaving: bool,
    /// Nothing, until its consumer has been seen.
    pub(super) shelf: Option<Shelf<Item>>,
    /// When its consumer was made: another time is another consumer.
    made: String,
    /// Bytes of the largest message that came.
    pub(super) largest: usize,
    pub(super) fetching: Fetching,
}

#[derive(Debug, Default)]
pub(super) struct Standing {
    pub(super) held: BTreeMap<u64, Held>,
    pub(super) out: Unfinished<Item>,
    /// Acknowledged by the caller, and not yet confirmed by the server.
    pub(super) owed: Vec<Item>,
    /// By this process's clock, counted from before the renewal was asked for.
    pub(super) locked_until: Option<Instant>,
    /// Why the last look or fetch failed.
    pub(super) trouble: Option<Trouble>,
    /// The partition that was read last: the next ones come first, so that none waits behind a busy one.
    pub(super) after: u64,
    /// Given up, and not yet written down.
    released: Vec<(String, u32, u64)>,
    beaten: Option<Instant>,
    told: Option<Instant>,
    watch: Watch,
}

impl Standing {
    /// Handed out from this partition, beyond a sequence number.
    fn out_beyond(&self, partition: u64, floor: i64) -> usize {
        let of = |item: &&Item| item.position.partition == partition && item.position.offset > floor;
        self.out.iter().filter(of).count()
    }

    pub(super) fn idle(&self, partition: u64) -> bool {
        self.out_beyond(partition, i64::MIN) == 0
    }

    fn forget(&mut self, partition: u64) {
        self.held.remove(&partition);
        self.out.forget(partition);
        self.owed.retain(|item| item.position.partition != partition);
    }
}

/// A member of a group.
pub(super) struct Member {
    pub(super) inner: Arc<Inner>,
    pub(super) group: String,
    applicant: Applicant,
    bucket: kv::Store,
    key: String,
    standing: Mutex<Standing>,
    /// Rung when the renewing task should look at once.
    pub(super) look: Notify,
    /// Rung when there may be something to hand out.
    pub(super) arrived: Notify,
}

impl Member {
    pub(super) fn new(inner: Arc<Inner>, group: &str, topics: Vec<String>, bucket: kv::Store) -> Self {
        let applicant = Applicant {
            id: uuid::Uuid::now_v7().to_string(),
            lease: inner.config.lease,
            topics,
            partitions: inner.config.partitions,
        };
        Self {
            inner,
            key: super::slug(&[group]),
            group: group.to_owned(),
            applicant,
            bucket,
            standing: Mutex::default(),
            look: Notify::new(),
            arrived: Notify::new(),
        }
    }

    pub(super) fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lease(&self) -> Duration {
        self.applicant.lease
    }

    /// Renews until it is stopped. Whoever starts it has just renewed.
    pub(super) async fn keep(self: Arc<Self>) {
        let pause = (self.lease() / 4).min(Duration::from_secs(1));
        loop {
            // Waiting ends early when there is a reason to look.
            let _ = tokio::time::timeout(pause, self.look.notified()).await;
            if let Err(trouble) = self.renew().await {
                tracing::warn!(%trouble, group = self.group, "the lease of a member was not renewed; trying again");
            }
            // Also when it failed: whoever waits for messages is to hear of it.
            self.arrived.notify_one();
        }
    }

    /// Renews once: shows that it lives, gives up what it should, takes what is due.
    pub(super) async fn renew(self: &Arc<Self>) -> Result<(), Trouble> {
        self.say_at_work().await;
        self.give_up().await;
        let renewed = self.rewrite_as_member().await;
        let mut standing = self.standing();
        standing.trouble = renewed.as_ref().err().cloned();
        drop(standing);
        renewed
    }

    async fn rewrite_as_member(self: &Arc<Self>) -> Result<(), Trouble> {
        for _ in 0..TRIES {
            let asked = Instant::now();
            let (mut roster, revision) = self.read().await?;
            if let Some(others) = roster.disagrees(&self.applicant) {
                let (group, ours) = (&self.group, self.applicant.partitions);
                return Err(Trouble::Refused(format!(
                    "other members of the group `{group}` have partitions={others}, and here it is {ours}"
                )));
            }
            let before = roster.clone();
            let (beat, dead, released) = {
                let mut standing = self.standing();
                let beat = standing.beaten.is_none_or(|beaten| beaten.elapsed() >= self.lease() / 4);
                let dead = standing.watch.dead(&roster, asked);
                (beat, dead, standing.released.clone())
            };
            let shares = roster.renew(&self.applicant, &dead, &released, beat);
            if roster != before && !self.write(&roster, revision).await? {
                continue;
            }
            let mut standing = self.standing();
            if beat {
                standing.beaten = Some(asked);
                standing.locked_until = Some(asked + self.lease());
            }
            standing.released.clear();
            drop(standing);
            self.apply(shares);
            return Ok(());
        }
        Err(Trouble::Away("other members of the group are always faster".to_owned()))
    }

    /// Takes up what the record says: new partitions are fetched from, lost ones forgotten.
    fn apply(self: &Arc<Self>, shares: Vec<Share>) {
        let mut standing = self.standing();
        let mut kept = Vec::new();
        for Share { topic, held, fair } in shares {
            let mut share = Vec::with_capacity(held.len());
            for (number, epoch) in held {
                let partition = self.partition(&topic, number);
                let known = standing.held.get(&partition).filter(|known| known.epoch == epoch);
                if known.is_none() {
                    standing.forget(partition);
                    let slot = Slot { partition, topic: topic.clone(), number };
                    let fetching = fetch::start(Arc::clone(self), slot);
                    let held = Held {
                        topic: topic.as_str().into(),
                        number,
                        epoch,
                        leaving: false,
                        shelf: None,
                        made: String::new(),
                        largest: 0,
                        fetching,
                    };
                    standing.held.insert(partition, held);
                }
                share.push((standing.held[&partition].leaving, standing.idle(partition), partition));
            }
            // Given up first: what was to leave anyway, then what can leave at once.
            share.sort_unstable();
            for (place, (.., partition)) in share.iter().enumerate() {
                if let Some(held) = standing.held.get_mut(partition) {
                    held.leaving = place >= fair;
                }
            }
            kept.extend(share.into_iter().map(|(.., partition)| partition));
        }
        let lost: Vec<u64> = standing.held.keys().filter(|held| !kept.contains(held)).copied().collect();
        for partition in lost {
            tracing::info!(group = self.group, partition, "a partition was lost to another member");
            standing.forget(partition);
        }
        if standing.held.iter().any(|(partition, held)| held.leaving && standing.idle(*partition)) {
            self.look.notify_one();
        }
    }

    /// Each partition of each topic has a number of its own in this subscription.
    fn partition(&self, topic: &str, number: u32) -> u64 {
        let topics = &self.applicant.topics;
        let place = topics.iter().position(|name| name == topic).unwrap_or(topics.len());
        place as u64 * u64::from(self.applicant.partitions) + u64::from(number)
    }

    /// Stops fetching from partitions that should leave and of which nothing is out, and returns what came of them.
    async fn give_up(&self) {
        let leaving: Vec<(u64, Fetching)> = {
            let mut standing = self.standing();
            let idle: Vec<u64> = standing.held.keys().copied().filter(|at| standing.idle(*at)).collect();
            let leaving = standing.held.iter_mut().filter(|(at, held)| held.leaving && idle.contains(at));
            leaving.map(|(at, held)| (*at, std::mem::take(&mut held.fetching))).collect()
        };
        let partitions: Vec<u64> = leaving.iter().map(|(partition, _)| *partition).collect();
        join_all(leaving.into_iter().map(|(_, fetching)| fetching.stop())).await;
        let mut returned = Vec::new();
        {
            let mut standing = self.standing();
            for partition in partitions {
                let Some(held) = standing.held.remove(&partition) else { continue };
                standing.released.push((held.topic.to_string(), held.number, held.epoch));
                returned.extend(held.shelf.into_iter().flat_map(Shelf::into_waiting));
            }
        }
        // If this fails they come again all the same, only later.
        let _ = self.tell(&returned, NAK).await;
    }

    /// Tells the server that everything that came is still being worked on: else it would deliver it again.
    async fn say_at_work(&self) {
        let items: Vec<Item> = {
            let mut standing = self.standing();
            let due = standing.told.is_none_or(|told| told.elapsed() >= self.lease() / 4);
            // Who has lost its lease must not keep from others what they are waiting for.
            let lasts = standing.locked_until.is_some_and(|until| Instant::now() < until);
            if !due || !lasts {
                return;
            }
            standing.told = Some(Instant::now());
            let shelves = standing.held.values().filter_map(|held| held.shelf.as_ref());
            shelves.flat_map(Shelf::waiting).chain(standing.out.iter()).cloned().collect()
        };
        let Ok(context) = self.inner.link.connected(&self.inner.config).await else { return };
        let client = context.client();
        for item in items {
            let _ = client.publish(item.reply, Bytes::from_static(IN_PROGRESS)).await;
        }
    }

    pub(super) async fn tell(&self, items: &[Item], word: &'static [u8]) -> Result<(), Trouble> {
        if items.is_empty() {
            return Ok(());
        }
        let context = self.inner.link.connected(&self.inner.config).await?;
        tell(&context.client(), items, word, self.inner.config.timeout).await
    }

    /// Leaves the group: returns all that came, then gives up everything.
    pub(super) async fn leave(&self) {
        let fetching: Vec<Fetching> =
            self.standing().held.values_mut().map(|held| std::mem::take(&mut held.fetching)).collect();
        join_all(fetching.into_iter().map(Fetching::stop)).await;
        let items = {
            let mut standing = self.standing();
            let held = std::mem::take(&mut standing.held);
            let shelves = held.into_values().filter_map(|held| held.shelf);
            let mut items: Vec<Item> = shelves.flat_map(Shelf::into_waiting).collect();
            items.extend(standing.out.iter().cloned());
            standing.out.clear();
            items.sort_by_key(|item| item.position);
            items
        };
        let mut left = self.tell(&items, NAK).await;
        if left.is_ok() {
            left = self.rewrite_without().await;
        }
        if let Err(trouble) = left {
            tracing::warn!(%trouble, group = self.group, "could not leave the group; its lease will run out");
        }
    }

    async fn rewrite_without(&self) -> Result<(), Trouble> {
        for _ in 0..TRIES {
            let (mut roster, revision) = self.read().await?;
            roster.leave(&self.applicant.id);
            if self.write(&roster, revision).await? {
                return Ok(());
            }
        }
        Err(Trouble::Away("other members of the group are always faster".to_owned()))
    }

    async fn read(&self) -> Result<(Roster, u64), Trouble> {
        self.inner.link.connected(&self.inner.config).await?;
        let entry = self.bucket.entry(self.key.as_str()).await;
        let Some(entry) = entry.map_err(|error| Trouble::Away(error.to_string()))? else {
            return Ok((Roster::default(), 0));
        };
        if entry.operation != kv::Operation::Put {
            return Ok((Roster::default(), entry.revision));
        }
        let unreadable = |error: serde_json::Error| {
            let (key, bucket) = (&self.key, &self.bucket.name);
            Trouble::Refused(format!("the entry `{key}` of the bucket `{bucket}` cannot be read: {error}"))
        };
        Ok((serde_json::from_slice(&entry.value).map_err(unreadable)?, entry.revision))
    }

    /// Replaces the record. `false`: somebody else was faster.
    async fn write(&self, roster: &Roster, revision: u64) -> Result<bool, Trouble> {
        let text = serde_json::to_vec(roster).map_err(|error| Trouble::Refused(error.to_string()))?;
        match self.bucket.update(&self.key, text.into(), revision).await {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == kv::UpdateErrorKind::WrongLastRevision => Ok(false),
            Err(error) => Err(Trouble::Away(error.to_string())),
        }
    }

    /// The consumer of a partition has been seen: as it was, or another of the same name.
    pub(super) fn opened(&self, partition: u64, made: String, count: Count) {
        let mut standing = self.standing();
        let out = standing.out_beyond(partition, count.floor);
        let Some(held) = standing.held.get_mut(&partition) else { return };
        let same = held.made == made;
        match held.shelf.as_mut().filter(|_| same) {
            Some(shelf) => shelf.resume(count, out),
            None => {
                held.shelf = Some(Shelf::new(count));
                held.made = made;
                standing.out.forget(partition);
            }
        }
        drop(standing);
        self.arrived.notify_one();
    }

    /// What the server counts, asked because a delivery may be missing.
    pub(super) fn compare(&self, partition: u64, count: Count) {
        let mut standing = self.standing();
        let out = standing.out_beyond(partition, count.floor);
        if let Some(shelf) = standing.held.get_mut(&partition).and_then(|held| held.shelf.as_mut()) {
            shelf.compare(count, out);
        }
        drop(standing);
        self.arrived.notify_one();
    }
}
