//! One group's work in one transaction.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use chrono::{DateTime, Utc};
use futures::future::join_all;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::super::PostgresStore;
use super::super::acknowledge::Acknowledger;
use super::super::connection::{Parameters, Transaction};
use super::super::error::Trouble;
use super::Marking;
use super::parked::{Standing, key_lock, lock};
use super::parts::ordered_key;
use super::reserved::{Held, id_lock};
use super::work::{Fault, Job};
use crate::column::{MOST_MARKS, OTHER_CONTENT, digest};
use crate::stuck::Stuck;
use crate::{Arrival, Error, Handled, InboxRules, Receipt, Seq};

/// What is known of an id.
pub(super) enum Mark {
    /// The mark is ours, with this content, and its work is not decided.
    Open(Vec<u8>),
    /// It is done, with this content; nothing is known of it where another program made the mark.
    Done(Option<Vec<u8>>),
    /// It is not done, although our mark is still there: it goes at the end.
    Taken,
}

/// What a transaction is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To do work.
    Process,
    /// To reserve it for others. What is done is looked up where nobody else can make a mark meanwhile: whoever does has the
    /// key first, or a reservation. Otherwise marks are made, and taken back in the end.
    Reserve,
    /// To write down what others did.
    Conclude,
}

/// Marks in one statement. While the server writes those, the next are made ready.
const PART: usize = 2_000;

/// Before the work of a message, or of many. What a constraint has against it is heard at the end of its statement, also where the
/// application would wait for the end of the transaction: there nobody could say whose fault it is.
const WORK: &str = "SAVEPOINT work; SET CONSTRAINTS ALL IMMEDIATE";

/// What a transaction adds to what the group has done, and to its counters.
#[derive(Default)]
pub(super) struct Changes {
    /// In their order.
    processed: Vec<Uuid>,
    duplicates: i64,
    pub(super) parked: i64,
    pub(super) dead: i64,
}

/// One group's work in one transaction.
pub(super) struct Desk<'a> {
    store: &'a PostgresStore,
    pub(super) tx: &'a Transaction,
    pub(super) rules: &'a InboxRules,
    name: &'a str,
    pub(super) group: i64,
    pub(super) now: DateTime<Utc>,
    pub(super) counts: Changes,
    pub(super) marks: HashMap<Uuid, Mark>,
    acknowledged: Vec<(message::MessageId, Option<Seq>, String)>,
    /// Whether anything is parked for the group: nearly always not, and then nobody needs to look.
    pub(super) parked: bool,
    /// Whether anything is reserved for it.
    reservations: bool,
    /// What is left of reservations of which some has ended here.
    pub(super) held: Vec<Held>,
}

impl<'a> Desk<'a> {
    /// Begins the transaction: from here on the ids of these arrivals, and with `ordered` their keys, are ours.
    pub(super) async fn open(
        store: &'a PostgresStore,
        tx: &'a Transaction,
        name: &'a str,
        marking: &Marking<'_>,
        rules: &'a InboxRules,
        arrivals: impl Iterator<Item = &'a Arrival>,
        purpose: Purpose,
    ) -> Result<Self, Trouble> {
        let group = marking.group.number;
        let key = |arrival: &'a Arrival| ordered_key(arrival, rules);
        let arrivals: Vec<&Arrival> = arrivals.collect();
        let keys: HashSet<(&str, &str)> = arrivals.iter().filter_map(|arrival| key(arrival)).collect();
        let mut locks: Vec<i64> = keys.into_iter().map(|(topic, key)| key_lock(group, topic, key)).collect();
        if purpose == Purpose::Reserve {
            locks.extend(arrivals.iter().map(|arrival| id_lock(group, arrival.message.id)));
        }
        let (looked_up, marked): (Vec<&Arrival>, Vec<&Arrival>) =
            arrivals.into_iter().partition(|arrival| purpose == Purpose::Reserve && key(arrival).is_some());
        let looked_up: Vec<Uuid> = looked_up.into_iter().map(|arrival| arrival.message.id.0).collect();
        let group_number = [(&group as _, Type::INT8)];
        let look = tx.one(
            "SELECT clock_timestamp(), EXISTS (SELECT 1 FROM inbox_parked WHERE grp = $1),
                    EXISTS (SELECT 1 FROM inbox_reserved WHERE grp = $1 AND until > now())",
            &group_number,
        );
        let (begun, locked, marked, done, row) = tokio::join!(biased;
            tx.begin(), lock(tx, locks), mark(tx, marking, &marked), done(tx, group, &looked_up), look);
        begun?;
        locked?;
        let mut marks = marked?;
        marks.extend(done?);
        let row = row?;
        Ok(Self {
            store,
            tx,
            rules,
            name,
            group,
            now: row.try_get(0)?,
            counts: Changes::default(),
            marks,
            acknowledged: Vec::new(),
            parked: row.try_get(1)?,
            reservations: row.try_get(2)?,
            held: Vec::new(),
        })
    }

