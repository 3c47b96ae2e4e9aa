//! Messages that the inbox keeps: for a later try, behind another of their key, or for a person.

use std::time::Duration;

use message::{Message, MessageId};
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::super::inspect::start;
use super::super::row::{MESSAGE_COLUMNS, message, message_columns, now};
use super::GroupDesk;
use super::page::directed;
use crate::column::{BEHIND, OTHER_CONTENT, clip, digest, headers_json, millis, time};
use crate::{Arrival, Error, Page, Paged, Parked, Receipt};

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

impl Place {
    /// Whether it is this very message that is kept here, and not another under its id.
    pub(super) fn is_of(&self, arrival: &Arrival) -> bool {
        self.digest == digest(arrival)
    }
}

pub(super) fn any(connection: &Connection, group: i64) -> rusqlite::Result<bool> {
    connection
        .prepare_cached("SELECT EXISTS (SELECT 1 FROM inbox_parked WHERE grp = ?1)")?
        .query_row([group], |row| row.get(0))
}

impl GroupDesk<'_> {
    /// Where an arrival stands: done before, parked, behind another, or free to be worked on.
    pub(super) fn standing(&mut self, arrival: &Arrival) -> Result<Standing, Error> {
        if let Some(receipt) = self.done_before(arrival)? {
            return Ok(Standing::Settled(receipt));
        }
        if !self.parked {
            return Ok(Standing::Free { attempts: 0 });
        }
        if let Some(place) = self.place(arrival.message.id)? {
            return self.standing_at(arrival, place);
        }
        if self.blocked(arrival, None)? {
            let error = BEHIND.to_owned();
            self.park(arrival, 0, None, false, &error)?;
            self.counts.parked += 1;
            return Ok(Standing::Settled(Receipt::Parked { error }));
        }
        Ok(Standing::Free { attempts: 0 })
    }

    /// Where an arrival stands whose id has a place already.
    fn standing_at(&self, arrival: &Arrival, place: Place) -> Result<Standing, Error> {
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
        if self.blocked(arrival, Some(position))? {
            self.connection
                .prepare_cached(
                    "UPDATE inbox_parked SET next_attempt_at = NULL, error = ?2 WHERE position = ?1",
                )?
                .execute(params![position, BEHIND])?;
            return Ok(Standing::Settled(Receipt::Parked { error: BEHIND.to_owned() }));
        }
        Ok(Standing::Free { attempts })
    }

    pub(super) fn place(&self, id: MessageId) -> Result<Option<Place>, Error> {
        if !self.parked {
            return Ok(None);
        }
        Ok(self
            .connection
            .prepare_cached(
                "SELECT position, digest, attempts, next_attempt_at, dead, error
                 FROM inbox_parked WHERE grp = ?1 AND id = ?2",
            )?
            .query_row(params![self.group, id.to_string()], |row| {
                Ok(Place {
                    position: row.get(0)?,
                    digest: row.get(1)?,
                    attempts: row.get(2)?,
                    next_attempt_at: row.get(3)?,
                    dead: row.get(4)?,
                    error: row.get(5)?,
                })
            })
            .optional()?)
    }

    /// Whether another of its key holds it back: one before `position`, or any.
    fn blocked(&self, arrival: &Arrival, position: Option<i64>) -> Result<bool, Error> {
        let Some(key) = arrival.message.key.as_ref().filter(|_| self.rules.ordered) else { return Ok(false) };
        let before = position.unwrap_or(i64::MAX);
        Ok(self
            .connection
            .prepare_cached(
                "SELECT EXISTS (SELECT 1 FROM inbox_parked
                                WHERE grp = ?1 AND topic = ?2 AND key = ?3 AND position < ?4
                                AND (dead = 0 OR ?5))",
            )?
            .query_row(
                params![self.group, arrival.message.topic, key, before, self.rules.hold_dead],
                |row| row.get(0),
            )?)
    }

    /// Keeps a message that failed for its next try, or for a person at its limit.
    pub(super) fn retry(
        &mut self,
        arrival: &Arrival,
        attempts: u32,
        error: String,
        after: Option<Duration>,
    ) -> Result<Receipt, Error> {
        let attempts = attempts + 1;
        let policy = &self.rules.retry;
        if attempts >= policy.max_attempts {
            let error = format!("MaxAttempts({}) exceeded: {error}", policy.max_attempts);
            return self.bury(arrival, attempts, error);
        }
        let delay = policy.delay(attempts, &mut rand::rng()).max(after.unwrap_or_default());
        let new = self.park(arrival, attempts, Some(self.now + millis(delay)), false, &error)?;
        self.counts.parked += i64::from(new);
        Ok(Receipt::Parked { error })
    }

    /// Keeps a message for a person.
    pub(super) fn bury(&mut self, arrival: &Arrival, attempts: u32, error: String) -> Result<Receipt, Error> {
        let new = self.park(arrival, attempts, None, true, &error)?;
        self.counts.parked -= i64::from(!new);
        self.counts.dead += 1;
        if !self.rules.hold_dead {
            self.wake_next(arrival)?;
        }
        Ok(Receipt::Dead { error })
    }

    /// Writes the parked message. `true` when it was not parked before.
    fn park(
        &mut self,
        arrival: &Arrival,
        attempts: u32,
        next_attempt_at: Option<i64>,
        dead: bool,
        error: &str,
    ) -> Result<bool, Error> {
        let message = &arrival.message;
        let new = self.place(message.id)?.is_none();
        self.connection.prepare_cached(include_str!("park.sql"))?.execute(params![
            self.group,
            message.id.to_string(),
            digest(arrival),
            message.topic,
            message.kind,
            message.key,
            &message.payload[..],
            message.content_type,
            headers_json(message),
            message.occurred_at.timestamp_millis(),
            arrival.seq,
            arrival.delivery,
            attempts,
            next_attempt_at,
            dead,
            clip(error),
        ])?;
        self.parked = true;
        Ok(new)
    }

    /// A message is done: if it was parked, it is no more, and the next of its key may go.
    ///
    /// Another message under its id stays; so does what waits for a person, unless `dead` says that this very
    /// work was done after all.
    pub(super) fn unpark(&mut self, arrival: &Arrival, dead: bool) -> Result<(), Error> {
        if !self.parked {
            return Ok(());
        }
        let was_dead: Option<bool> = self
            .connection
            .prepare_cached(
                "DELETE FROM inbox_parked WHERE grp = ?1 AND id = ?2 AND digest = ?3 AND (dead = 0 OR ?4)
                 RETURNING dead",
            )?
            .query_row(params![self.group, arrival.message.id.to_string(), digest(arrival), dead], |row| {
                row.get(0)
            })
            .optional()?;
        if let Some(was_dead) = was_dead {
            self.counts.parked -= i64::from(!was_dead);
            self.counts.dead -= i64::from(was_dead);
            self.wake_next(arrival)?;
        }
        Ok(())
    }

    fn wake_next(&self, arrival: &Arrival) -> Result<(), Error> {
        let Some(key) = &arrival.message.key else { return Ok(()) };
        wake_next(self.connection, self.group, &arrival.message.topic, key, self.now)
    }
}

