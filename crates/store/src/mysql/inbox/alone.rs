//! One message after another, with the group for itself: when something of a batch is parked, or fails.

use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Row, Value};
use uuid::Uuid;

use super::super::error::Trouble;
use super::super::row::{Read, at};
use super::Desk;
use super::parked::Standing;
use super::work::{Job, Ready};
use crate::column::{OTHER_CONTENT, digest, millis};
use crate::stuck::Stuck;
use crate::{Arrival, Handled, Receipt, Reservation};

impl Desk<'_> {
    pub(super) async fn process_each(
        &mut self,
        arrivals: &[Arrival],
        job: &Job,
    ) -> Result<Vec<Receipt>, Trouble> {
        let ready = job.prepare(&mut self.tx).await?;
        let mut unavailable: Option<Receipt> = None;
        let mut receipts = Vec::with_capacity(arrivals.len());
        let mut stuck = Stuck::new(self.rules);
        for arrival in arrivals {
            let receipt = match &unavailable {
                Some(receipt) => receipt.clone(),
                None if stuck.holds(arrival) => Receipt::Busy,
                None => self.process(arrival, ready.as_ref()).await?,
            };
            stuck.note(arrival, &receipt);
            if matches!(receipt, Receipt::Unavailable { .. }) {
                unavailable = Some(receipt.clone());
            }
            receipts.push(receipt);
        }
        Ok(receipts)
    }

    async fn process(
        &mut self,
        arrival: &Arrival,
        ready: Result<&Ready<'_>, &String>,
    ) -> Result<Receipt, Trouble> {
        let attempts = match self.standing(arrival).await? {
            Standing::Settled(receipt) => return Ok(receipt),
            Standing::Free { attempts } => attempts,
        };
        if self.reserved(arrival).await? {
            return Ok(Receipt::Busy);
        }
        let handled = match ready {
            Ok(ready) => ready.run(&mut self.tx, self.name, arrival).await?,
            Err(error) => Handled::Unavailable { error: error.clone() },
        };
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
            Handled::Done => {
                self.mark(&[arrival]).await?;
                self.finished(arrival).await
            }
            Handled::Retry { error, after } => self.retry(arrival, attempts, error, after).await,
            Handled::Dead { error } => self.bury(arrival, attempts + 1, error).await,
            Handled::Unavailable { error } => Ok(Receipt::Unavailable { error }),
        }
    }

    pub(super) async fn conclude_each(
        &mut self,
        conclusions: &[(Arrival, Uuid, Handled)],
    ) -> Result<Vec<Receipt>, Trouble> {
        let mut receipts = Vec::with_capacity(conclusions.len());
        for (arrival, token, handled) in conclusions {
            receipts.push(if !self.end_reservation(arrival, *token).await? {
                Receipt::Busy
            } else if *handled == Handled::Done {
                self.conclude_done(arrival).await?
            } else {
                // Looked at again: the reservation kept others from working on it, not from parking it.
                match self.standing(arrival).await? {
                    Standing::Settled(receipt) => receipt,
                    Standing::Free { attempts } => self.conclude(arrival, attempts, handled.clone()).await?,
                }
            });
        }
        Ok(receipts)
    }

    /// The work was done outside under a valid token: that cannot be undone, wherever its key stands by now.
    async fn conclude_done(&mut self, arrival: &Arrival) -> Result<Receipt, Trouble> {
        match self.digest_of(arrival).await? {
            // A handler with a transaction of its own (`sqlx::once`) made the mark in it: done, not a duplicate.
            Some(other) if other.is_empty() || other == digest(arrival) => self.finished(arrival).await,
            Some(_) => self.other_content(arrival).await,
            None => self.conclude(arrival, 0, Handled::Done).await,
        }
    }

    async fn finished(&mut self, arrival: &Arrival) -> Result<Receipt, Trouble> {
        self.unpark(arrival, true).await?;
        self.acknowledge(arrival.message.id);
        Ok(Receipt::Done)
    }

    /// What the mark of an arrival says of its content.
    async fn digest_of(&mut self, arrival: &Arrival) -> Result<Option<Vec<u8>>, Trouble> {
        let sql = "SELECT digest FROM inbox_ids WHERE grp = ? AND id = ?";
        match self.tx.exec_first::<Row, _, _>(sql, (self.group, arrival.message.id.to_string())).await? {
            None => Ok(None),
            Some(mut row) => Ok(Some(row.bytes(0)?)),
        }
    }

    /// The receipt of a message that was done before, if it was.
    pub(super) async fn done_before(&mut self, arrival: &Arrival) -> Result<Option<Receipt>, Trouble> {
        match self.digest_of(arrival).await? {
            None => Ok(None),
            Some(other) if other.is_empty() || other == digest(arrival) => {
                self.counts.duplicates += 1;
                // A crash between a handler's own commit and its conclusion leaves it parked.
                self.unpark(arrival, false).await?;
                self.acknowledge(arrival.message.id);
                Ok(Some(Receipt::Duplicate))
            }
            Some(_) => self.other_content(arrival).await.map(Some),
        }
    }

    async fn other_content(&mut self, arrival: &Arrival) -> Result<Receipt, Trouble> {
        let error = OTHER_CONTENT.to_owned();
        // It may come often; it is kept, and counted, once, and never in the place of another.
        match self.place(arrival.message.id).await? {
            Some(place) if place.dead || !place.is_of(arrival) => Ok(Receipt::Dead { error }),
            _ => self.bury(arrival, 0, error).await,
        }
    }

    pub(super) async fn reserve_each(
        &mut self,
        arrivals: &[Arrival],
        lease: Duration,
    ) -> Result<Vec<Reservation>, Trouble> {
        let mut reservations = Vec::with_capacity(arrivals.len());
        for arrival in arrivals {
            reservations.push(match self.standing(arrival).await? {
                Standing::Settled(receipt) => Reservation::Settled(receipt),
                Standing::Free { .. } if self.reserved(arrival).await? => Reservation::Settled(Receipt::Busy),
                Standing::Free { .. } => {
                    let token = Uuid::new_v4();
                    let values: Vec<Value> = vec![
                        self.group.into(),
                        arrival.message.id.to_string().into(),
                        token.to_string().into(),
                        at(self.now.saturating_add(millis(lease))),
                    ];
                    self.tx
                        .exec_drop(
                            "INSERT INTO inbox_reserved (grp, id, token, until) VALUES (?, ?, ?, ?)
                             ON DUPLICATE KEY UPDATE token = VALUES(token), until = VALUES(until)",
                            values,
                        )
                        .await?;
                    self.reservations = true;
                    Reservation::Granted(token)
                }
            });
        }
        Ok(reservations)
    }

    async fn reserved(&mut self, arrival: &Arrival) -> Result<bool, Trouble> {
        if !self.reservations {
            return Ok(false);
        }
        let sql = "SELECT EXISTS (SELECT 1 FROM inbox_reserved WHERE grp = ? AND id = ? AND until > ?)";
        let values = (self.group, arrival.message.id.to_string(), at(self.now));
        Ok(self.tx.exec_first::<bool, _, _>(sql, values).await? == Some(true))
    }

    async fn end_reservation(&mut self, arrival: &Arrival, token: Uuid) -> Result<bool, Trouble> {
        let sql = "DELETE FROM inbox_reserved WHERE grp = ? AND id = ? AND token = ? AND until > ?";
        let values = (self.group, arrival.message.id.to_string(), token.to_string(), at(self.now));
        self.tx.exec_drop(sql, values).await?;
        Ok(self.tx.affected_rows() == 1)
    }
}
