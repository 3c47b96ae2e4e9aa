//! One group's work in one transaction.

use std::collections::HashMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::super::PostgresStore;
use super::super::acknowledge::Acknowledger;
use super::super::connection::Transaction;
use super::super::error::Trouble;
use super::super::row::after;
use super::parked::{Standing, lock_keys};
use super::work::{Fault, Job};
use crate::column::{OTHER_CONTENT, digest};
use crate::{Arrival, Error, Handled, InboxRules, Receipt, Reservation, Seq};

/// What is known of an id.
pub(super) enum Mark {
    /// The mark is ours and its work is not decided.
    Open,
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

/// What a transaction adds to the group's counters.
#[derive(Default)]
pub(super) struct Changes {
    processed: i64,
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
    marks: HashMap<Uuid, Mark>,
    acknowledged: Vec<(message::MessageId, Option<Seq>, String)>,
    /// Whether anything is parked for the group: nearly always not, and then nobody needs to look.
    pub(super) parked: bool,
    /// Whether anything is reserved for it; only who does work asks.
    reservations: bool,
}

impl<'a> Desk<'a> {
    /// Begins the transaction: from here on the ids of these arrivals, and with `ordered` their keys, are ours.
    pub(super) async fn open(
        store: &'a PostgresStore,
        tx: &'a Transaction,
        name: &'a str,
        group: i64,
        rules: &'a InboxRules,
        arrivals: impl Iterator<Item = &'a Arrival>,
        purpose: Purpose,
    ) -> Result<Self, Trouble> {
        let key = |arrival: &'a Arrival| {
            Some((arrival.message.topic.as_str(), arrival.message.key.as_deref().filter(|_| rules.ordered)?))
        };
        let arrivals: Vec<&Arrival> = arrivals.collect();
        let keys: Vec<(&str, &str)> = arrivals.iter().filter_map(|arrival| key(arrival)).collect();
        let (looked_up, marked): (Vec<&Arrival>, Vec<&Arrival>) =
            arrivals.into_iter().partition(|arrival| purpose == Purpose::Reserve && key(arrival).is_some());
        let looked_up: Vec<Uuid> = looked_up.into_iter().map(|arrival| arrival.message.id.0).collect();
        let (begun, locked, marked, known) = tokio::join!(biased;
            tx.begin(), lock_keys(tx, group, &keys), mark(tx, group, &marked), done(tx, group, &looked_up));
        begun?;
        locked?;
        let mut marks = marked?;
        marks.extend(known?);
        let sql = match purpose {
            Purpose::Process => {
                "SELECT clock_timestamp(), EXISTS (SELECT 1 FROM inbox_parked WHERE grp = $1),
                        EXISTS (SELECT 1 FROM inbox_reserved WHERE grp = $1)"
            }
            // Who reserves has many: their index begins with the dead entries of a minute, and nobody here asks.
            Purpose::Reserve | Purpose::Conclude => {
                "SELECT clock_timestamp(), EXISTS (SELECT 1 FROM inbox_parked WHERE grp = $1), false"
            }
        };
        let row = tx.one(sql, &[(&group, Type::INT8)]).await?;
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
        })
    }

    /// Takes back the marks of what was not done, and writes acknowledgements and counters.
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
        if self.rules.acknowledge {
            Acknowledger { tx: self.tx, sent: self.store.sent }.acknowledge(&self.acknowledged).await?;
        }
        count(self.tx, self.group, &self.counts).await
    }

    pub(super) async fn process(&mut self, arrivals: &[Arrival], job: &Job) -> Result<Vec<Receipt>, Trouble> {
        // The usual case: nothing is parked or reserved, and the work of all new ones succeeds, in one trip.
        let together = !self.parked && !self.reservations && self.all_at_once(arrivals, job).await?;
        let mut unavailable: Option<Receipt> = None;
        let mut receipts = Vec::with_capacity(arrivals.len());
        for arrival in arrivals {
            let receipt = match (&unavailable, self.marks.get(&arrival.message.id.0)) {
                (Some(receipt), _) => receipt.clone(),
                (None, Some(Mark::Open)) if together => self.done(arrival).await?,
                (None, _) => self.process_one(arrival, job).await?,
            };
            if matches!(receipt, Receipt::Unavailable { .. }) {
                unavailable = Some(receipt.clone());
            }
            receipts.push(receipt);
        }
        Ok(receipts)
    }

    /// Does the work of all that are new. `false` when some of it failed: then none of it was done.
    async fn all_at_once(&self, arrivals: &[Arrival], job: &Job) -> Result<bool, Trouble> {
        let mut seen = std::collections::HashSet::new();
        let new: Vec<&Arrival> = arrivals
            .iter()
            .filter(|arrival| seen.insert(arrival.message.id.0))
            .filter(|arrival| matches!(self.marks.get(&arrival.message.id.0), Some(Mark::Open)))
            .collect();
        match job {
            Job::Nothing => return Ok(true),
            _ if new.is_empty() => return Ok(true),
            Job::Statement(_) => {}
        }
        self.tx.batch("SAVEPOINT work").await?;
        match job.run_all(self.tx, self.name, &new).await {
            Ok(()) => Ok(true),
            Err(Fault::Store(trouble)) => Err(trouble),
            Err(_) => {
                self.tx.batch("ROLLBACK TO work").await?;
                Ok(false)
            }
        }
    }

    async fn process_one(&mut self, arrival: &Arrival, job: &Job) -> Result<Receipt, Trouble> {
        let attempts = match self.standing(arrival).await? {
            Standing::Settled(receipt) => return Ok(receipt),
            Standing::Free { attempts } => attempts,
        };
        if self.reserved(arrival).await? {
            return Ok(Receipt::Busy);
        }
        self.tx.batch("SAVEPOINT work").await?;
        let handled = match job.run_all(self.tx, self.name, &[arrival]).await {
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
    async fn conclude(
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
    async fn done(&mut self, arrival: &Arrival) -> Result<Receipt, Trouble> {
        self.counts.processed += 1;
        self.marks.insert(arrival.message.id.0, Mark::Done(Some(digest(arrival))));
        self.finished(arrival).await
    }

    async fn finished(&mut self, arrival: &Arrival) -> Result<Receipt, Trouble> {
        self.unpark(arrival, true).await?;
        self.acknowledge(arrival);
        Ok(Receipt::Done)
    }

    fn acknowledge(&mut self, arrival: &Arrival) {
        self.acknowledged.push((arrival.message.id, arrival.seq, self.name.to_owned()));
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

    pub(super) async fn reserve(
        &mut self,
        arrivals: &[Arrival],
        lease: Duration,
    ) -> Result<Vec<Reservation>, Trouble> {
        let mut answers = Vec::with_capacity(arrivals.len());
        let mut wanted: HashMap<Uuid, Uuid> = HashMap::new();
        for arrival in arrivals {
            let id = arrival.message.id.0;
            answers.push(match self.standing(arrival).await? {
                Standing::Settled(receipt) => Some(receipt),
                Standing::Free { .. } if wanted.contains_key(&id) => Some(Receipt::Busy),
                Standing::Free { .. } => {
                    wanted.insert(id, Uuid::new_v4());
                    None
                }
            });
        }
        let (ids, tokens): (Vec<Uuid>, Vec<Uuid>) = wanted.into_iter().unzip();
        let rows = self
            .tx
            .query(
                "INSERT INTO inbox_reserved (grp, id, token, until)
                 SELECT $1, r.id, r.token, $4 FROM unnest($2::uuid[], $3::uuid[]) AS r(id, token) ORDER BY r.id
                 ON CONFLICT (grp, id) DO UPDATE SET token = excluded.token, until = excluded.until
                 WHERE inbox_reserved.until <= $5 RETURNING id, token",
                &[
                    (&self.group, Type::INT8),
                    (&ids, Type::UUID_ARRAY),
                    (&tokens, Type::UUID_ARRAY),
                    (&after(self.now, lease), Type::TIMESTAMPTZ),
                    (&self.now, Type::TIMESTAMPTZ),
                ],
            )
            .await?;
        let mut granted: HashMap<Uuid, Uuid> = HashMap::new();
        for row in &rows {
            granted.insert(row.try_get(0)?, row.try_get(1)?);
        }
        let answer = |(arrival, answer): (&Arrival, Option<Receipt>)| match answer {
            Some(receipt) => Reservation::Settled(receipt),
            None => match granted.get(&arrival.message.id.0) {
                Some(token) => Reservation::Granted(*token),
                None => Reservation::Settled(Receipt::Busy),
            },
        };
        Ok(arrivals.iter().zip(answers).map(answer).collect())
    }

    async fn reserved(&self, arrival: &Arrival) -> Result<bool, Trouble> {
        if !self.reservations {
            return Ok(false);
        }
        let row = self
            .tx
            .one(
                "SELECT EXISTS (SELECT 1 FROM inbox_reserved WHERE grp = $1 AND id = $2 AND until > $3)",
                &[
                    (&self.group, Type::INT8),
                    (&arrival.message.id.0, Type::UUID),
                    (&self.now, Type::TIMESTAMPTZ),
                ],
            )
            .await?;
        Ok(row.try_get(0)?)
    }

    pub(super) async fn conclude_all(
        &mut self,
        conclusions: &[(Arrival, Uuid, Handled)],
    ) -> Result<Vec<Receipt>, Trouble> {
        let (ids, tokens): (Vec<Uuid>, Vec<Uuid>) =
            conclusions.iter().map(|(arrival, token, _)| (arrival.message.id.0, *token)).unzip();
        let rows = self
            .tx
            .query(
                // One id after another: whatever the planner believes of a table that is mostly dead rows, it reads these
                // and no others. A row that changed in between is not theirs any more.
                "DELETE FROM inbox_reserved WHERE ctid = ANY (ARRAY(
                     SELECT r.place FROM unnest($2::uuid[], $3::uuid[]) AS w(id, token) CROSS JOIN LATERAL
                     (SELECT ctid AS place FROM inbox_reserved
                      WHERE grp = $1 AND id = w.id AND token = w.token AND until > $4 OFFSET 0) r))
                 AND token = ANY ($3) RETURNING id, token",
                &[
                    (&self.group, Type::INT8),
                    (&ids, Type::UUID_ARRAY),
                    (&tokens, Type::UUID_ARRAY),
                    (&self.now, Type::TIMESTAMPTZ),
                ],
            )
            .await?;
        let mut ended: HashMap<Uuid, Uuid> = HashMap::new();
        for row in &rows {
            ended.insert(row.try_get(0)?, row.try_get(1)?);
        }
        let mut receipts = Vec::with_capacity(conclusions.len());
        for (arrival, token, handled) in conclusions {
            let id = arrival.message.id.0;
            receipts.push(if ended.get(&id) != Some(token) {
                Receipt::Busy
            } else {
                // A token ends one reservation, once.
                ended.remove(&id);
                self.conclude_one(arrival, handled.clone()).await?
            });
        }
        Ok(receipts)
    }

    async fn conclude_one(&mut self, arrival: &Arrival, handled: Handled) -> Result<Receipt, Trouble> {
        if handled == Handled::Done {
            // The work was done outside under a valid token: that cannot be undone, wherever its key stands by now. A
            // handler with a transaction of its own (`once`) made the mark in it: done, not a duplicate.
            if let Some(Mark::Done(known)) = self.marks.get(&arrival.message.id.0)
                && known.as_ref().is_none_or(|known| *known == digest(arrival))
            {
                return self.finished(arrival).await;
            }
            return match self.done_before(arrival).await? {
                Some(receipt) => Ok(receipt),
                None => self.done(arrival).await,
            };
        }
        // Looked at again: the reservation kept others from working on it, not from parking it.
        match self.standing(arrival).await? {
            Standing::Settled(receipt) => Ok(receipt),
            Standing::Free { attempts } => self.conclude(arrival, attempts, handled).await,
        }
    }

    /// A message that is kept for later is not done.
    pub(super) fn keep(&mut self, arrival: &Arrival) {
        let mark = self.marks.entry(arrival.message.id.0).or_insert(Mark::Taken);
        if matches!(mark, Mark::Open) {
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

/// Marks all arrivals that are not marked, waiting for others who are at the same ones, and says what is known of each.
async fn mark(tx: &Transaction, group: i64, arrivals: &[&Arrival]) -> Result<HashMap<Uuid, Mark>, Trouble> {
    let mut first: HashMap<Uuid, &Arrival> = HashMap::new();
    for arrival in arrivals {
        first.entry(arrival.message.id.0).or_insert(arrival);
    }
    if first.is_empty() {
        return Ok(HashMap::new());
    }
    // In the order of ids: two calls with the same ones must not wait for each other.
    let mut new: Vec<&Arrival> = first.values().copied().collect();
    new.sort_unstable_by_key(|arrival| arrival.message.id);
    let ids: Vec<Uuid> = new.iter().map(|arrival| arrival.message.id.0).collect();
    let digests: Vec<Vec<u8>> = new.iter().map(|arrival| digest(arrival)).collect();
    let topics: Vec<&str> = new.iter().map(|arrival| arrival.message.topic.as_str()).collect();
    let keys: Vec<Option<&str>> = new.iter().map(|arrival| arrival.message.key.as_deref()).collect();
    let seqs: Vec<Option<i64>> = new.iter().map(|arrival| arrival.seq).collect();
    let rows = tx
        .query(
            include_str!("mark.sql"),
            &[
                (&group, Type::INT8),
                (&ids, Type::UUID_ARRAY),
                (&digests, Type::BYTEA_ARRAY),
                (&topics, Type::TEXT_ARRAY),
                (&keys, Type::TEXT_ARRAY),
                (&seqs, Type::INT8_ARRAY),
            ],
        )
        .await?;
    let mut marks: HashMap<Uuid, Mark> = HashMap::with_capacity(ids.len());
    for row in &rows {
        marks.insert(row.try_get(0)?, Mark::Open);
    }
    let marked: Vec<Uuid> = ids.into_iter().filter(|id| !marks.contains_key(id)).collect();
    if !marked.is_empty() {
        marks.extend(done(tx, group, &marked).await?);
        if marks.len() < first.len() {
            // Forgotten between the two statements: whoever comes next finds it so.
            let (reason, retry_after) = ("marks are being forgotten".to_owned(), Duration::ZERO);
            return Err(Error::Unavailable { reason, retry_after }.into());
        }
    }
    Ok(marks)
}

async fn count(tx: &Transaction, group: i64, changes: &Changes) -> Result<(), Trouble> {
    let Changes { processed, duplicates, parked, dead } = changes;
    if [processed, duplicates, parked, dead] == [&0; 4] {
        return Ok(());
    }
    tx.execute(
        "INSERT INTO inbox_counters (grp, processed, duplicates, parked, dead) VALUES ($1, $2, $3, $4, $5)",
        &[
            (&group, Type::INT8),
            (processed, Type::INT8),
            (duplicates, Type::INT8),
            (parked, Type::INT8),
            (dead, Type::INT8),
        ],
    )
    .await?;
    super::forget::fold_sometimes(tx).await
}
