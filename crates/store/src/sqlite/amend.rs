//! Mending: every action checks the transition, keeps counters and holds right, and is audited, in one
//! transaction.

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use message::{Event, Message, MessageId, Next, Status, step};
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::json;

use super::inspect::{find, in_flight};
use super::row::{between, groups, headers_json, millis, now, state, word};
use super::tally::{self, Tally, Wait};
use super::{SqliteStore, hold};
use crate::{Acknowledged, Amend, Edit, Error, Record, Retention};

/// Rows that retention removes in one transaction.
const REMOVE: usize = 500;

/// Rows that retention looks at in one call.
const LOOK: usize = 5_000;

#[async_trait]
impl Amend for SqliteStore {
    async fn requeue(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, "requeue", |connection, record| again(connection, record, &record.message))
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
            again(connection, record, &message)
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
                    .map(|(id, group)| acknowledger.acknowledge(*id, group))
                    .collect::<Result<Vec<_>, Error>>()?;
                acknowledger.finish()?;
                Ok(answers)
            })
            .await
    }

    async fn clean(&self, retention: &Retention) -> Result<u64, Error> {
        let keys = forget_keys(self, retention.keys).await?;
        let retention = *retention;
        let from = self.cleaned.load(Ordering::Relaxed);
        let (old, next) = self.file.read(move |connection| outdated(connection, from, &retention)).await?;
        self.cleaned.store(next, Ordering::Relaxed);
        let mut removed = 0;
        for chunk in old.chunks(REMOVE) {
            let chunk = chunk.to_vec();
            removed += self
                .file
                .write(move |connection| {
                    let mut removed = 0;
                    for seq in chunk {
                        // Looked at again: since it was found, somebody may have requeued it and a relay
                        // may hold it by now.
                        if is_done(connection, seq)? {
                            removed += forget(connection, seq)?;
                        }
                    }
                    Ok::<_, Error>(removed)
                })
                .await?;
        }
        Ok(keys + removed)
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
                audit(connection, &actor, action, id, &detail(&record, after.as_ref()))
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
            "INSERT INTO audit (at, actor, action, message_id, detail) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute(params![now(connection)?, actor, action, id.to_string(), detail])?;
    Ok(())
}

/// What the record was and what it is: enough to see, and to undo by hand, what somebody did.
fn detail(before: &Record, after: Option<&Record>) -> String {
    let view = |record: &Record| {
        json!({
            "status": record.state.status,
            "topic": record.message.topic,
            "key": record.message.key,
            "type": record.message.kind,
            "payload": String::from_utf8_lossy(&record.message.payload),
            "contentType": record.message.content_type,
            "headers": record.message.headers,
            "attempts": record.state.attempts,
            "deadReason": record.dead_reason,
            "lastError": record.last_error,
        })
    };
    json!({ "before": view(before), "after": after.map(view) }).to_string()
}

