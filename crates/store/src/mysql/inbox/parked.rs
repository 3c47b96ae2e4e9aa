//! Messages that the inbox keeps: for a later try, behind another of their key, or for a person. Whoever is here has the
//! group for itself.

use std::time::Duration;

use message::{Message, MessageId};
use mysql_async::prelude::Queryable;
use mysql_async::{Row, Value};
use sha2::{Digest, Sha256};

use super::super::error::Trouble;
use super::super::row::{MESSAGE_COLUMNS, Read, at, message_columns};
use super::Desk;
use crate::column::{BEHIND, OTHER_CONTENT, clip, digest, headers_json, millis};
use crate::{Arrival, Error, Receipt};

/// Whether an arrival may be worked on now.
pub(super) enum Standing {
    /// It may; it has failed this often.
    Free { attempts: u32 },
    /// It may not, and this is what to say of it.
    Settled(Receipt),
}

/// A parked message's place.
pub(super) struct Place {
    position: i64,
    digest: Vec<u8>,
    attempts: u32,
    next_attempt_at: Option<i64>,
    pub(super) dead: bool,
    error: String,
}

/// The line that messages of a topic and key stand in. Another may have the same: whoever finds one compares its key.
pub(super) fn line(topic: &str, key: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(topic.as_bytes());
    hash.update([0]);
    hash.update(key.as_bytes());
    hash.finalize().into()
}

impl Place {
    /// Whether it is this very message that is kept here, and not another under its id.
    pub(super) fn is_of(&self, arrival: &Arrival) -> bool {
        self.digest == digest(arrival)
    }
}