/// The first message of a key that waits behind nobody any more is due at once.
fn wake_next(connection: &Connection, group: i64, topic: &str, key: &str, now: i64) -> Result<(), Error> {
    connection
        .prepare_cached(
            "UPDATE inbox_parked SET next_attempt_at = ?4 WHERE next_attempt_at IS NULL AND position =
             (SELECT position FROM inbox_parked WHERE grp = ?1 AND topic = ?2 AND key = ?3 AND dead = 0
              ORDER BY position LIMIT 1)",
        )?
        .execute(params![group, topic, key, now])?;
    Ok(())
}

fn arrival(row: &Row<'_>) -> rusqlite::Result<Arrival> {
    Ok(Arrival {
        message: message(row)?,
        seq: row.get(MESSAGE_COLUMNS)?,
        delivery: row.get(MESSAGE_COLUMNS + 1)?,
    })
}

pub(super) fn due(connection: &Connection, group: &str, limit: usize) -> Result<Vec<Arrival>, Error> {
    let mut statement = connection.prepare_cached(include_str!("due.sql"))?;
    let arrivals = statement.query_map(params![group, now(connection)?, limit], arrival)?;
    Ok(arrivals.collect::<Result<_, _>>()?)
}

pub(super) fn list(connection: &Connection, group: &str, page: Page) -> Result<Paged<Parked>, Error> {
    const EXTRA: usize = MESSAGE_COLUMNS + 2;
    let mut statement = connection.prepare_cached(&directed(include_str!("list.sql"), page))?;
    let mut rows = statement.query(params![group, start(page), page.limit])?;
    let mut items = Vec::new();
    let mut last = None;
    while let Some(row) = rows.next()? {
        last = Some(row.get(EXTRA + 4)?);
        items.push(Parked {
            group: group.to_owned(),
            arrival: arrival(row)?,
            attempts: row.get(EXTRA)?,
            next_attempt_at: row.get::<_, Option<i64>>(EXTRA + 1)?.map(time),
            dead: row.get(EXTRA + 2)?,
            error: row.get(EXTRA + 3)?,
        });
    }
    let next = last.filter(|_| items.len() == page.limit);
    Ok(Paged { items, next })
}

