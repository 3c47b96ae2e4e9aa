//! An inbox that asks Redis first whether it has seen a message; the store decides. Where nothing has come twice for a
//! while, Redis is asked now and then only, until something does.
//!
//! Redis only ever answers "seen", and only of what the store has committed before. So all that Redis can do wrong is
//! to forget: a flush, a failover or an outage costs a look into the store, and doubles nothing. To know too much it
//! would have to belong to another store; that is what [`Config::scope`] is for.

mod seen;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use message::MessageId;
use uuid::Uuid;

use crate::{
    Arrival, Error, Handled, Inbox, InboxCounts, InboxRules, Page, Paged, Parked, Processed, Receipt,
    Remembered, Reservation, Store, Work,
};
use seen::{Print, Seen};

/// Which Redis, and what it may answer for.
#[derive(Clone)]
pub struct Config {
    /// The Redis: `redis://host:6379/0`.
    pub url: String,
    /// Names the store that decides. No two stores may share it, and a store that was emptied or went back to a backup
    /// needs another: it no longer knows all that was done under this one.
    pub scope: String,
    /// How long ids are kept, until [`Inbox::forget_ids`] says otherwise.
    pub keep: Duration,
    /// A Redis that takes longer than this is left alone for a while.
    pub patience: Duration,
}

impl Config {
    /// Ids of a week, and a tenth of a second for Redis.
    pub fn new(url: impl Into<String>, scope: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            scope: scope.into(),
            keep: Duration::from_secs(7 * 24 * 60 * 60),
            patience: Duration::from_millis(100),
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the URL: it may hold a password.
        f.debug_struct("Config")
            .field("scope", &self.scope)
            .field("keep", &self.keep)
            .field("patience", &self.patience)
            .finish_non_exhaustive()
    }
}

/// The inbox of a store, behind what Redis has seen.
pub struct Hybrid {
    store: Arc<dyn Store>,
    seen: Arc<Seen>,
}

impl fmt::Debug for Hybrid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hybrid").field("seen", &self.seen).finish_non_exhaustive()
    }
}

impl Hybrid {
    /// The inbox of `store` behind the Redis of `config`. Nothing is connected yet.
    ///
    /// # Errors
    /// When it could never work, with what to change.
    pub fn new(store: Arc<dyn Store>, config: &Config) -> Result<Self, Error> {
        Ok(Self { store, seen: Arc::new(Seen::new(config)?) })
    }

    /// Parts `arrivals` into those that Redis has seen and those that the store must look at.
    async fn part(&self, group: &str, arrivals: Vec<Arrival>, rules: &InboxRules) -> Result<Parted, Error> {
        let prints: Vec<Print> = arrivals.iter().map(Print::of).collect();
        let looked = self.seen.look(group, &prints).await;
        let asked = looked.is_some();
        let seen = looked.unwrap_or_else(|| vec![false; arrivals.len()]);
        if rules.acknowledge && seen.contains(&true) {
            // The store may have refused it the first time, while the relay had not yet said that it was sent.
            let known = arrivals.iter().zip(&seen).filter(|(_, seen)| **seen);
            let known = known.map(|(arrival, _)| (arrival.message.id, group.to_owned())).collect();
            self.store.acknowledge(known).await?;
        }
        let rest = arrivals.into_iter().zip(prints).zip(&seen).filter(|(_, seen)| !**seen);
        let (rest, prints) = rest.map(|(arrived, _)| arrived).unzip();
        Ok(Parted { rest, prints, asked, seen })
    }

    /// Tells Redis what the store has done, and how many it was not asked about, because Redis had `seen` them. Of a duplicate
    /// only where Redis was `asked`, and so does not know it: its time begins anew.
    fn note<'a>(
        &self,
        group: &str,
        prints: Vec<Print>,
        receipts: impl Iterator<Item = Option<&'a Receipt>>,
        asked: bool,
        seen: usize,
    ) {
        let mut repeated = seen > 0;
        let mut done = Vec::with_capacity(prints.len());
        for (print, receipt) in prints.into_iter().zip(receipts) {
            let again = receipt == Some(&Receipt::Duplicate);
            repeated |= again;
            if receipt == Some(&Receipt::Done) || (again && asked) {
                done.push(print);
            }
        }
        if repeated {
            self.seen.met_a_duplicate(group);
        }
        self.seen.note(group, done, seen);
    }
}