impl Desk<'_> {
    /// Where an arrival stands: done before, parked, behind another, or free to be worked on.
    pub(super) async fn standing(&mut self, arrival: &Arrival) -> Result<Standing, Trouble> {
        if let Some(receipt) = self.done_before(arrival).await? {
            return Ok(Standing::Settled(receipt));
        }
        if !self.parked {
            return Ok(Standing::Free { attempts: 0 });
        }
        if let Some(place) = self.place(arrival.message.id).await? {
            return self.standing_at(arrival, place).await;
        }
        if self.blocked(arrival, None).await? {
            let error = BEHIND.to_owned();
            self.park(arrival, 0, None, false, &error).await?;
            self.counts.parked += 1;
            return Ok(Standing::Settled(Receipt::Parked { error }));
        }
        Ok(Standing::Free { attempts: 0 })
    }

    /// Where an arrival stands whose id has a place already.
    async fn standing_at(&mut self, arrival: &Arrival, place: Place) -> Result<Standing, Trouble> {
        if !place.is_of(arrival) {
            return Ok(Standing::Settled(Receipt::Dead { error: OTHER_CONTENT.to_owned() }));
        }
        let Place { position, attempts, next_attempt_at, dead, error, .. } = place;
        if dead {
            return Ok(Standing::Settled(Receipt::Dead { error }));
        }
        if next_attempt_at.is_none_or(|due| due > self.now) {
            return Ok(Standing::Settled(Receipt::Parked { error }));
        }
        // It was given a fresh start, or those before it were: it goes back into the queue.
        if self.blocked(arrival, Some(position)).await? {
            let sql = "UPDATE inbox_parked SET next_attempt_at = NULL, error = ? WHERE position = ?";
            self.tx.exec_drop(sql, (BEHIND, position)).await?;
            return Ok(Standing::Settled(Receipt::Parked { error: BEHIND.to_owned() }));
        }
        Ok(Standing::Free { attempts })
    }

    pub(super) async fn place(&mut self, id: MessageId) -> Result<Option<Place>, Trouble> {
        if !self.parked {
            return Ok(None);
        }
        let sql = "SELECT position, digest, attempts, next_attempt_at, dead, error
                   FROM inbox_parked WHERE grp = ? AND id = ?";
        let row: Option<Row> = self.tx.exec_first(sql, (self.group, id.to_string())).await?;
        let Some(mut row) = row else { return Ok(None) };
        Ok(Some(Place {
            position: row.number(0)?,
            digest: row.bytes(1)?,
            attempts: row.small(2)?,
            next_attempt_at: row.optional_millis(3)?,
            dead: row.flag(4)?,
            error: row.text(5)?,
        }))
    }

    /// Whether another of its key holds it back: one before `position`, or any.
    async fn blocked(&mut self, arrival: &Arrival, position: Option<i64>) -> Result<bool, Trouble> {
        let Some(key) = arrival.message.key.as_ref().filter(|_| self.rules.ordered) else { return Ok(false) };
        let sql = "SELECT EXISTS (SELECT 1 FROM inbox_parked FORCE INDEX (inbox_parked_key)
                                  WHERE grp = ? AND line = ? AND topic = ? AND `key` = ? AND position < ?
                                        AND (dead = 0 OR ?))";
        let (topic, before) = (&arrival.message.topic, position.unwrap_or(i64::MAX));
        let values = (self.group, line(topic, key), topic, key.as_bytes(), before, self.rules.hold_dead);
        Ok(self.tx.exec_first::<bool, _, _>(sql, values).await? == Some(true))
    }

    /// Keeps a message that failed for its next try, or for a person at its limit.
    pub(super) async fn retry(
        &mut self,
        arrival: &Arrival,
        attempts: u32,
        error: String,
        after: Option<Duration>,
    ) -> Result<Receipt, Trouble> {
        let attempts = attempts + 1;
        let policy = &self.rules.retry;
        if attempts >= policy.max_attempts {
            let error = format!("MaxAttempts({}) exceeded: {error}", policy.max_attempts);
            return self.bury(arrival, attempts, error).await;
        }
        let delay = policy.delay(attempts, &mut rand::rng()).max(after.unwrap_or_default());
        let due = self.now.saturating_add(millis(delay));
        let new = self.park(arrival, attempts, Some(due), false, &error).await?;
        self.counts.parked += i64::from(new);
        Ok(Receipt::Parked { error })
    }

    /// Keeps a message for a person.
    pub(super) async fn bury(
        &mut self,
        arrival: &Arrival,
        attempts: u32,
        error: String,
    ) -> Result<Receipt, Trouble> {
        let new = self.park(arrival, attempts, None, true, &error).await?;
        self.counts.parked -= i64::from(!new);
        self.counts.dead += 1;
        if !self.rules.hold_dead {
            self.wake_next(&arrival.message).await?;
        }
        Ok(Receipt::Dead { error })
    }

    /// Writes the parked message. `true` when it was not parked before.
    async fn park(
        &mut self,
        arrival: &Arrival,
        attempts: u32,
        next_attempt_at: Option<i64>,
        dead: bool,
        error: &str,
    ) -> Result<bool, Trouble> {
        let message = &arrival.message;
        let new = self.place(message.id).await?.is_none();
        let values: Vec<Value> = vec![
            self.group.into(),
            message.id.to_string().into(),
            digest(arrival).into(),
            message.topic.as_str().into(),
            message.kind.as_deref().into(),
            message.key.as_deref().map(str::as_bytes).into(),
            Value::Bytes(message.payload.to_vec()),
            message.content_type.as_str().into(),
            headers_json(message).into(),
            at(message.occurred_at.timestamp_millis()),
            arrival.seq.into(),
            arrival.delivery.into(),
            attempts.into(),
            next_attempt_at.map_or(Value::NULL, at),
            dead.into(),
            clip(error).into(),
        ];
        self.tx.exec_drop(include_str!("park.sql"), values).await?;
        self.parked = true;
        Ok(new)
    }

    /// A message is done: if it was parked, it is no more, and the next of its key may go.
    ///
    /// Another message under its id stays; so does what waits for a person, unless `dead` says that this very
    /// work was done after all.
    pub(super) async fn unpark(&mut self, arrival: &Arrival, dead: bool) -> Result<(), Trouble> {
        let Some(place) = self.place(arrival.message.id).await? else { return Ok(()) };
        if !place.is_of(arrival) || (place.dead && !dead) {
            return Ok(());
        }
        self.remove(place.position, place.dead).await?;
        self.wake_next(&arrival.message).await
    }

    async fn remove(&mut self, position: i64, dead: bool) -> Result<(), Trouble> {
        self.tx.exec_drop("DELETE FROM inbox_parked WHERE position = ?", (position,)).await?;
        self.counts.parked -= i64::from(!dead);
        self.counts.dead -= i64::from(dead);
        Ok(())
    }

    /// The first message of a key that waits behind nobody any more is due at once.
    async fn wake_next(&mut self, message: &Message) -> Result<(), Trouble> {
        let Some(key) = &message.key else { return Ok(()) };
        let sql = "SELECT position FROM inbox_parked FORCE INDEX (inbox_parked_key)
                   WHERE grp = ? AND line = ? AND topic = ? AND `key` = ? AND dead = 0 ORDER BY position LIMIT 1";
        let values = (self.group, line(&message.topic, key), &message.topic, key.as_bytes());
        let next: Option<i64> = self.tx.exec_first(sql, values).await?;
        if let Some(next) = next {
            let sql =
                "UPDATE inbox_parked SET next_attempt_at = ? WHERE position = ? AND next_attempt_at IS NULL";
            self.tx.exec_drop(sql, (at(self.now), next)).await?;
        }
        Ok(())
    }

    /// An operator gives a message a fresh start.
    pub(super) async fn fresh_start(&mut self, id: MessageId) -> Result<(), Trouble> {
        let place = self.place(id).await?.ok_or_else(|| self.not_parked(id))?;
        // One that waits behind another of its key goes on waiting; whether one that was Dead must wait is seen, by
        // the rules of its group, when it is tried.
        let follows = !place.dead && place.next_attempt_at.is_none();
        let due = if follows { Value::NULL } else { at(self.now) };
        let sql = "UPDATE inbox_parked SET dead = 0, attempts = 0, next_attempt_at = ? WHERE position = ?";
        self.tx.exec_drop(sql, (due, place.position)).await?;
        self.counts.dead -= i64::from(place.dead);
        self.counts.parked += i64::from(place.dead);
        Ok(())
    }

    /// An operator gives a message up. Answers it, for the audit.
    pub(super) async fn give_up(&mut self, id: MessageId) -> Result<Message, Trouble> {
        let place = self.place(id).await?.ok_or_else(|| self.not_parked(id))?;
        let sql = concat!("SELECT ", message_columns!(), " FROM inbox_parked WHERE position = ?");
        let row: Option<Row> = self.tx.exec_first(sql, (place.position,)).await?;
        let mut row = row.filter(|row| row.len() == MESSAGE_COLUMNS).ok_or_else(|| self.not_parked(id))?;
        let message = row.message()?;
        self.remove(place.position, place.dead).await?;
        // One that waited behind another leaves that one as it is: those behind both go on waiting.
        if place.dead || place.next_attempt_at.is_some() {
            self.wake_next(&message).await?;
        }
        Ok(message)
    }

    fn not_parked(&self, id: MessageId) -> Error {
        Error::Refused(format!("the inbox of {} does not keep a message {id}", self.name))
    }
}
