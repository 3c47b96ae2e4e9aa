//! What a group did not acknowledge in time: sent again, a few times, and then told.
//!
//! A group that is behind is not a group that forgot: what it has not come to yet waits in the broker, and copies would only
//! make it later. So many may be under way again when the group has acknowledged a later message of their key: it has
//! passed them by. Of others only the oldest few may, to find out whether anybody listens.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use message::{Schedule, Status};
use store::{Error, Filter, Page, Record, Seq, Store};
use tokio::sync::watch;

use crate::Shared;
use crate::route::Settle;

/// How long a group may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patience {
    /// The group.
    pub group: String,
    /// From the confirmation of a message to the group's acknowledgement.
    pub timeout: Duration,
    /// Between two looks.
    pub check_every: Duration,
    /// After so many a message is left as it is, and told of.
    pub max_redeliveries: u32,
    /// What was written longer ago is not sent again: those who have done it may have forgotten that.
    pub remembered: Duration,
}

/// How it stands with a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overdue {
    /// The group.
    pub group: String,
    /// Messages that it has not acknowledged in time, as of the last look at all of them.
    pub overdue: u64,
    /// Of those, sent again as often as they may be.
    pub given_up: u64,
    /// Messages that this relay has sent again since it started.
    pub redelivered: u64,
}

/// Messages in a page.
const PAGE: usize = 500;

/// Pages in one look; the next goes on from there.
const PAGES: usize = 4;

/// Messages that may be under way again to a group that has acknowledged nothing later.
const PROBES: usize = 100;

/// How long a message that was sent again and is not confirmed counts as under way, at least.
const AGAIN: Duration = Duration::from_secs(60);

/// Messages that may be under way again to a group that has passed them by.
const PASSED_BY: usize = 1_000;

/// The newest messages, among which the last ones are sought that a group has acknowledged.
const NEWEST: usize = 200;

/// How it stands with all groups.
#[derive(Default)]
pub(crate) struct Board(Mutex<BTreeMap<String, Overdue>>);

impl Board {
    /// Of these groups, of whom nothing is known yet.
    pub(crate) fn of(patience: &[Patience]) -> Self {
        let board = Self::default();
        for Patience { group, .. } in patience {
            board.note(group, |_| {});
        }
        board
    }

    pub(crate) fn views(&self) -> Vec<Overdue> {
        self.0.lock().expect("nothing panics while it holds the board").values().cloned().collect()
    }

    fn note(&self, group: &str, change: impl FnOnce(&mut Overdue)) {
        let mut groups = self.0.lock().expect("nothing panics while it holds the board");
        let fresh = || Overdue { group: group.to_owned(), overdue: 0, given_up: 0, redelivered: 0 };
        change(groups.entry(group.to_owned()).or_insert_with(fresh));
    }
}

/// Looks after one group for as long as the relay lives.
pub(crate) async fn watch(patience: Patience, shared: Arc<Shared>) {
    let mut stopping = shared.stopping.subscribe();
    let mut watcher = Watcher { patience, shared, again: HashMap::new(), sweep: Sweep::default() };
    let group = watcher.patience.group.clone();
    while pause(watcher.patience.check_every, &mut stopping).await {
        if let Err(error) = watcher.look().await {
            tracing::warn!(group, %error, "cannot see what is not acknowledged; looking again later");
            watcher.sweep = Sweep::default();
        }
    }
}

/// Answers whether to go on.
async fn pause(wait: Duration, stopping: &mut watch::Receiver<bool>) -> bool {
    tokio::select! {
        () = tokio::time::sleep(wait) => true,
        _ = stopping.wait_for(|stopping| *stopping) => false,
    }
}

struct Watcher {
    patience: Patience,
    shared: Arc<Shared>,
    /// Sent again by us, and when: not confirmed since, or not overdue again yet.
    again: HashMap<Seq, Instant>,
    sweep: Sweep,
}

/// One way through all that a group has not acknowledged, from the oldest on, in several looks if it is much.
#[derive(Default)]
struct Sweep {
    after: Option<i64>,
    overdue: u64,
    given_up: u64,
    /// Sent again, and not overdue again yet.
    under_way: usize,
}

/// The last message of each topic and key that a group has acknowledged.
type LastDone = HashMap<(String, Option<String>), Seq>;