pub(super) fn unpark(connection: &Connection, group: &str, id: MessageId) -> Result<(), Error> {
    let dead: Option<bool> = connection
        .query_row(
            "SELECT p.dead FROM inbox_parked p JOIN inbox_groups g USING (grp) WHERE g.name = ?1 AND p.id = ?2",
            params![group, id.to_string()],
            |row| row.get(0),
        )
        .optional()?;
    let Some(dead) = dead else { return Err(not_parked(group, id)) };
    // One that waits behind another of its key goes on waiting; whether one that was Dead must wait is seen, by
    // the rules of its group, when it is tried.
    connection.execute(
        "UPDATE inbox_parked SET dead = 0, attempts = 0,
                next_attempt_at = CASE WHEN dead = 0 AND next_attempt_at IS NULL THEN NULL ELSE ?3 END
         WHERE id = ?2 AND grp = (SELECT grp FROM inbox_groups WHERE name = ?1)",
        params![group, id.to_string(), now(connection)?],
    )?;
    connection.execute(
        "UPDATE inbox_groups SET dead = dead - ?2, parked = parked + ?2 WHERE name = ?1",
        params![group, dead],
    )?;
    Ok(())
}

/// Removes a parked message and answers it, for the audit.
pub(super) fn discard(connection: &Connection, group: &str, id: MessageId) -> Result<Message, Error> {
    let gone = connection
        .query_row(
            concat!(
                "DELETE FROM inbox_parked WHERE id = ?2 AND grp = (SELECT grp FROM inbox_groups WHERE name = ?1)
                 RETURNING ",
                message_columns!(),
                ", grp, dead, dead = 0 AND next_attempt_at IS NULL"
            ),
            params![group, id.to_string()],
            |row| {
                const EXTRA: usize = MESSAGE_COLUMNS;
                let (dead, follower): (bool, bool) = (row.get(EXTRA + 1)?, row.get(EXTRA + 2)?);
                Ok((message(row)?, row.get::<_, i64>(EXTRA)?, dead, follower))
            },
        )
        .optional()?;
    let Some((message, number, dead, follower)) = gone else { return Err(not_parked(group, id)) };
    connection.execute(
        "UPDATE inbox_groups SET dead = dead - ?2, parked = parked - NOT ?2 WHERE name = ?1",
        params![group, dead],
    )?;
    // One that waited behind another leaves that one as it is: those behind both go on waiting.
    if let Some(key) = message.key.as_ref().filter(|_| !follower) {
        wake_next(connection, number, &message.topic, key, now(connection)?)?;
    }
    Ok(message)
}

fn not_parked(group: &str, id: MessageId) -> Error {
    Error::Refused(format!("the inbox of {group} does not keep a message {id}"))
}
