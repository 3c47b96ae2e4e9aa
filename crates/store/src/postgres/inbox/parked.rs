//! Messages that the inbox keeps: for a later try, behind another of their key, or for a person.

use std::time::Duration;

use chrono::{DateTime, Utc};
use message::{Message, MessageId};
use sha2::{Digest, Sha256};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::super::connection::Transaction;
use super::super::error::Trouble;
use super::super::row::{MESSAGE_COLUMNS, after, count, message, message_columns};
use super::desk::Desk;
use crate::column::{BEHIND, OTHER_CONTENT, clip, digest, headers_json};
use crate::{Arrival, Error, Page, Paged, Parked, Receipt};

/// Those of topic `$2` and key `$3`, in a group: the hash is what the index has.
macro_rules! of_key {
    () => {
        "hashtextextended(key, hashtextextended(topic, 0)) = hashtextextended($3, hashtextextended($2, 0))
         AND topic = $2 AND key = $3"
    };
}

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
    next_attempt_at: Option<DateTime<Utc>>,
    pub(super) dead: bool,
    error: String,
}

impl Place {
    /// Whether it is this very message that is kept here, and not another under its id.
    pub(super) fn is_of(&self, arrival: &Arrival) -> bool {
        self.digest == digest(arrival)
    }
}

/// What keeps others from a key.
pub(super) fn key_lock(group: i64, topic: &str, key: &str) -> i64 {
    lock_name(group, [topic.as_bytes(), &[0], key.as_bytes()])
}

/// The name of a lock for this of a group.
pub(super) fn lock_name<const N: usize>(group: i64, parts: [&[u8]; N]) -> i64 {
    let mut hash = Sha256::new();
    hash.update(group.to_be_bytes());
    for part in parts {
        hash.update(part);
    }
    let hash = hash.finalize();
    i64::from_be_bytes(hash[..8].try_into().expect("a hash has more than eight bytes"))
}