/// A fresh start for a Dead message, at its old place: those it holds stay behind it.
fn again(connection: &Connection, record: &Record, message: &Message) -> Result<(), Error> {
    let Next::State(state) = step(record.state, Event::Requeued)? else {
        return Err(Error::Broken("a requeued message cannot vanish".to_owned()));
    };
    connection.execute(
        "UPDATE outbox_events SET status = ?2, ready = 1, held = 0, attempts = ?3, crashes = ?4,
                delivery_epoch = ?5, next_attempt_at = NULL, dead_reason = NULL,
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
    let mut tally = Tally::default();
    tally.moved(record.state.status, state.status);
    Ok(tally.write(connection)?)
}

fn remove(connection: &Connection, record: &Record, event: Event) -> Result<(), Error> {
    match step(record.state, event)? {
        Next::Gone => forget(connection, record.seq).map(drop),
        Next::State(_) => Err(Error::Broken(format!("a message that is {} must be gone", event.name()))),
    }
}

fn is_done(connection: &Connection, seq: i64) -> rusqlite::Result<bool> {
    connection
        .prepare_cached(
            "SELECT EXISTS (SELECT 1 FROM outbox_events WHERE seq = ?1 AND status IN ('sent', 'dead'))",
        )?
        .query_row([seq], |row| row.get(0))
}

/// Removes a record and all that hangs on it; a trigger counts it.
fn forget(connection: &Connection, seq: i64) -> Result<u64, Error> {
    hold::lift(connection, seq)?;
    for sql in [
        "DELETE FROM attempts WHERE seq = ?1",
        "DELETE FROM acknowledgements WHERE seq = ?1",
        "DELETE FROM unacknowledged WHERE seq = ?1 AND grp IN
             (SELECT value FROM outbox_events e, json_each(e.ack_groups) WHERE e.seq = ?1)",
    ] {
        connection.prepare_cached(sql)?.execute([seq])?;
    }
    let removed = connection.prepare_cached("DELETE FROM outbox_events WHERE seq = ?1")?.execute([seq])?;
    Ok(removed as u64)
}

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
        Ok(self.tally.write(self.connection)?)
    }

    pub(super) fn acknowledge(&mut self, id: MessageId, group: &str) -> Result<Acknowledged, Error> {
        let found = self
            .connection
            .prepare_cached(
                "SELECT seq, sent_at, ack_groups, status, attempts, crashes, delivery_epoch
                 FROM outbox_events WHERE id = ?1",
            )?
            .query_row([id.to_string()], |row| {
                let seq: i64 = row.get(0)?;
                Ok((seq, row.get::<_, Option<i64>>(1)?, groups(row, 2)?, state(row, 3, false)?))
            })
            .optional()?;
        let Some((seq, sent_at, groups, mut state)) = found else { return Ok(Acknowledged::Unknown) };
        if groups.is_some_and(|groups| !groups.iter().any(|name| name == group)) {
            return Ok(Acknowledged::NotAsked);
        }
        if state.status != Status::Sent && self.flies(seq)? {
            state.status = Status::InFlight;
        }
        if step(state, Event::Acknowledged).is_err() {
            return Ok(Acknowledged::Refused(state.status));
        }
        let new = self
            .connection
            .prepare_cached(
                "INSERT INTO acknowledgements (seq, grp, acknowledged_at) VALUES (?1, ?2, ?3)
                 ON CONFLICT DO NOTHING",
            )?
            .execute(params![seq, group, self.now])?;
        if new == 0 {
            return Ok(Acknowledged::Repeated);
        }
        self.connection
            .prepare_cached("DELETE FROM unacknowledged WHERE grp = ?1 AND seq = ?2")?
            .execute(params![group, seq])?;
        self.tally.acknowledged();
        let waited = sent_at.map_or(Duration::ZERO, |sent_at| between(sent_at, self.now));
        self.tally.waited(Wait::SentToAcknowledged, waited);
        Ok(Acknowledged::New)
    }

    fn flies(&mut self, seq: i64) -> Result<bool, Error> {
        if self.in_flight.is_none() {
            self.in_flight = Some(in_flight(self.connection)?);
        }
        Ok(self.in_flight.as_ref().is_some_and(|messages| messages.contains_key(&seq)))
    }
}

/// The records past retention among the next rows after `from`, and where to look next time. Rows are looked
/// at in the order of writing, so the first one that is too young ends the round.
fn outdated(connection: &Connection, from: i64, retention: &Retention) -> Result<(Vec<i64>, i64), Error> {
    let now = now(connection)?;
    let (sent, dead) = (now - millis(retention.sent), now - millis(retention.dead));
    let mut statement = connection.prepare_cached(
        "SELECT seq, written_at,
                (status = 'sent' AND sent_at < ?2 AND NOT EXISTS (
                    SELECT 1 FROM json_each(e.ack_groups) g JOIN unacknowledged u
                    ON u.grp = g.value AND u.seq = e.seq))
                OR (status = 'dead' AND written_at < ?3 AND NOT EXISTS (
                    SELECT 1 FROM holds h WHERE h.seq = e.seq))
         FROM outbox_events e WHERE seq > ?1 ORDER BY seq LIMIT ?4",
    )?;
    let mut rows = statement.query(params![from, sent, dead, LOOK])?;
    let mut old = Vec::new();
    let (mut next, mut looked) = (from, 0);
    while let Some(row) = rows.next()? {
        let written_at: i64 = row.get(1)?;
        if written_at > sent.max(dead) {
            return Ok((old, 0));
        }
        next = row.get(0)?;
        looked += 1;
        if row.get(2)? {
            old.push(next);
        }
    }
    Ok((old, if looked == LOOK { next } else { 0 }))
}

/// Forgets the oldest idempotency keys, which stand in the order of writing, and mends the counters.
async fn forget_keys(store: &SqliteStore, keep: Duration) -> Result<u64, Error> {
    store
        .file
        .write(move |connection| {
            let oldest = now(connection)? - millis(keep);
            let old: Vec<i64> = connection
                .prepare_cached(
                    "SELECT position, created_at FROM idempotency_keys ORDER BY position LIMIT ?1",
                )?
                .query_map([REMOVE], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?)))?
                .filter(|row| !matches!(row, Ok((_, created_at)) if *created_at >= oldest))
                .map(|row| row.map(|(position, _)| position))
                .collect::<Result<_, _>>()?;
            for position in &old {
                connection
                    .prepare_cached("DELETE FROM idempotency_keys WHERE position = ?1")?
                    .execute([position])?;
            }
            tally::mend(connection)?;
            Ok(old.len() as u64)
        })
        .await
}
