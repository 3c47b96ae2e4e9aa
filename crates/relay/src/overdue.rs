//! What a group did not acknowledge in time: sent again, a few times, and then told.
//!
//! A group that is behind is not a group that forgot: what it has not come to yet waits in the broker, and copies would only
//! make it later. So a message is sent again without more ado when its group has acknowledged a later one. Of others only
//! the oldest few are, to find out whether anybody listens.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::{DateTime, Utc};
use message::Status;
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

/// The newest messages, among which the last one is sought that a group has acknowledged.
const NEWEST: usize = 200;

/// How it stands with all groups.
#[derive(Default)]
pub(crate) struct Board(Mutex<BTreeMap<String, Overdue>>);

impl Board {
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
    let mut sweep = Sweep::default();
    shared.overdue.note(&patience.group, |_| {});
    while pause(patience.check_every, &mut stopping).await {
        if let Err(error) = sweep.go_on(&patience, &shared).await {
            tracing::warn!(group = patience.group, %error, "cannot see what is not acknowledged; looking again later");
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

/// One way through all that a group has not acknowledged, from the oldest on, in several looks if it is much.
#[derive(Default)]
struct Sweep {
    after: Option<i64>,
    overdue: u64,
    given_up: u64,
    /// Sent again, and not overdue again yet.
    probes: usize,
}

impl Sweep {
    async fn go_on(&mut self, patience: &Patience, shared: &Shared) -> Result<(), Error> {
        let last_done = last_done(&*shared.store, &patience.group).await?;
        let filter = Filter { unacknowledged_by: Some(patience.group.clone()), ..Filter::default() };
        for _ in 0..PAGES {
            let page = Page { after: self.after, limit: PAGE, newest_first: false };
            let found = shared.store.list(&filter, page).await?;
            let now = Utc::now();
            let mut young = false;
            for record in found.items {
                young = !self.look(&record, patience, last_done, now, shared).await?;
                if young {
                    break;
                }
            }
            self.after = found.next.filter(|_| !young);
            if self.after.is_none() {
                std::mem::take(self).end(patience, shared);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Answers whether older messages may come after this one.
    async fn look(
        &mut self,
        record: &Record,
        patience: &Patience,
        last_done: Option<Seq>,
        now: DateTime<Utc>,
        shared: &Shared,
    ) -> Result<bool, Error> {
        let deliveries = record.state.delivery;
        let age = record.sent_at.and_then(|at| (now - at).to_std().ok()).unwrap_or_default();
        if age < patience.timeout {
            self.probes += usize::from(deliveries > 0);
            // What was sent once is sent in the order of writing, nearly.
            return Ok(deliveries > 0);
        }
        self.overdue += 1;
        if deliveries >= patience.max_redeliveries {
            self.given_up += 1;
            return Ok(true);
        }
        let passed_by = last_done.is_some_and(|last| last > record.seq);
        if !passed_by && self.probes >= PROBES {
            return Ok(true);
        }
        let route = shared.routes.of(&record.message.topic);
        if route.is_none_or(|way| way.route.settle == Settle::Before) {
            return Ok(true);
        }
        let (id, group) = (record.message.id, &patience.group);
        let why = format!("the group `{group}` did not acknowledge it within {:?}", patience.timeout);
        if shared.store.redeliver(id, group, &why).await? {
            self.probes += 1;
            let delivery = deliveries + 1;
            tracing::info!(message_id = %id, group, delivery, "not acknowledged in time: sent again");
            shared.overdue.note(group, |group| group.redelivered += 1);
        }
        Ok(true)
    }

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

/// The last of the newest messages that the group has acknowledged.
async fn last_done(store: &dyn Store, group: &str) -> Result<Option<Seq>, Error> {
    let filter = Filter { group: Some(group.to_owned()), statuses: vec![Status::Sent], ..Filter::default() };
    let page = Page { after: None, limit: NEWEST, newest_first: true };
    let newest = store.list(&filter, page).await?.items;
    let done = |record: &&Record| record.acknowledgements.iter().any(|done| done.group == group);
    Ok(newest.iter().find(done).map(|record| record.seq))
}