/// Keeps others from these until the transaction ends. In one order, so that nobody waits in a circle.
pub(super) async fn lock(tx: &Transaction, mut names: Vec<i64>) -> Result<(), Trouble> {
    if names.is_empty() {
        return Ok(());
    }
    names.sort_unstable();
    names.dedup();
    tx.execute(
        "SELECT pg_advisory_xact_lock(name) FROM unnest($1::bigint[]) AS name",
        &[(&names, Type::INT8_ARRAY)],
    )
    .await?;
    Ok(())
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
    async fn standing_at(&self, arrival: &Arrival, place: Place) -> Result<Standing, Trouble> {
        if !place.is_of(arrival) {
            return Ok(Standing::Settled(Receipt::Dead { error: OTHER_CONTENT.to_owned() }));
        }
        let Place { position, attempts, next_attempt_at, dead, error, .. } = place;
        if dead {
            return Ok(Standing::Settled(Receipt::Dead { error }));
        }
        if next_attempt_at.is_none_or(|at| at > self.now) {
            return Ok(Standing::Settled(Receipt::Parked { error }));
        }
        // It was given a fresh start, or those before it were: it goes back into the queue.
        if self.blocked(arrival, Some(position)).await? {
            self.tx
                .execute(
                    "UPDATE inbox_parked SET next_attempt_at = NULL, error = $2 WHERE grp = $3 AND position = $1",
                    &[(&position, Type::INT8), (&BEHIND, Type::TEXT), (&self.group, Type::INT8)],
                )
                .await?;
            return Ok(Standing::Settled(Receipt::Parked { error: BEHIND.to_owned() }));
        }
        Ok(Standing::Free { attempts })
    }

    pub(super) async fn place(&self, id: MessageId) -> Result<Option<Place>, Trouble> {
        if !self.parked {
            return Ok(None);
        }
        let rows = self
            .tx
            .query(
                "SELECT position, digest, attempts, next_attempt_at, dead, error
                 FROM inbox_parked WHERE grp = $1 AND id = $2",
                &[(&self.group, Type::INT8), (&id.0, Type::UUID)],
            )
            .await?;
        let Some(row) = rows.first() else { return Ok(None) };
        Ok(Some(Place {
            position: row.try_get(0)?,
            digest: row.try_get(1)?,
            attempts: u32::try_from(row.try_get::<_, i32>(2)?).unwrap_or(0),
            next_attempt_at: row.try_get(3)?,
            dead: row.try_get(4)?,
            error: row.try_get(5)?,
        }))
    }

    /// Whether another of its key holds it back: one before `position`, or any.
    async fn blocked(&self, arrival: &Arrival, position: Option<i64>) -> Result<bool, Trouble> {
        let Some(key) = arrival.message.key.as_ref().filter(|_| self.rules.ordered) else { return Ok(false) };
        let row = self
            .tx
            .one(
                concat!(
                    "SELECT EXISTS (SELECT 1 FROM inbox_parked WHERE grp = $1 AND ",
                    of_key!(),
                    " AND position < $4 AND (NOT dead OR $5))"
                ),
                &[
                    (&self.group, Type::INT8),
                    (&arrival.message.topic, Type::TEXT),
                    (key, Type::TEXT),
                    (&position.unwrap_or(i64::MAX), Type::INT8),
                    (&self.rules.hold_dead, Type::BOOL),
                ],
            )
            .await?;
        Ok(row.try_get(0)?)
    }

    /// Keeps a message that failed for its next try, or for a person at its limit.
    pub(super) async fn retry(
        &mut self,
        arrival: &Arrival,
        attempts: u32,
        error: String,
        wait: Option<Duration>,
    ) -> Result<Receipt, Trouble> {
        let attempts = attempts + 1;
        let policy = &self.rules.retry;
        if attempts >= policy.max_attempts {
            let error = format!("MaxAttempts({}) exceeded: {error}", policy.max_attempts);
            return self.bury(arrival, attempts, error).await;
        }
        let delay = policy.delay(attempts, &mut rand::rng()).max(wait.unwrap_or_default());
        let new = self.park(arrival, attempts, Some(after(self.now, delay)), false, &error).await?;
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
            self.wake_next(arrival).await?;
        }
        Ok(Receipt::Dead { error })
    }

    /// Writes the parked message. `true` when it was not parked before.
    async fn park(
        &mut self,
        arrival: &Arrival,
        attempts: u32,
        next_attempt_at: Option<DateTime<Utc>>,
        dead: bool,
        error: &str,
    ) -> Result<bool, Trouble> {
        let message = &arrival.message;
        self.keep(arrival);
        let row = self
            .tx
            .one(
                include_str!("park.sql"),
                &[
                    (&self.group, Type::INT8),
                    (&message.id.0, Type::UUID),
                    (&digest(arrival), Type::BYTEA),
                    (&message.topic, Type::TEXT),
                    (&message.kind, Type::TEXT),
                    (&message.key, Type::TEXT),
                    (&&message.payload[..], Type::BYTEA),
                    (&message.content_type, Type::TEXT),
                    (&headers_json(message), Type::TEXT),
                    (&message.occurred_at, Type::TIMESTAMPTZ),
                    (&arrival.seq, Type::INT8),
                    (&count(arrival.delivery), Type::INT4),
                    (&count(attempts), Type::INT4),
                    (&next_attempt_at, Type::TIMESTAMPTZ),
                    (&dead, Type::BOOL),
                    (&clip(error).replace('\0', "\u{fffd}"), Type::TEXT),
                ],
            )
            .await?;
        self.parked = true;
        Ok(row.try_get(0)?)
    }

    /// A message is done: if it was parked, it is no more, and the next of its key may go.
    ///
    /// Another message under its id stays; so does what waits for a person, unless `dead` says that this very
    /// work was done after all.
    pub(super) async fn unpark(&mut self, arrival: &Arrival, dead: bool) -> Result<(), Trouble> {
        if !self.parked {
            return Ok(());
        }
        let rows = self
            .tx
            .query(
                "DELETE FROM inbox_parked WHERE grp = $1 AND id = $2 AND digest = $3 AND (NOT dead OR $4)
                 RETURNING dead",
                &[
                    (&self.group, Type::INT8),
                    (&arrival.message.id.0, Type::UUID),
                    (&digest(arrival), Type::BYTEA),
                    (&dead, Type::BOOL),
                ],
            )
            .await?;
        if let Some(row) = rows.first() {
            let was_dead: bool = row.try_get(0)?;
            self.counts.parked -= i64::from(!was_dead);
            self.counts.dead -= i64::from(was_dead);
            self.wake_next(arrival).await?;
        }
        Ok(())
    }

    async fn wake_next(&self, arrival: &Arrival) -> Result<(), Trouble> {
        let Some(key) = &arrival.message.key else { return Ok(()) };
        wake_next(self.tx, self.group, &arrival.message.topic, key).await
    }
}