    /// Takes back the marks of what was not done, ends reservations, and writes acknowledgements and counters.
    pub(super) async fn finish(self) -> Result<(), Trouble> {
        let undone: Vec<Uuid> =
            self.marks.iter().filter(|(_, mark)| !matches!(mark, Mark::Done(_))).map(|(id, _)| *id).collect();
        if !undone.is_empty() {
            self.tx
                .execute(
                    "DELETE FROM inbox_ids WHERE ctid = ANY (ARRAY(
                         SELECT i.place FROM unnest($2::uuid[]) AS w(id) CROSS JOIN LATERAL
                         (SELECT ctid AS place FROM inbox_ids WHERE grp = $1 AND id = w.id OFFSET 0) i))",
                    &[(&self.group, Type::INT8), (&undone, Type::UUID_ARRAY)],
                )
                .await?;
        }
        for held in &self.held {
            held.write(self.tx, self.group).await?;
        }
        Acknowledger { tx: self.tx, sent: self.store.sent }.acknowledge(&self.acknowledged).await?;
        for ids in self.counts.processed.chunks(MOST_MARKS) {
            // A message's position is the number of this row, and in its last 13 bits the place within.
            let row = "INSERT INTO inbox_done (grp, ids) VALUES ($1, $2)";
            self.tx.execute(row, &[(&self.group, Type::INT8), (&ids, Type::UUID_ARRAY)]).await?;
        }
        count(self.tx, self.group, &self.counts).await
    }

    /// Nothing passes an earlier one of its key that is `stuck`, or that another worker has.
    pub(super) async fn process<'b>(
        &mut self,
        arrivals: &[&'b Arrival],
        job: &Job,
        mut stuck: Stuck<'b>,
    ) -> Result<Vec<Receipt>, Trouble> {
        // The usual case: nothing is parked or reserved, and the work of all new ones succeeds, in one trip.
        let usual = !self.parked && !self.reservations && stuck.is_empty();
        let together = usual && self.all_at_once(arrivals, job).await?;
        let mut unavailable: Option<Receipt> = None;
        let mut receipts = Vec::with_capacity(arrivals.len());
        for arrival in arrivals {
            let receipt = match (&unavailable, self.marks.get(&arrival.message.id.0)) {
                (Some(receipt), _) => receipt.clone(),
                (None, Some(Mark::Open(_))) if together => self.done(arrival).await?,
                (None, _) if stuck.holds(arrival) => Receipt::Busy,
                (None, _) => self.process_one(arrival, job).await?,
            };
            stuck.note(arrival, &receipt);
            if matches!(receipt, Receipt::Unavailable { .. }) {
                unavailable = Some(receipt.clone());
            }
            receipts.push(receipt);
        }
        Ok(receipts)
    }

    /// Does the work of all that are new. `false` when some of it failed, or it is to be done one by one: then
    /// none of it was done.
    async fn all_at_once(&self, arrivals: &[&Arrival], job: &Job) -> Result<bool, Trouble> {
        let mut seen = HashSet::new();
        let new: Vec<&Arrival> = arrivals
            .iter()
            .copied()
            .filter(|arrival| seen.insert(arrival.message.id.0))
            .filter(|arrival| matches!(self.marks.get(&arrival.message.id.0), Some(Mark::Open(_))))
            .collect();
        let statement = match job {
            Job::Nothing => return Ok(true),
            Job::Statement(_) if new.is_empty() => return Ok(true),
            Job::Statement(Ok(statement)) if new.len() > 1 => statement,
            Job::Statement(_) => return Ok(false),
        };
        let Some(each) = statement.together() else { return Ok(false) };
        let (begun, done) = tokio::join!(biased;
            self.tx.batch(WORK), statement.run_each(self.tx, each, self.name, &new));
        begun?;
        let done = done?;
        if !done {
            self.tx.batch("ROLLBACK TO work").await?;
        }
        Ok(done)
    }

    async fn process_one(&mut self, arrival: &Arrival, job: &Job) -> Result<Receipt, Trouble> {
        let attempts = match self.standing(arrival).await? {
            Standing::Settled(receipt) => return Ok(receipt),
            Standing::Free { attempts } => attempts,
        };
        if self.reservations && !self.reserved(vec![arrival.message.id.0]).await?.is_empty() {
            return Ok(Receipt::Busy);
        }
        let (begun, done) = tokio::join!(biased;
            self.tx.batch(WORK), job.run(self.tx, self.name, arrival));
        begun?;
        let handled = match done {
            Ok(()) => Handled::Done,
            Err(Fault::Message(error)) => Handled::Retry { error, after: None },
            Err(Fault::Unusable(error)) => Handled::Unavailable { error },
            Err(Fault::Store(trouble)) => return Err(trouble),
        };
        let verb = if handled == Handled::Done { "RELEASE work" } else { "ROLLBACK TO work; RELEASE work" };
        self.tx.batch(verb).await?;
        self.conclude(arrival, attempts, handled).await
    }

    /// Writes what the handler said, for an arrival that is free.
    pub(super) async fn conclude(
        &mut self,
        arrival: &Arrival,
        attempts: u32,
        handled: Handled,
    ) -> Result<Receipt, Trouble> {
        match handled {
            Handled::Done => self.done(arrival).await,
            Handled::Retry { error, after } => self.retry(arrival, attempts, error, after).await,
            Handled::Dead { error } => self.bury(arrival, attempts + 1, error).await,
            Handled::Unavailable { error } => Ok(Receipt::Unavailable { error }),
        }
    }

    /// Its work is done: the mark stays.
    pub(super) async fn done(&mut self, arrival: &Arrival) -> Result<Receipt, Trouble> {
        let id = arrival.message.id.0;
        self.counts.processed.push(id);
        let mark = self.marks.entry(id).or_insert(Mark::Taken);
        let content = match std::mem::replace(mark, Mark::Taken) {
            Mark::Open(content) => content,
            Mark::Done(_) | Mark::Taken => digest(arrival),
        };
        *mark = Mark::Done(Some(content));
        self.finished(arrival).await
    }

    pub(super) async fn finished(&mut self, arrival: &Arrival) -> Result<Receipt, Trouble> {
        self.unpark(arrival, true).await?;
        self.acknowledge(arrival);
        Ok(Receipt::Done)
    }

    fn acknowledge(&mut self, arrival: &Arrival) {
        if self.rules.acknowledge {
            self.acknowledged.push((arrival.message.id, arrival.seq, self.name.to_owned()));
        }
    }

    /// The receipt of a message that was done before, if it was.
    pub(super) async fn done_before(&mut self, arrival: &Arrival) -> Result<Option<Receipt>, Trouble> {
        let same = match self.marks.get(&arrival.message.id.0) {
            Some(Mark::Done(known)) => known.as_ref().is_none_or(|known| *known == digest(arrival)),
            _ => return Ok(None),
        };
        if same {
            self.counts.duplicates += 1;
            // A crash between a handler's own commit and its conclusion leaves it parked.
            self.unpark(arrival, false).await?;
            self.acknowledge(arrival);
            return Ok(Some(Receipt::Duplicate));
        }
        let error = OTHER_CONTENT.to_owned();
        // It may come often; it is kept, and counted, once, and never in the place of another.
        match self.place(arrival.message.id).await? {
            Some(place) if place.dead || !place.is_of(arrival) => Ok(Some(Receipt::Dead { error })),
            _ => self.bury(arrival, 0, error).await.map(Some),
        }
    }

    /// A message that is kept for later is not done.
    pub(super) fn keep(&mut self, arrival: &Arrival) {
        // One that was only looked up has no mark of ours; somebody else may have made one since.
        if let Some(mark @ Mark::Open(_)) = self.marks.get_mut(&arrival.message.id.0) {
            *mark = Mark::Taken;
        }
    }
}

