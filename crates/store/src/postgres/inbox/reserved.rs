//! Work outside the transaction: reserved before it, concluded after it.
//!
//! What a call reserves is one row with all its ids, and what a call concludes is taken out of it: a row for each message
//! would cost more than its mark.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use chrono::{DateTime, Utc};
use message::MessageId;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::super::connection::Transaction;
use super::super::error::Trouble;
use super::super::row::after;
use super::desk::{Desk, Mark};
use super::parked::{Standing, lock_name};
use crate::column::digest;
use crate::{Arrival, Handled, Receipt, Reservation};

/// What keeps two from reserving the same id at once, whatever keys they have for it. Ids share 256 locks: a server has
/// room for some thousands, and nobody has one for long.
pub(super) fn id_lock(group: i64, id: MessageId) -> i64 {
    lock_name(group, [&id.0.as_bytes()[15..]])
}

/// A reservation, and what is left of it.
pub(super) struct Held {
    until: DateTime<Utc>,
    token: Uuid,
    ids: HashSet<Uuid>,
}

impl Held {
    pub(super) async fn write(&self, tx: &Transaction, group: i64) -> Result<(), Trouble> {
        let Self { until, token, ids } = self;
        let place = [(&group as _, Type::INT8), (until as _, Type::TIMESTAMPTZ), (token as _, Type::UUID)];
        if ids.is_empty() {
            let end = "DELETE FROM inbox_reserved WHERE grp = $1 AND until = $2 AND token = $3";
            tx.execute(end, &place).await?;
        } else {
            let ids: Vec<Uuid> = ids.iter().copied().collect();
            let keep = "UPDATE inbox_reserved SET ids = $4 WHERE grp = $1 AND until = $2 AND token = $3";
            tx.execute(keep, &[&place[..], &[(&ids, Type::UUID_ARRAY)]].concat()).await?;
        }
        Ok(())
    }
}

impl Desk<'_> {
    pub(super) async fn reserve(
        &mut self,
        arrivals: &[Arrival],
        lease: Duration,
    ) -> Result<Vec<Reservation>, Trouble> {
        let mut answers = Vec::with_capacity(arrivals.len());
        let mut wanted: HashSet<Uuid> = HashSet::new();
        for arrival in arrivals {
            answers.push(match self.standing(arrival).await? {
                Standing::Settled(receipt) => Some(receipt),
                Standing::Free { .. } if wanted.insert(arrival.message.id.0) => None,
                Standing::Free { .. } => Some(Receipt::Busy),
            });
        }
        let taken = self.reserved(wanted.iter().copied().collect()).await?;
        let free: Vec<Uuid> = wanted.difference(&taken).copied().collect();
        let token = Uuid::new_v4();
        if !free.is_empty() {
            // What has ended is removed by whoever may take it over: a clock that is set back must not revive it. What
            // ended long ago was removed while ids were forgotten.
            self.tx
                .execute(
                    "WITH ended AS (DELETE FROM inbox_reserved
                                    WHERE grp = $1 AND until <= $5 AND until > $5 - interval '5 minutes')
                     INSERT INTO inbox_reserved (grp, token, until, ids) VALUES ($1, $2, $3, $4)",
                    &[
                        (&self.group, Type::INT8),
                        (&token, Type::UUID),
                        (&after(self.now, lease), Type::TIMESTAMPTZ),
                        (&free, Type::UUID_ARRAY),
                        (&self.now, Type::TIMESTAMPTZ),
                    ],
                )
                .await?;
        }
        let answer = |(arrival, answer): (&Arrival, Option<Receipt>)| match answer {
            Some(receipt) => Reservation::Settled(receipt),
            None if taken.contains(&arrival.message.id.0) => Reservation::Settled(Receipt::Busy),
            None => Reservation::Granted(token),
        };
        Ok(arrivals.iter().zip(answers).map(answer).collect())
    }

    /// Which of these somebody has reserved.
    pub(super) async fn reserved(&self, ids: Vec<Uuid>) -> Result<HashSet<Uuid>, Trouble> {
        if ids.is_empty() {
            return Ok(HashSet::new());
        }
        let rows = self
            .tx
            .query(
                "SELECT held.id FROM inbox_reserved r CROSS JOIN LATERAL unnest(r.ids) AS held(id)
                 WHERE r.grp = $1 AND r.until > $2 AND held.id = ANY ($3)",
                &[(&self.group, Type::INT8), (&self.now, Type::TIMESTAMPTZ), (&ids, Type::UUID_ARRAY)],
            )
            .await?;
        rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
    }

    pub(super) async fn conclude_all(
        &mut self,
        conclusions: &[(Arrival, Uuid, Handled)],
    ) -> Result<Vec<Receipt>, Trouble> {
        let mut held = self.take_reservations(conclusions).await?;
        let mut receipts = Vec::with_capacity(conclusions.len());
        for (arrival, token, handled) in conclusions {
            // A token ends the reservation of an id once.
            let is_ours = held.get_mut(token).is_some_and(|held| held.ids.remove(&arrival.message.id.0));
            receipts.push(if is_ours {
                self.conclude_one(arrival, handled.clone()).await?
            } else {
                Receipt::Busy
            });
        }
        self.held = held.into_values().collect();
        Ok(receipts)
    }

    /// Those of these reservations that have not ended, by their tokens. Nobody else can end them meanwhile.
    async fn take_reservations(
        &self,
        conclusions: &[(Arrival, Uuid, Handled)],
    ) -> Result<HashMap<Uuid, Held>, Trouble> {
        let tokens: HashSet<Uuid> = conclusions.iter().map(|(_, token, _)| *token).collect();
        let tokens: Vec<Uuid> = tokens.into_iter().collect();
        let rows = self
            .tx
            .query(
                "SELECT until, token, ids FROM inbox_reserved WHERE grp = $1 AND until > $2 AND token = ANY ($3)
                 ORDER BY until, token FOR UPDATE",
                &[(&self.group, Type::INT8), (&self.now, Type::TIMESTAMPTZ), (&tokens, Type::UUID_ARRAY)],
            )
            .await?;
        let held = |row: &Row| {
            let ids: Vec<Uuid> = row.try_get(2)?;
            let held =
                Held { until: row.try_get(0)?, token: row.try_get(1)?, ids: ids.into_iter().collect() };
            Ok((held.token, held))
        };
        rows.iter().map(held).collect()
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
}