/// The first message of a key that waits behind nobody any more is due at once.
async fn wake_next(tx: &Transaction, group: i64, topic: &str, key: &str) -> Result<(), Trouble> {
    tx.execute(
        concat!(
            "UPDATE inbox_parked SET next_attempt_at = clock_timestamp() WHERE grp = $1 AND next_attempt_at IS NULL
             AND position = (SELECT position FROM inbox_parked WHERE grp = $1 AND ",
            of_key!(),
            " AND NOT dead ORDER BY position LIMIT 1)"
        ),
        &[(&group, Type::INT8), (&topic, Type::TEXT), (&key, Type::TEXT)],
    )
    .await?;
    Ok(())
}

pub(super) fn arrival(row: &Row) -> Result<Arrival, Trouble> {
    Ok(Arrival {
        message: message(row, 0)?,
        seq: row.try_get(MESSAGE_COLUMNS)?,
        delivery: u32::try_from(row.try_get::<_, i32>(MESSAGE_COLUMNS + 1)?).unwrap_or(0),
    })
}

pub(super) fn page(group: &str, rows: &[Row], page: Page) -> Result<Paged<Parked>, Trouble> {
    const EXTRA: usize = MESSAGE_COLUMNS + 2;
    let mut items = Vec::with_capacity(rows.len());
    let mut last = None;
    for row in rows {
        last = Some(row.try_get(EXTRA + 4)?);
        items.push(Parked {
            group: group.to_owned(),
            arrival: arrival(row)?,
            attempts: u32::try_from(row.try_get::<_, i32>(EXTRA)?).unwrap_or(0),
            next_attempt_at: row.try_get(EXTRA + 1)?,
            dead: row.try_get(EXTRA + 2)?,
            error: row.try_get(EXTRA + 3)?,
        });
    }
    let next = last.filter(|_| items.len() == page.limit);
    Ok(Paged { items, next })
}

/// The number of the group that keeps a message, whose key is locked.
async fn lock_parked(tx: &Transaction, group: &str, id: MessageId) -> Result<i64, Trouble> {
    let rows = tx
        .query(
            "SELECT p.grp, p.topic, p.key FROM inbox_parked p JOIN inbox_groups g ON g.grp = p.grp
             WHERE g.name = $1 AND p.id = $2",
            &[(&group, Type::TEXT), (&id.0, Type::UUID)],
        )
        .await?;
    let row = rows.first().ok_or_else(|| not_parked(group, id))?;
    let number = row.try_get(0)?;
    if let Some(key) = row.try_get::<_, Option<&str>>(2)? {
        lock(tx, vec![key_lock(number, row.try_get(1)?, key)]).await?;
    }
    Ok(number)
}

pub(super) async fn unpark(tx: &Transaction, group: &str, id: MessageId) -> Result<(), Trouble> {
    let number = lock_parked(tx, group, id).await?;
    // One that waits behind another of its key goes on waiting; whether one that was Dead must wait is seen, by
    // the rules of its group, when it is tried.
    let rows = tx
        .query(
            "UPDATE inbox_parked p SET dead = false, attempts = 0,
                    next_attempt_at = CASE WHEN NOT p.dead AND p.next_attempt_at IS NULL THEN NULL ELSE clock_timestamp() END
             FROM (SELECT grp, id, dead FROM inbox_parked WHERE grp = $1 AND id = $2 FOR UPDATE) was
             WHERE p.grp = was.grp AND p.id = was.id RETURNING was.dead",
            &[(&number, Type::INT8), (&id.0, Type::UUID)],
        )
        .await?;
    let row = rows.first().ok_or_else(|| not_parked(group, id))?;
    if row.try_get(0)? {
        tx.execute(
            "INSERT INTO inbox_counters (grp, parked, dead) VALUES ($1, 1, -1)",
            &[(&number, Type::INT8)],
        )
        .await?;
    }
    Ok(())
}

/// Removes a parked message and answers it, for the audit.
pub(super) async fn discard(tx: &Transaction, group: &str, id: MessageId) -> Result<Message, Trouble> {
    const EXTRA: usize = MESSAGE_COLUMNS;
    let number = lock_parked(tx, group, id).await?;
    let rows = tx
        .query(
            concat!(
                "DELETE FROM inbox_parked e WHERE grp = $1 AND id = $2 RETURNING ",
                message_columns!(),
                ", dead, NOT dead AND next_attempt_at IS NULL"
            ),
            &[(&number, Type::INT8), (&id.0, Type::UUID)],
        )
        .await?;
    let row = rows.first().ok_or_else(|| not_parked(group, id))?;
    let (message, dead, follower) =
        (message(row, 0)?, row.try_get::<_, bool>(EXTRA)?, row.try_get::<_, bool>(EXTRA + 1)?);
    tx.execute(
        "INSERT INTO inbox_counters (grp, parked, dead) VALUES ($1, -(NOT $2)::int, -($2::int))",
        &[(&number, Type::INT8), (&dead, Type::BOOL)],
    )
    .await?;
    // One that waited behind another leaves that one as it is: those behind both go on waiting.
    if let Some(key) = message.key.as_ref().filter(|_| !follower) {
        wake_next(tx, number, &message.topic, key).await?;
    }
    Ok(message)
}

fn not_parked(group: &str, id: MessageId) -> Error {
    Error::Refused(format!("the inbox of {group} does not keep a message {id}"))
}