/// Which of these are done, each with its mark.
async fn done(tx: &Transaction, group: i64, ids: &[Uuid]) -> Result<Vec<(Uuid, Mark)>, Trouble> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let rows = tx
        .query(
            // One after another: a planner without statistics would read all that the group has done.
            "SELECT w.id, i.digest FROM unnest($2::uuid[]) AS w(id) CROSS JOIN LATERAL
             (SELECT digest FROM inbox_ids WHERE grp = $1 AND id = w.id OFFSET 0) i",
            &[(&group, Type::INT8), (&ids, Type::UUID_ARRAY)],
        )
        .await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, Mark::Done(row.try_get(1)?)))).collect()
}

/// Marks all arrivals that are not marked, waiting for others who are at the same ones, and says what is known of each. A call
/// that does not look first fails with [`Trouble::Marked`] where any has a mark.
async fn mark(
    tx: &Transaction,
    marking: &Marking<'_>,
    arrivals: &[&Arrival],
) -> Result<HashMap<Uuid, Mark>, Trouble> {
    // In the order of ids: two calls with the same ones must not wait for each other.
    let mut wanted = arrivals.to_vec();
    wanted.sort_by_key(|arrival| arrival.message.id);
    wanted.dedup_by_key(|arrival| arrival.message.id);
    let mut marks = HashMap::with_capacity(wanted.len());
    for marked in join_all(wanted.chunks(PART).map(|part| mark_part(tx, marking, part))).await {
        marks.extend(marked?);
    }
    let ids = wanted.iter().map(|arrival| arrival.message.id.0);
    let old: Vec<Uuid> = ids.filter(|id| !marks.contains_key(id)).collect();
    marks.extend(done(tx, marking.group.number, &old).await?);
    if marks.len() < wanted.len() {
        // Forgotten between the two statements: whoever comes next finds it so.
        let (reason, retry_after) = ("marks are being forgotten".to_owned(), Duration::ZERO);
        return Err(Error::Unavailable { reason, retry_after }.into());
    }
    if marking.looks() && !wanted.is_empty() {
        marking.group.has_looked(!old.is_empty());
    }
    Ok(marks)
}

