//! Mending: every action checks the transition, keeps counters and holds right, and is audited, in one
//! transaction.

use std::time::Duration;

use async_trait::async_trait;
use message::{Event, Message, MessageId, Next, State, Status, step};
use rusqlite::{Connection, OptionalExtension, Params, params};

use super::inspect::{find, in_flight};
use super::row::{groups, now, state};
use super::{SqliteStore, hold, retain, tally};
use crate::audit::{RELAY, changed, redelivered};
use crate::column::{between, headers_json, word};
use crate::tally::{Tally, Wait};
use crate::{Acknowledged, Amend, Edit, Error, Record, Retention};

#[async_trait]
impl Amend for SqliteStore {
    async fn requeue(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, "requeue", |connection, record| {
            again(connection, record, &record.message, Event::Requeued)
        })
        .await?;
        self.ring();
        Ok(())
    }

    async fn edit(&self, id: MessageId, edit: &Edit, actor: &str) -> Result<(), Error> {
        let edit = edit.clone();
        self.amend(id, actor, "edit", move |connection, record| {
            let mut message = record.message.clone();
            message.payload = edit.payload.unwrap_or(message.payload);
            message.content_type = edit.content_type.unwrap_or(message.content_type);
            message.headers = edit.headers.unwrap_or(message.headers);
            again(connection, record, &message, Event::Requeued)
        })
        .await?;
        self.ring();
        Ok(())
    }

    async fn discard(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, "discard", |connection, record| remove(connection, record, Event::Discarded))
            .await?;
        self.ring();
        Ok(())
    }

    async fn delete(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, "delete", |connection, record| remove(connection, record, Event::Deleted))
            .await?;
        self.ring();
        Ok(())
    }

    async fn acknowledge(&self, done: Vec<(MessageId, String)>) -> Result<Vec<Acknowledged>, Error> {
        self.file
            .write(move |connection| {
                let mut acknowledger = Acknowledger::new(connection)?;
                let answers = done
                    .iter()
                    .map(|(id, group)| acknowledger.acknowledge(*id, None, group))
                    .collect::<Result<Vec<_>, Error>>()?;
                acknowledger.finish()?;
                Ok(answers)
            })
            .await
    }

    async fn redeliver(&self, id: MessageId, group: &str, why: &str) -> Result<bool, Error> {
        let (group, why) = (group.to_owned(), why.to_owned());
        let again = self.file.write(move |connection| {
            let Some(record) = find(connection, id)?.filter(|record| record.waits_for(&group)) else {
                return Ok(false);
            };
            again(connection, &record, &record.message, Event::Unacknowledged)?;
            connection.execute(
                "UPDATE outbox_events SET last_error = ?2 WHERE seq = ?1",
                params![record.seq, why],
            )?;
            for group in record.ack_groups.iter().flatten() {
                connection.execute(
                    "DELETE FROM outbox_unacknowledged WHERE grp = ?1 AND seq = ?2",
                    params![group, record.seq],
                )?;
            }
            audit(connection, RELAY, "redeliver", id, &redelivered(&group, &why))?;
            Ok::<_, Error>(true)
        });
        let again = again.await?;
        if again {
            self.ring();
        }
        Ok(again)
    }

    async fn clean(&self, retention: &Retention) -> Result<u64, Error> {
        retain::clean(self, retention).await
    }
}

impl SqliteStore {
    async fn amend(
        &self,
        id: MessageId,
        actor: &str,
        action: &'static str,
        change: impl FnOnce(&Connection, &Record) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        let actor = actor.to_owned();
        self.file
            .write(move |connection| {
                let record = find(connection, id)?
                    .ok_or_else(|| Error::Refused(format!("there is no message {id}")))?;
                change(connection, &record)?;
                let after = find(connection, id)?;
                audit(connection, &actor, action, id, &changed(&record, after.as_ref()))
            })
            .await
    }
}