/// Arrivals, and which of them Redis has seen.
struct Parted {
    /// Those that it has not, and what it knows them by.
    rest: Vec<Arrival>,
    prints: Vec<Print>,
    /// It was asked, and has answered.
    asked: bool,
    seen: Vec<bool>,
}

impl Parted {
    /// What the store must look at, if anything.
    fn take_rest(&mut self) -> Option<Vec<Arrival>> {
        Some(std::mem::take(&mut self.rest)).filter(|rest| !rest.is_empty())
    }

    /// What Redis knows the rest by.
    fn take_prints(&mut self) -> Vec<Print> {
        std::mem::take(&mut self.prints)
    }

    fn duplicates(&self) -> usize {
        self.seen.iter().filter(|seen| **seen).count()
    }

    /// The store's answers for the rest in their places, and `duplicate` for each that was seen.
    fn join<T: Clone>(&self, answers: Vec<T>, duplicate: &T) -> Result<Vec<T>, Error> {
        let asked = self.seen.len() - self.duplicates();
        if answers.len() != asked {
            let got = answers.len();
            return Err(Error::Broken(format!("{got} answers came for {asked} arrivals")));
        }
        let mut answers = answers.into_iter();
        let answer = |seen: &bool| if *seen { Some(duplicate.clone()) } else { answers.next() };
        Ok(self.seen.iter().filter_map(answer).collect())
    }
}

#[async_trait]
impl Inbox for Hybrid {
    async fn check(&self, work: &Work) -> Result<(), Error> {
        self.store.check(work).await
    }

    async fn process(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        work: &Work,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let mut parted = self.part(group, arrivals, rules).await?;
        let receipts = match parted.take_rest() {
            None => Vec::new(),
            Some(rest) => self.store.process(group, rest, work, rules).await?,
        };
        let (prints, seen) = (parted.take_prints(), parted.duplicates());
        self.note(group, prints, receipts.iter().map(Some), parted.asked, seen);
        parted.join(receipts, &Receipt::Duplicate)
    }

    async fn reserve(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        lease: Duration,
        rules: &InboxRules,
    ) -> Result<Vec<Reservation>, Error> {
        let mut parted = self.part(group, arrivals, rules).await?;
        let answers = match parted.take_rest() {
            None => Vec::new(),
            Some(rest) => self.store.reserve(group, rest, lease, rules).await?,
        };
        let settled = answers.iter().map(|answer| match answer {
            Reservation::Settled(receipt) => Some(receipt),
            Reservation::Granted(_) => None,
        });
        let (prints, seen) = (parted.take_prints(), parted.duplicates());
        self.note(group, prints, settled, parted.asked, seen);
        parted.join(answers, &Reservation::Settled(Receipt::Duplicate))
    }

    async fn conclude(
        &self,
        group: &str,
        conclusions: Vec<(Arrival, Uuid, Handled)>,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let prints = conclusions.iter().map(|(arrival, ..)| Print::of(arrival)).collect();
        let receipts = self.store.conclude(group, conclusions, rules).await?;
        self.note(group, prints, receipts.iter().map(Some), false, 0);
        Ok(receipts)
    }

    async fn due(&self, group: &str, limit: usize) -> Result<Vec<Arrival>, Error> {
        self.store.due(group, limit).await
    }

    async fn processed(&self, group: &str, page: Page) -> Result<Paged<Processed>, Error> {
        self.store.processed(group, page).await
    }

    async fn parked(&self, group: &str, page: Page) -> Result<Paged<Parked>, Error> {
        self.store.parked(group, page).await
    }

    async fn unpark(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        self.store.unpark(group, id, actor).await
    }

    async fn drop_parked(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        self.store.drop_parked(group, id, actor).await
    }

    async fn inbox_counts(&self, group: &str) -> Result<InboxCounts, Error> {
        let counts = self.store.inbox_counts(group).await?;
        Ok(InboxCounts { duplicates: counts.duplicates + self.seen.duplicates(group).await, ..counts })
    }

    async fn remembered(&self, group: &str) -> Result<Remembered, Error> {
        // What Redis has seen is a copy, and goes by itself.
        self.store.remembered(group).await
    }

    async fn forget_ids(&self, group: &str, keep: Duration) -> Result<u64, Error> {
        // Redis first: it must not call something seen that the store has just forgotten.
        self.seen.keep(group, keep).await;
        self.store.forget_ids(group, keep).await
    }
}
