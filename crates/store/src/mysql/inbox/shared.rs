//! The usual case: nothing of a batch is parked, and nothing fails. The group is shared, and each step is one statement
//! for the whole batch.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use message::MessageId;
use mysql_async::prelude::Queryable;
use mysql_async::{Row, Value};
use serde_json::json;
use uuid::Uuid;

use super::super::error::Trouble;
use super::super::row::{Read, at};
use super::Desk;
use super::parked::line;
use super::work::Job;
use crate::column::{digest, millis};
use crate::{Arrival, Handled, Receipt, Reservation};

/// The ids of a batch, and places for them in a statement.
struct Ids {
    places: String,
    values: Vec<Value>,
}

impl Ids {
    fn of<'a>(arrivals: impl IntoIterator<Item = &'a Arrival>) -> Self {
        let ids: BTreeSet<MessageId> = arrivals.into_iter().map(|arrival| arrival.message.id).collect();
        let values: Vec<Value> = ids.iter().map(|id| id.to_string().into()).collect();
        Self { places: vec!["?"; values.len().max(1)].join(", "), values: pad(values) }
    }
}

/// An IN list must not be empty.
fn pad(mut values: Vec<Value>) -> Vec<Value> {
    if values.is_empty() {
        values.push(Value::NULL);
    }
    values
}