pub(super) fn audit(
    connection: &Connection,
    actor: &str,
    action: &str,
    id: MessageId,
    detail: &str,
) -> Result<(), Error> {
    connection
        .prepare_cached(
            "INSERT INTO outbox_audit (at, actor, action, message_id, detail) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute(params![now(connection)?, actor, action, id.to_string(), detail])?;
    Ok(())
}

/// A fresh start for a message, at its old place: those it holds stay behind it.
fn again(connection: &Connection, record: &Record, message: &Message, event: Event) -> Result<(), Error> {
    let Next::State(state) = step(record.state, event)? else {
        return Err(Error::Broken(format!("a {} message cannot vanish", event.name())));
    };
    connection.execute(
        "UPDATE outbox_events SET status = ?2, ready = 1, held = 0, attempts = ?3, crashes = ?4,
                delivery_epoch = ?5, next_attempt_at = NULL, dead_reason = NULL, dead_at = NULL,
                payload = ?6, content_type = ?7, headers = ?8
         WHERE seq = ?1",
        params![
            record.seq,
            word(state.status),
            state.attempts,
            state.crashes,
            state.delivery,
            &message.payload[..],
            message.content_type,
            headers_json(message),
        ],
    )?;
    let mut moved = Tally::default();
    moved.moved(record.state.status, state.status);
    Ok(tally::write(moved, connection)?)
}

fn remove(connection: &Connection, record: &Record, event: Event) -> Result<(), Error> {
    match step(record.state, event)? {
        Next::Gone => forget(connection, record.seq).map(drop),
        Next::State(_) => Err(Error::Broken(format!("a message that is {} must be gone", event.name()))),
    }
}

/// Removes a record; a trigger takes with it all that hangs on it, and counts.
pub(super) fn forget(connection: &Connection, seq: i64) -> Result<u64, Error> {
    hold::lift(connection, seq)?;
    let removed = connection.prepare_cached("DELETE FROM outbox_events WHERE seq = ?1")?.execute([seq])?;
    Ok(removed as u64)
}

/// Where a message is, when it was sent, who must acknowledge it, and its state.
type Found = (i64, Option<i64>, Option<Vec<String>>, State);

/// Records that groups are done, in one transaction.
pub(super) struct Acknowledger<'a> {
    connection: &'a Connection,
    now: i64,
    /// Read when first needed: most acknowledgements come after the settle.
    in_flight: Option<std::collections::HashMap<i64, i64>>,
    tally: Tally,
}

impl<'a> Acknowledger<'a> {
    pub(super) fn new(connection: &'a Connection) -> Result<Self, Error> {
        Ok(Self { connection, now: now(connection)?, in_flight: None, tally: Tally::default() })
    }

    pub(super) fn finish(self) -> Result<(), Error> {
        Ok(tally::write(self.tally, self.connection)?)
    }

    /// `seq` is where the message probably stands: looking there first saves the way through the index of ids.
    pub(super) fn acknowledge(
        &mut self,
        id: MessageId,
        seq: Option<i64>,
        group: &str,
    ) -> Result<Acknowledged, Error> {
        let id = id.to_string();
        let found = match seq {
            Some(seq) => self.find("seq = ?2 AND id = ?1", params![id, seq])?,
            None => None,
        };
        let found = match found {
            Some(found) => Some(found),
            None => self.find("id = ?1", params![id])?,
        };
        let Some((seq, sent_at, groups, mut state)) = found else { return Ok(Acknowledged::Unknown) };
        if groups.is_some_and(|groups| !groups.iter().any(|name| name == group)) {
            return Ok(Acknowledged::NotAsked);
        }
        if !matches!(state.status, Status::Sent | Status::InFlight) && self.flies(seq)? {
            state.status = Status::InFlight;
        }
        if step(state, Event::Acknowledged).is_err() {
            return Ok(Acknowledged::Refused(state.status));
        }
        let new = self
            .connection
            .prepare_cached(
                "INSERT INTO outbox_acknowledgements (seq, grp, acknowledged_at) VALUES (?1, ?2, ?3)
                 ON CONFLICT DO NOTHING",
            )?
            .execute(params![seq, group, self.now])?;
        if new == 0 {
            return Ok(Acknowledged::Repeated);
        }
        self.connection
            .prepare_cached("DELETE FROM outbox_unacknowledged WHERE grp = ?1 AND seq = ?2")?
            .execute(params![group, seq])?;
        self.tally.acknowledged();
        let waited = sent_at.map_or(Duration::ZERO, |sent_at| between(sent_at, self.now));
        self.tally.waited(Wait::SentToAcknowledged, waited);
        Ok(Acknowledged::New)
    }

    fn find(&self, place: &str, parameters: impl Params) -> Result<Option<Found>, Error> {
        Ok(self
            .connection
            .prepare_cached(&format!(
                "SELECT seq, sent_at, ack_groups, status, attempts, crashes, delivery_epoch, last_error IS NOT NULL
                 FROM outbox_events WHERE {place}"
            ))?
            .query_row(parameters, |row| {
                Ok((row.get(0)?, row.get(1)?, groups(row, 2)?, state(row, 3, false)?.perhaps_sent(row.get(7)?)))
            })
            .optional()?)
    }

    fn flies(&mut self, seq: i64) -> Result<bool, Error> {
        if self.in_flight.is_none() {
            self.in_flight = Some(in_flight(self.connection)?);
        }
        Ok(self.in_flight.as_ref().is_some_and(|messages| messages.contains_key(&seq)))
    }
}