/// Marks these, and answers with those that had no mark.
async fn mark_part(
    tx: &Transaction,
    marking: &Marking<'_>,
    arrivals: &[&Arrival],
) -> Result<Vec<(Uuid, Mark)>, Trouble> {
    let ids: Vec<Uuid> = arrivals.iter().map(|arrival| arrival.message.id.0).collect();
    let digests: Vec<Vec<u8>> = arrivals.iter().map(|arrival| digest(arrival)).collect();
    let topics: Vec<&str> = arrivals.iter().map(|arrival| arrival.message.topic.as_str()).collect();
    let keys: Vec<Option<&str>> = arrivals.iter().map(|arrival| arrival.message.key.as_deref()).collect();
    let seqs: Vec<Option<i64>> = arrivals.iter().map(|arrival| arrival.seq).collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 6] = [
        (&marking.group.number, Type::INT8),
        (&ids, Type::UUID_ARRAY),
        (&digests, Type::BYTEA_ARRAY),
        (&topics, Type::TEXT_ARRAY),
        (&keys, Type::TEXT_ARRAY),
        (&seqs, Type::INT8_ARRAY),
    ];
    let new: Option<HashSet<Uuid>> = if marking.looks() {
        let rows = tx.query(include_str!("mark.sql"), &parameters).await?;
        Some(rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?)
    } else {
        mark_all(tx, marking, &parameters).await?;
        None
    };
    let is_new = |id: &Uuid| new.as_ref().is_none_or(|new| new.contains(id));
    let marked = ids.into_iter().zip(digests).filter(|(id, _)| is_new(id));
    Ok(marked.map(|(id, content)| (id, Mark::Open(content))).collect())
}

/// Marks what is taken for new.
async fn mark_all(
    tx: &Transaction,
    marking: &Marking<'_>,
    parameters: Parameters<'_>,
) -> Result<(), Trouble> {
    match tx.execute(include_str!("mark_all.sql"), parameters).await {
        Err(trouble) if trouble.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
            marking.was_surprised();
            Err(Trouble::Marked)
        }
        other => other.map(drop),
    }
}

async fn count(tx: &Transaction, group: i64, changes: &Changes) -> Result<(), Trouble> {
    let Changes { processed, duplicates, parked, dead } = changes;
    let processed = i64::try_from(processed.len()).unwrap_or(i64::MAX);
    if [processed, *duplicates, *parked, *dead] == [0; 4] {
        return Ok(());
    }
    tx.execute(
        "INSERT INTO inbox_counters (grp, processed, duplicates, parked, dead) VALUES ($1, $2, $3, $4, $5)",
        &[
            (&group, Type::INT8),
            (&processed, Type::INT8),
            (duplicates, Type::INT8),
            (parked, Type::INT8),
            (dead, Type::INT8),
        ],
    )
    .await?;
    super::forget::fold_sometimes(tx).await
}
