//! The inbox: the work of each message and its mark, in one transaction.
//!
//! Consumers of a group share the lock of its row while they only make marks: then whole batches are marked and
//! acknowledged by a few statements, side by side. Whoever meets or makes a parked message needs the group for itself,
//! because what waits behind what must not change meanwhile; the transaction is rolled back and run again alone.

mod alone;
mod forget;
mod page;
mod parked;
mod shared;
mod work;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use message::MessageId;
use mysql_async::prelude::Queryable;
use mysql_async::{Row, Value};
use uuid::Uuid;

use super::amend::audit;
use super::error::Trouble;
use super::row::{Read, at};
use super::session::{Tx, commit};
use super::{MysqlStore, acknowledge, lane, tally};
use crate::audit::{dropped, unparked};
use crate::column::digest;
use crate::statement::NO_SCRIPTS;
use crate::tally::Tally;
use crate::{
    Arrival, Error, Handled, Inbox, InboxCounts, InboxRules, Page, Paged, Parked, Processed, Receipt,
    Remembered, Reservation, Work,
};
use work::Job;

#[async_trait]
impl Inbox for MysqlStore {
    async fn check(&self, work: &Work) -> Result<(), Error> {
        match work {
            Work::Mark => Ok(()),
            Work::Script(_) => Err(Error::Refused(NO_SCRIPTS.to_owned())),
            Work::Sql(statement) => {
                let statement = statement.clone();
                self.run(move |store| {
                    let statement = statement.clone();
                    async move { work::check(&mut store.connection().await?, &statement).await }
                })
                .await
            }
        }
    }

    async fn process(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        work: &Work,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let job = match work {
            Work::Mark => Job::Nothing,
            Work::Sql(statement) => Job::statement(statement),
            Work::Script(_) => return Err(Error::Refused(NO_SCRIPTS.to_owned())),
        };
        self.in_group(group, rules, Task::Process(arrivals, job)).await.map(Answers::receipts)
    }

    async fn reserve(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        lease: Duration,
        rules: &InboxRules,
    ) -> Result<Vec<Reservation>, Error> {
        self.in_group(group, rules, Task::Reserve(arrivals, lease)).await.map(Answers::reservations)
    }

    async fn conclude(
        &self,
        group: &str,
        conclusions: Vec<(Arrival, Uuid, Handled)>,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        self.in_group(group, rules, Task::Conclude(conclusions)).await.map(Answers::receipts)
    }

    async fn due(&self, group: &str, limit: usize) -> Result<Vec<Arrival>, Error> {
        let group = group.to_owned();
        self.run(move |store| {
            let group = group.clone();
            async move { page::due(&mut store.connection().await?, &group, limit).await }
        })
        .await
    }

    async fn processed(&self, group: &str, page: Page) -> Result<Paged<Processed>, Error> {
        let group = group.to_owned();
        self.run(move |store| {
            let group = group.clone();
            async move { page::processed(&mut store.connection().await?, &group, page).await }
        })
        .await
    }

    async fn parked(&self, group: &str, page: Page) -> Result<Paged<Parked>, Error> {
        let group = group.to_owned();
        self.run(move |store| {
            let group = group.clone();
            async move { page::parked(&mut store.connection().await?, &group, page).await }
        })
        .await
    }

    async fn unpark(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        let names = Arc::new((group.to_owned(), actor.to_owned()));
        self.run(move |store| {
            let names = Arc::clone(&names);
            async move {
                let (group, actor) = &*names;
                let rules = InboxRules::default();
                let mut desk = Desk::open(&store, group, &rules, true).await?;
                desk.fresh_start(id).await?;
                let now = desk.now;
                audit(&mut desk.tx, now, actor, "inbox requeue", id, &unparked(group)).await?;
                desk.finish().await
            }
        })
        .await
    }

    async fn drop_parked(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        let names = Arc::new((group.to_owned(), actor.to_owned()));
        self.run(move |store| {
            let names = Arc::clone(&names);
            async move {
                let (group, actor) = &*names;
                // The group will never do it: the producer must not wait for it for ever.
                let rules = InboxRules { acknowledge: true, ..InboxRules::default() };
                let mut desk = Desk::open(&store, group, &rules, true).await?;
                let message = desk.give_up(id).await?;
                desk.acknowledge(id);
                let now = desk.now;
                audit(&mut desk.tx, now, actor, "inbox discard", id, &dropped(group, &message)).await?;
                desk.finish().await
            }
        })
        .await
    }

    async fn inbox_counts(&self, group: &str) -> Result<InboxCounts, Error> {
        let group = group.to_owned();
        self.run(move |store| {
            let group = group.clone();
            async move { page::counts(&mut store.connection().await?, &group).await }
        })
        .await
    }