impl Watcher {
    async fn look(&mut self) -> Result<(), Error> {
        let (store, group) = (&self.shared.store, &self.patience.group);
        if self.sweep.after.is_none() {
            let asked: Vec<Seq> = self.again.keys().copied().collect();
            let unsent: HashSet<Seq> = store.unsent(&asked).await?.into_iter().collect();
            // Some of the unsent may be Dead by now: they count for a while only.
            let timeout = self.patience.timeout;
            self.again.retain(|seq, since| {
                let limit = if unsent.contains(seq) { timeout.max(AGAIN) } else { timeout };
                since.elapsed() < limit
            });
            self.sweep = Sweep { under_way: self.again.len(), ..Sweep::default() };
        }
        let last_done = last_done(&**store, group).await?;
        let filter = Filter { unacknowledged_by: Some(group.clone()), ..Filter::default() };
        for _ in 0..PAGES {
            let page = Page { after: self.sweep.after, limit: PAGE, newest_first: false };
            let found = self.shared.store.list(&filter, page).await?;
            let now = Utc::now();
            let mut young = false;
            for record in found.items {
                if *self.shared.stopping.borrow() {
                    return Ok(());
                }
                young = age(now, Some(record.written_at)) < self.patience.timeout;
                if young {
                    break;
                }
                self.consider(&record, &last_done, now).await?;
            }
            // What was written after a young one is younger still.
            self.sweep.after = found.next.filter(|_| !young);
            if self.sweep.after.is_none() {
                std::mem::take(&mut self.sweep).end(&self.patience, &self.shared);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Sends `record` again if it is overdue and may be.
    async fn consider(
        &mut self,
        record: &Record,
        last_done: &LastDone,
        now: DateTime<Utc>,
    ) -> Result<(), Error> {
        let (Patience { group, timeout, .. }, message) = (&self.patience, &record.message);
        let deliveries = record.state.delivery;
        if age(now, record.sent_at) < *timeout {
            // By another relay, or by this one before it was started anew.
            let others = deliveries > 0 && !self.again.contains_key(&record.seq);
            self.sweep.under_way += usize::from(others);
            return Ok(());
        }
        self.sweep.overdue += 1;
        let route = self.shared.routes.of(&message.topic);
        let once = route.is_none_or(|way| way.route.settle != Settle::After);
        let forgotten = age(now, Some(record.written_at)) >= self.patience.remembered;
        let over = message.schedule(now) != Schedule::Now;
        if deliveries >= self.patience.max_redeliveries || once || forgotten || over {
            self.sweep.given_up += 1;
            return Ok(());
        }
        let last = last_done.get(&(message.topic.clone(), message.key.clone()));
        let room = if last.is_some_and(|last| *last > record.seq) { PASSED_BY } else { PROBES };
        if self.sweep.under_way >= room {
            return Ok(());
        }
        let (id, delivery) = (message.id, deliveries + 1);
        let why = format!("the group `{group}` did not acknowledge it within {timeout:?}");
        if self.shared.store.redeliver(id, group, &why).await? {
            if self.again.insert(record.seq, Instant::now()).is_none() {
                self.sweep.under_way += 1;
            }
            tracing::info!(message_id = %id, group, delivery, "not acknowledged in time: sent again");
            self.shared.overdue.note(group, |group| group.redelivered += 1);
        }
        Ok(())
    }
}

/// How long ago that was; what never was is young.
fn age(now: DateTime<Utc>, then: Option<DateTime<Utc>>) -> Duration {
    then.and_then(|then| (now - then).to_std().ok()).unwrap_or_default()
}

impl Sweep {
    fn end(self, patience: &Patience, shared: &Shared) {
        let Self { overdue, given_up, .. } = self;
        let mut known = given_up;
        shared.overdue.note(&patience.group, |group| {
            known = group.given_up;
            (group.overdue, group.given_up) = (overdue, given_up);
        });
        if given_up > known {
            let group = &patience.group;
            tracing::warn!(
                group,
                messages = given_up,
                redeliveries = patience.max_redeliveries,
                "published and not processed, though sent again: `postrider list --unacknowledged-by {group}` shows them"
            );
        }
    }
}

/// The last of each topic and key that the group has acknowledged, among the newest messages.
async fn last_done(store: &dyn Store, group: &str) -> Result<LastDone, Error> {
    let filter = Filter { group: Some(group.to_owned()), statuses: vec![Status::Sent], ..Filter::default() };
    let page = Page { after: None, limit: NEWEST, newest_first: true };
    let mut last = LastDone::new();
    for record in store.list(&filter, page).await?.items {
        if record.acknowledgements.iter().any(|done| done.group == group) {
            // The newest come first.
            last.entry((record.message.topic, record.message.key)).or_insert(record.seq);
        }
    }
    Ok(last)
}