impl Desk<'_> {
    /// Steps back if anything parked concerns one of `arrivals`.
    async fn keep_clear(&mut self, arrivals: impl Iterator<Item = &Arrival> + Clone) -> Result<(), Trouble> {
        if !self.parked {
            return Ok(());
        }
        let ids: Vec<String> = arrivals.clone().map(|arrival| arrival.message.id.to_string()).collect();
        let lines: BTreeSet<String> = arrivals
            .filter(|_| self.rules.ordered)
            .filter_map(|Arrival { message, .. }| Some(line(&message.topic, message.key.as_deref()?)))
            .map(|line| line.iter().map(|byte| format!("{byte:02x}")).collect())
            .collect();
        let values = (json!(ids).to_string(), self.group, json!(lines).to_string(), self.group);
        let touched: Option<bool> = self.tx.exec_first(include_str!("touched.sql"), values).await?;
        if touched == Some(false) { Ok(()) } else { Err(Trouble::Crowded) }
    }

    /// The digests of those that are marked.
    async fn marks(&mut self, ids: &Ids) -> Result<HashMap<MessageId, Vec<u8>>, Trouble> {
        let sql = format!(
            "SELECT id, digest FROM inbox_ids FORCE INDEX (inbox_ids_id) WHERE grp = {} AND id IN ({})",
            self.group, ids.places
        );
        let mut marks = HashMap::new();
        for mut row in self.tx.exec::<Row, _, _>(sql, ids.values.clone()).await? {
            marks.insert(row.id(0)?, row.bytes(1)?);
        }
        Ok(marks)
    }

    /// Cuts `arrivals` into those to do and duplicates. Other content under a known id needs the group alone.
    async fn sort<'a>(&mut self, arrivals: &'a [Arrival]) -> Result<(Vec<&'a Arrival>, Vec<bool>), Trouble> {
        self.keep_clear(arrivals.iter()).await?;
        let mut known = self.marks(&Ids::of(arrivals)).await?;
        let mut fresh = Vec::with_capacity(arrivals.len());
        let mut is_new = Vec::with_capacity(arrivals.len());
        for arrival in arrivals {
            let digest = digest(arrival);
            match known.get(&arrival.message.id) {
                None => {
                    known.insert(arrival.message.id, digest);
                    fresh.push(arrival);
                    is_new.push(true);
                }
                Some(other) if *other == digest || other.is_empty() => is_new.push(false),
                Some(_) => return Err(Trouble::Crowded),
            }
        }
        Ok((fresh, is_new))
    }

    fn duplicate(&mut self, arrival: &Arrival) -> Receipt {
        self.counts.duplicates += 1;
        self.acknowledge(arrival.message.id);
        Receipt::Duplicate
    }

    pub(super) async fn process_all(
        &mut self,
        arrivals: &[Arrival],
        job: &Job,
    ) -> Result<Vec<Receipt>, Trouble> {
        let (fresh, is_new) = self.sort(arrivals).await?;
        self.mark(&fresh).await?;
        self.unreserved(&fresh).await?;
        let (mut receipts, mut undone) = (Vec::with_capacity(arrivals.len()), Vec::new());
        let mut unavailable: Option<String> = None;
        let ready = match job.prepare(&mut self.tx).await? {
            Ok(ready) => Some(ready),
            Err(error) => {
                unavailable = Some(error);
                None
            }
        };
        for (arrival, is_new) in arrivals.iter().zip(is_new) {
            if !is_new && unavailable.is_none() {
                receipts.push(self.duplicate(arrival));
                continue;
            }
            let handled = match (&unavailable, &ready) {
                (None, Some(ready)) => ready.run(&mut self.tx, self.name, arrival).await?,
                (error, _) => Handled::Unavailable { error: error.clone().unwrap_or_default() },
            };
            receipts.push(match handled {
                Handled::Done => {
                    self.acknowledge(arrival.message.id);
                    Receipt::Done
                }
                Handled::Unavailable { error } => {
                    if is_new {
                        undone.push(arrival);
                    }
                    unavailable = Some(error.clone());
                    Receipt::Unavailable { error }
                }
                // It must be parked.
                Handled::Retry { .. } | Handled::Dead { .. } => return Err(Trouble::Crowded),
            });
        }
        self.unmark(&undone).await?;
        Ok(receipts)
    }

    /// Steps back if one of those just marked is in somebody's hands. Whoever reserves writes first and then looks for
    /// marks, as we do the other way round: one of the two sees the other.
    async fn unreserved(&mut self, marked: &[&Arrival]) -> Result<(), Trouble> {
        let ids = Ids::of(marked.iter().copied());
        let sql = format!(
            "SELECT id FROM inbox_reserved FORCE INDEX (PRIMARY)
             WHERE grp = {} AND id IN ({}) AND until > utc_timestamp(3) LOCK IN SHARE MODE",
            self.group, ids.places
        );
        let busy: Vec<Row> = self.tx.exec(sql, ids.values).await?;
        if busy.is_empty() { Ok(()) } else { Err(Trouble::Crowded) }
    }

    pub(super) async fn reserve_all(
        &mut self,
        arrivals: &[Arrival],
        lease: Duration,
    ) -> Result<Vec<Reservation>, Trouble> {
        let (fresh, is_new) = self.sort(arrivals).await?;
        let mut tokens = self.take(&fresh, lease).await?;
        let mut given = HashSet::new();
        let answer = |(arrival, is_new): (&Arrival, bool)| {
            let id = arrival.message.id;
            if is_new {
                given.insert(id);
                return tokens.remove(&id).map_or(Reservation::Settled(Receipt::Busy), Reservation::Granted);
            }
            // It comes twice in this very call, or it was done before.
            Reservation::Settled(if given.contains(&id) { Receipt::Busy } else { self.duplicate(arrival) })
        };
        Ok(arrivals.iter().zip(is_new).map(answer).collect())
    }

    /// Reserves those of `fresh` that nobody else has. Answers their tokens.
    async fn take(
        &mut self,
        fresh: &[&Arrival],
        lease: Duration,
    ) -> Result<BTreeMap<MessageId, Uuid>, Trouble> {
        let mut tokens: BTreeMap<MessageId, Uuid> =
            fresh.iter().map(|arrival| (arrival.message.id, Uuid::new_v4())).collect();
        if tokens.is_empty() {
            return Ok(tokens);
        }
        let now = self.look().await?;
        let until = at(now.saturating_add(millis(lease)));
        let rows = vec!["(?, ?, ?, ?)"; tokens.len()].join(", ");
        // A reservation that has not ended stays as it is.
        let sql = format!(
            "INSERT INTO inbox_reserved (grp, id, token, until) VALUES {rows}
             ON DUPLICATE KEY UPDATE token = if(until <= ?, VALUES(token), token),
                                     until = if(token = VALUES(token), VALUES(until), until)"
        );
        let mut values: Vec<Value> = tokens
            .iter()
            .flat_map(|(id, token)| -> [Value; 4] {
                [self.group.into(), id.to_string().into(), token.to_string().into(), until.clone()]
            })
            .collect();
        values.push(at(now));
        self.tx.exec_drop(sql, values).await?;
        let ids = Ids::of(fresh.iter().copied());
        let sql = format!(
            "SELECT id, token FROM inbox_reserved FORCE INDEX (PRIMARY) WHERE grp = {} AND id IN ({})",
            self.group, ids.places
        );
        let mut held = HashMap::new();
        for mut row in self.tx.exec::<Row, _, _>(sql, ids.values.clone()).await? {
            held.insert(row.id(0)?, row.text(1)?);
        }
        tokens.retain(|id, token| held.get(id) == Some(&token.to_string()));
        let sql = format!(
            "SELECT id FROM inbox_ids FORCE INDEX (inbox_ids_id) WHERE grp = {} AND id IN ({}) LOCK IN SHARE MODE",
            self.group, ids.places
        );
        let done: Vec<Row> = self.tx.exec(sql, ids.values).await?;
        // Somebody did one of them meanwhile: alone, that is seen for certain.
        if done.is_empty() { Ok(tokens) } else { Err(Trouble::Crowded) }
    }

    pub(super) async fn conclude_all(
        &mut self,
        conclusions: &[(Arrival, Uuid, Handled)],
    ) -> Result<Vec<Receipt>, Trouble> {
        let all_done = conclusions.iter().all(|(_, _, handled)| *handled == Handled::Done);
        let distinct: HashSet<MessageId> =
            conclusions.iter().map(|(arrival, ..)| arrival.message.id).collect();
        if !all_done || distinct.len() < conclusions.len() {
            return Err(Trouble::Crowded);
        }
        self.keep_clear(conclusions.iter().map(|(arrival, ..)| arrival)).await?;
        let ended = self.end(conclusions).await?;
        let ours: Vec<&Arrival> = conclusions
            .iter()
            .map(|(arrival, ..)| arrival)
            .filter(|arrival| ended.contains(&arrival.message.id))
            .collect();
        let known = self.marks(&Ids::of(ours.iter().copied())).await?;
        let mut fresh = Vec::with_capacity(ours.len());
        for arrival in ours {
            match known.get(&arrival.message.id) {
                None => fresh.push(arrival),
                // A handler with a transaction of its own (`sqlx::once`) made the mark in it: done, not a duplicate.
                Some(other) if *other == digest(arrival) || other.is_empty() => {}
                Some(_) => return Err(Trouble::Crowded),
            }
        }
        self.mark(&fresh).await?;
        let receipt = |(arrival, ..): &(Arrival, Uuid, Handled)| {
            if !ended.contains(&arrival.message.id) {
                return Receipt::Busy;
            }
            self.acknowledge(arrival.message.id);
            Receipt::Done
        };
        Ok(conclusions.iter().map(receipt).collect())
    }

    /// Ends the reservations that are valid. Answers whose.
    async fn end(&mut self, conclusions: &[(Arrival, Uuid, Handled)]) -> Result<HashSet<MessageId>, Trouble> {
        let ids = Ids::of(conclusions.iter().map(|(arrival, ..)| arrival));
        let sql = format!(
            "SELECT id, token, until > utc_timestamp(3) FROM inbox_reserved FORCE INDEX (PRIMARY)
             WHERE grp = {} AND id IN ({}) ORDER BY id FOR UPDATE",
            self.group, ids.places
        );
        let mut held = HashMap::new();
        for mut row in self.tx.exec::<Row, _, _>(sql, ids.values).await? {
            if row.flag(2)? {
                held.insert(row.id(0)?, row.text(1)?);
            }
        }
        let valid = |(arrival, token, _): &&(Arrival, Uuid, Handled)| {
            held.get(&arrival.message.id) == Some(&token.to_string())
        };
        let ended: Vec<&Arrival> = conclusions.iter().filter(valid).map(|(arrival, ..)| arrival).collect();
        let ids = Ids::of(ended.iter().copied());
        let sql = format!(
            "DELETE r FROM inbox_reserved r FORCE INDEX (PRIMARY) WHERE r.grp = {} AND r.id IN ({})",
            self.group, ids.places
        );
        if !ended.is_empty() {
            self.tx.exec_drop(sql, ids.values).await?;
        }
        Ok(ended.iter().map(|arrival| arrival.message.id).collect())
    }
}