    async fn remembered(&self, group: &str) -> Result<Remembered, Error> {
        let group = group.to_owned();
        self.run(move |store| {
            let group = group.clone();
            async move { page::remembered(&mut store.connection().await?, &group).await }
        })
        .await
    }

    async fn forget_ids(&self, group: &str, keep: Duration) -> Result<u64, Error> {
        let group = group.to_owned();
        self.run(move |store| {
            let group = group.clone();
            async move { forget::ids(&store, &group, keep).await }
        })
        .await
    }
}

/// What a consumer asks of its group's inbox.
enum Task {
    Process(Vec<Arrival>, Job),
    Reserve(Vec<Arrival>, Duration),
    Conclude(Vec<(Arrival, Uuid, Handled)>),
}

/// What it hears. One of the two is asked for.
enum Answers {
    Receipts(Vec<Receipt>),
    Reservations(Vec<Reservation>),
}

impl Answers {
    fn receipts(self) -> Vec<Receipt> {
        match self {
            Self::Receipts(receipts) => receipts,
            Self::Reservations(_) => Vec::new(),
        }
    }

    fn reservations(self) -> Vec<Reservation> {
        match self {
            Self::Reservations(reservations) => reservations,
            Self::Receipts(_) => Vec::new(),
        }
    }
}

impl MysqlStore {
    async fn in_group(&self, group: &str, rules: &InboxRules, task: Task) -> Result<Answers, Error> {
        let asked = Arc::new((group.to_owned(), rules.clone(), task));
        self.run(move |store| {
            let asked = Arc::clone(&asked);
            async move {
                let (group, rules, task) = &*asked;
                match store.attend(group, rules, task, false).await {
                    Err(Trouble::Crowded) => store.attend(group, rules, task, true).await,
                    answered => answered,
                }
            }
        })
        .await
    }

    async fn attend(
        &self,
        group: &str,
        rules: &InboxRules,
        task: &Task,
        alone: bool,
    ) -> Result<Answers, Trouble> {
        let mut desk = Desk::open(self, group, rules, alone).await?;
        let answers = match (task, alone) {
            (Task::Process(arrivals, job), false) => {
                Answers::Receipts(desk.process_all(arrivals, job).await?)
            }
            (Task::Process(arrivals, job), true) => {
                Answers::Receipts(desk.process_each(arrivals, job).await?)
            }
            (Task::Reserve(arrivals, lease), false) => {
                Answers::Reservations(desk.reserve_all(arrivals, *lease).await?)
            }
            (Task::Reserve(arrivals, lease), true) => {
                Answers::Reservations(desk.reserve_each(arrivals, *lease).await?)
            }
            (Task::Conclude(conclusions), false) => Answers::Receipts(desk.conclude_all(conclusions).await?),
            (Task::Conclude(conclusions), true) => Answers::Receipts(desk.conclude_each(conclusions).await?),
        };
        desk.finish().await?;
        Ok(answers)
    }
}

/// The number of a group that has done something.
pub(super) async fn find_group(connection: &mut impl Queryable, group: &str) -> Result<Option<i64>, Trouble> {
    Ok(connection.exec_first("SELECT grp FROM inbox_groups WHERE name = ?", (group,)).await?)
}

/// One group's work in one transaction.
struct Desk<'a> {
    store: &'a MysqlStore,
    tx: Tx<'static>,
    rules: &'a InboxRules,
    name: &'a str,
    group: i64,
    now: i64,
    counts: Changes,
    /// Messages that the group is done with, to be acknowledged together at the end.
    done: Vec<MessageId>,
    /// Whether anything is parked for the group: nearly always not, and then nobody needs to look.
    parked: bool,
    /// Whether anything is reserved for it.
    reservations: bool,
}

/// What a transaction adds to the group's counters.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    processed: i64,
    duplicates: i64,
    parked: i64,
    dead: i64,
}

