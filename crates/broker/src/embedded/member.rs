//! One member's standing in its group, shared by the subscription that reads and the task that renews.
//!
//! The file decides who owns what; this is what the member last heard, and how far it has read ahead of what
//! is acknowledged. A partition that it should give up is no longer read, and leaves once all that was
//! delivered from it is acknowledged or given back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use sqlite::{Neighbours, Presence};
use tokio::sync::Notify;

use super::share::{self, Renewal, Renewed, Share, UNKNOWN};

/// A partition in hand.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) topic: Arc<str>,
    pub(super) epoch: i64,
    /// The next offset to deliver.
    pub(super) next: i64,
    /// Everything before it is acknowledged.
    pub(super) committed: i64,
    /// To be given up: nothing more is delivered from it.
    pub(super) leaving: bool,
}

impl Held {
    fn idle(&self) -> bool {
        self.next == self.committed
    }
}

/// What the member last heard from the file.
#[derive(Debug)]
pub(super) struct Standing {
    pub(super) member: Option<i64>,
    pub(super) generation: i64,
    pub(super) held: BTreeMap<u32, Held>,
    /// By this process's clock, counted from before the renewal was asked for.
    pub(super) locked_until: Option<Instant>,
    /// Why the last renewal failed.
    pub(super) trouble: Option<sqlite::Error>,
}

/// A member of a group.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) file: Arc<sqlite::File>,
    pub(super) group: i64,
    topics: Vec<String>,
    lease: Duration,
    /// Gone with the broker: this must not keep the lock.
    presence: Weak<Presence>,
    neighbours: Neighbours,
    standing: Mutex<Standing>,
    /// Rung when the renewing task should look at once.
    look: Notify,
    /// Rung when there is more to read from.
    pub(super) taken: Notify,
}

impl Member {
    pub(super) fn new(
        file: Arc<sqlite::File>,
        group: i64,
        topics: Vec<String>,
        lease: Duration,
        presence: &Arc<Presence>,
    ) -> Self {
        let standing = Standing {
            member: None,
            generation: UNKNOWN,
            held: BTreeMap::new(),
            locked_until: None,
            trouble: None,
        };
        Self {
            file,
            group,
            topics,
            lease,
            presence: Arc::downgrade(presence),
            neighbours: presence.neighbours(),
            standing: Mutex::new(standing),
            look: Notify::new(),
            taken: Notify::new(),
        }
    }

    pub(super) fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().expect("nobody panics while holding the standing")
    }

    /// Asks the renewing task to look at once.
    pub(super) fn look(&self) {
        self.look.notify_one();
    }

    /// A partition turned out to be lost: nothing more is delivered from it, and all are looked at again.
    pub(super) fn lost(&self, partition: u32, epoch: i64) {
        let mut standing = self.standing();
        if standing.held.get(&partition).is_some_and(|held| held.epoch == epoch) {
            standing.held.remove(&partition);
        }
        standing.generation = UNKNOWN;
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
                Err(sqlite::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(%error, "a lease of the embedded broker was not renewed; trying again");
                    self.lease / 10
                }
            };
        }
    }

    /// Renews once. `true`: something can be given up right now.
    pub(super) async fn renew(&self) -> Result<bool, sqlite::Error> {
        let dead = self.neighbours.dead();
        let renewal = self.renewal(dead.clone());
        let presence = Weak::clone(&self.presence);
        let asked = Instant::now();
        let write = self.file.write(move |connection| {
            // Asked under the lock: a broker that is gone must not come back after it was buried.
            if presence.strong_count() == 0 {
                return Err(sqlite::Error::Closed);
            }
            share::renew(connection, &renewal)
        });
        match write.await {
            Ok(renewed) => {
                self.neighbours.clear(&dead);
                Ok(self.apply(renewed, asked + self.lease))
            }
            Err(error) => {
                self.standing().trouble = Some(error.clone());
                Err(error)
            }
        }
    }

    fn renewal(&self, dead: Vec<String>) -> Renewal {
        let mut standing = self.standing();
        let released: Vec<_> = standing
            .held
            .iter()
            .filter(|(_, held)| held.leaving && held.idle())
            .map(|(id, held)| (*id, held.epoch))
            .collect();
        // Forgotten before they are released, so that nothing can be delivered from them in between.
        for (id, _) in &released {
            standing.held.remove(id);
            standing.generation = UNKNOWN;
        }
        Renewal {
            group: self.group,
            member: standing.member,
            topics: self.topics.clone(),
            presence: self.neighbours.own().to_owned(),
            lease_ms: i64::try_from(self.lease.as_millis()).unwrap_or(i64::MAX),
            generation: standing.generation,
            released,
            dead,
        }
    }

    fn apply(&self, renewed: Renewed, locked_until: Instant) -> bool {
        let mut standing = self.standing();
        standing.member = Some(renewed.member);
        standing.generation = renewed.generation;
        standing.locked_until = Some(locked_until);
        standing.trouble = None;
        let Some(shares) = renewed.shares else { return false };
        let mut before = std::mem::take(&mut standing.held);
        let mut taken = false;
        for Share { held, fair } in shares {
            let mut share: Vec<(u32, Held)> = Vec::with_capacity(held.len());
            for partition in held {
                let known = before.remove(&partition.id).filter(|known| known.epoch == partition.epoch);
                taken |= known.is_none();
                let fresh = || Held {
                    topic: partition.topic.into(),
                    epoch: partition.epoch,
                    next: partition.committed,
                    committed: partition.committed,
                    leaving: false,
                };
                share.push((partition.id, known.unwrap_or_else(fresh)));
            }
            // Given up first: what was to leave anyway, then what can leave at once.
            share.sort_by_key(|(id, held)| (held.leaving, held.idle(), *id));
            for (number, (_, held)) in share.iter_mut().enumerate() {
                held.leaving = number >= fair;
            }
            standing.held.extend(share);
        }
        let again = standing.held.values().any(|held| held.leaving && held.idle());
        drop(standing);
        if taken {
            self.taken.notify_one();
        }
        again
    }
}