impl<'a> Desk<'a> {
    /// Begins a transaction and locks the group, made on first use: for itself, or with others who only make marks.
    async fn open(
        store: &'a MysqlStore,
        name: &'a str,
        rules: &'a InboxRules,
        alone: bool,
    ) -> Result<Desk<'a>, Trouble> {
        let mut tx = store.begin().await?;
        let sql = match alone {
            true => "SELECT grp FROM inbox_groups WHERE name = ? FOR UPDATE",
            false => "SELECT grp FROM inbox_groups WHERE name = ? LOCK IN SHARE MODE",
        };
        let mut group: Option<i64> = tx.exec_first(sql, (name,)).await?;
        if group.is_none() {
            tx.exec_drop("INSERT IGNORE INTO inbox_groups (name) VALUES (?)", (name,)).await?;
            group = tx.exec_first(sql, (name,)).await?;
        }
        let group = group.ok_or_else(|| Error::Broken(format!("the group {name} cannot be made")))?;
        let row: Option<Row> = tx
            .exec_first(
                "SELECT utc_timestamp(3), EXISTS (SELECT 1 FROM inbox_parked WHERE grp = ?),
                        EXISTS (SELECT 1 FROM inbox_reserved WHERE grp = ?)",
                (group, group),
            )
            .await?;
        let mut row = row.ok_or_else(|| Error::Broken("the server says no time".to_owned()))?;
        let (now, parked, reservations) = (row.millis(0)?, row.flag(1)?, row.flag(2)?);
        let counts = Changes::default();
        Ok(Desk { store, tx, rules, name, group, now, counts, done: Vec::new(), parked, reservations })
    }

    /// Acknowledges, counts and commits.
    async fn finish(mut self) -> Result<(), Trouble> {
        if !self.done.is_empty() {
            let mut moved = Tally::default();
            let done: Vec<(MessageId, String)> =
                self.done.iter().map(|id| (*id, self.name.to_owned())).collect();
            acknowledge::acknowledge(self.store, &mut self.tx, &done, self.now, &mut moved).await?;
            tally::write(moved, &mut self.tx, tally::any_part()).await?;
        }
        if self.counts != Changes::default() {
            let Changes { processed, duplicates, parked, dead } = self.counts;
            let part: u8 = rand::random::<u8>() & 63;
            self.tx
                .exec_drop(
                    "INSERT INTO inbox_counters (grp, part, processed, duplicates, parked, dead)
                     VALUES (?, ?, ?, ?, ?, ?)
                     ON DUPLICATE KEY UPDATE processed = processed + VALUES(processed),
                         duplicates = duplicates + VALUES(duplicates), parked = parked + VALUES(parked),
                         dead = dead + VALUES(dead)",
                    (self.group, part, processed, duplicates, parked, dead),
                )
                .await?;
        }
        commit(self.tx).await
    }

    /// The group is done with a message; its producer hears of it if this store is its own.
    fn acknowledge(&mut self, id: MessageId) {
        if self.rules.acknowledge {
            self.done.push(id);
        }
    }

    /// Makes the marks of `arrivals`, whose ids all differ. [`Trouble::Again`] when somebody else has made one.
    async fn mark(&mut self, arrivals: &[&Arrival]) -> Result<(), Trouble> {
        if arrivals.is_empty() {
            return Ok(());
        }
        // In one order for all: two batches with the same ids wait for each other instead of locking each other out.
        let mut sorted = arrivals.to_vec();
        sorted.sort_by_key(|arrival| arrival.message.id);
        let rows = vec!["(?, ?, ?, ?, ?, ?, ?)"; sorted.len()].join(", ");
        let sql =
            format!("INSERT INTO inbox_ids (grp, id, digest, topic, `key`, seq, processed_at) VALUES {rows}");
        let values: Vec<Value> = sorted
            .iter()
            .flat_map(|arrival| -> [Value; 7] {
                let message = &arrival.message;
                [
                    self.group.into(),
                    message.id.to_string().into(),
                    digest(arrival).into(),
                    message.topic.as_str().into(),
                    message.key.as_deref().into(),
                    arrival.seq.into(),
                    at(self.now),
                ]
            })
            .collect();
        self.tx.exec_drop(sql, values).await.map_err(meanwhile)?;
        self.counts.processed += i64::try_from(arrivals.len()).unwrap_or(i64::MAX);
        Ok(())
    }

    async fn unmark(&mut self, arrivals: &[&Arrival]) -> Result<(), Trouble> {
        if arrivals.is_empty() {
            return Ok(());
        }
        let places = vec!["?"; arrivals.len()].join(", ");
        let sql = format!(
            "DELETE i FROM inbox_ids i FORCE INDEX (inbox_ids_id) WHERE i.grp = {} AND i.id IN ({places})",
            self.group
        );
        let ids: Vec<Value> = arrivals.iter().map(|arrival| arrival.message.id.to_string().into()).collect();
        self.tx.exec_drop(sql, ids).await?;
        self.counts.processed -= i64::try_from(arrivals.len()).unwrap_or(i64::MAX);
        Ok(())
    }

    /// The time, for those who look at the clock of the store.
    async fn look(&mut self) -> Result<i64, Trouble> {
        Ok(lane::look(&mut self.tx, std::collections::BTreeSet::new()).await?.now)
    }
}

/// A mark that somebody else made while we looked: looked at again, it is a duplicate.
fn meanwhile(error: mysql_async::Error) -> Trouble {
    match &error {
        mysql_async::Error::Server(server) if server.code == 1062 => Trouble::Again(Error::Unavailable {
            reason: "another consumer did the same message".to_owned(),
            retry_after: Duration::ZERO,
        }),
        _ => error.into(),
    }
}
