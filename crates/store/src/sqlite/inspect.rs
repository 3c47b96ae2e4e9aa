//! Looking: records, lists that read a bounded number of rows, and counts that are kept as they change.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use message::{MessageId, Status};
use rusqlite::{Connection, OptionalExtension, Row, ToSql, params};

use super::SqliteStore;
use super::row::{MESSAGE_COLUMNS, groups, id, message, message_columns, now, optional_text, state, text};
use crate::column::{between, time};
use crate::tally::Wait;
use crate::{
    Acknowledgement, Attempt, AuditEntry, Counts, Error, Filter, Hold, Inspect, Latency, Page, Paged, Record,
    Seq,
};

/// Rows that one call to list looks at, whatever it is looking for.
const LOOK: usize = 10_000;

/// The columns that [`record`] reads.
macro_rules! record_columns {
    () => {
        concat!(
            message_columns!(),
            ", ack_groups, written_at, status, attempts, crashes, delivery_epoch, seq, next_attempt_at,
             last_error, sent_at, dead_reason, held"
        )
    };
}

#[async_trait]
impl Inspect for SqliteStore {
    async fn record(&self, id: MessageId) -> Result<Option<Record>, Error> {
        self.file.read(move |connection| find(connection, id)).await
    }

    async fn list(&self, filter: &Filter, page: Page) -> Result<Paged<Record>, Error> {
        let filter = filter.clone();
        self.file.read(move |connection| list(connection, &filter, page)).await
    }

    async fn attempts(&self, id: MessageId) -> Result<Vec<Attempt>, Error> {
        self.file
            .read(move |connection| {
                let mut statement = connection.prepare_cached(
                    "SELECT at, outcome, error FROM outbox_attempts
                     WHERE seq = (SELECT seq FROM outbox_events WHERE id = ?1) ORDER BY position",
                )?;
                let attempts = statement.query_map([id.to_string()], |row| {
                    Ok(Attempt { at: time(row.get(0)?), outcome: row.get(1)?, error: row.get(2)? })
                })?;
                Ok(attempts.collect::<Result<_, _>>()?)
            })
            .await
    }

    async fn unsent(&self, seqs: &[Seq]) -> Result<Vec<Seq>, Error> {
        let seqs = serde_json::to_string(seqs).expect("numbers are JSON");
        self.file
            .read(move |connection| {
                let mut statement = connection.prepare_cached(
                    "SELECT seq FROM outbox_events WHERE seq IN (SELECT value FROM json_each(?1)) AND status <> 'sent'
                     ORDER BY seq",
                )?;
                Ok(statement.query_map([seqs], |row| row.get(0))?.collect::<Result<_, _>>()?)
            })
            .await
    }

    async fn identity(&self) -> Result<String, Error> {
        self.file
            .read(|connection| {
                let id = "SELECT value FROM outbox_settings WHERE name = 'store_id'";
                Ok(connection.query_row(id, [], |row| row.get(0))?)
            })
            .await
    }

    async fn counts(&self) -> Result<Counts, Error> {
        self.file.read(counts).await
    }

    async fn holds(&self, limit: usize) -> Result<Vec<Hold>, Error> {
        self.file
            .read(move |connection| {
                let in_flight = in_flight(connection)?;
                let mut statement = connection.prepare_cached(
                    "SELECT h.topic, h.key, h.seq, e.id, e.status
                     FROM outbox_holds h LEFT JOIN outbox_events e ON e.seq = h.seq ORDER BY h.topic, h.key LIMIT ?1",
                )?;
                let holds = statement.query_map([limit], |row| {
                    let gone = row.get_ref(3)? == rusqlite::types::ValueRef::Null;
                    Ok(Hold {
                        topic: text(row, 0)?,
                        key: text(row, 1)?,
                        id: if gone { None } else { Some(id(row, 3)?) },
                        status: match in_flight.contains_key(&row.get(2)?) {
                            true => Some(Status::InFlight),
                            false => optional_text(row, 4)?.and_then(|word| word.parse().ok()),
                        },
                    })
                })?;
                Ok(holds.collect::<Result<_, _>>()?)
            })
            .await
    }

    async fn audit(&self, page: Page) -> Result<Paged<AuditEntry>, Error> {
        self.file
            .read(move |connection| {
                let (sign, order) = direction(page);
                let mut statement = connection.prepare(&format!(
                    "SELECT position, at, actor, action, message_id, detail FROM outbox_audit
                     WHERE position {sign} ?1 ORDER BY position {order} LIMIT ?2"
                ))?;
                let items: Vec<AuditEntry> = statement
                    .query_map(params![start(page), page.limit], |row| {
                        Ok(AuditEntry {
                            position: row.get(0)?,
                            at: time(row.get(1)?),
                            actor: row.get(2)?,
                            action: row.get(3)?,
                            message: row.get::<_, Option<String>>(4)?.and_then(|id| id.parse().ok()),
                            detail: row.get(5)?,
                        })
                    })?
                    .collect::<Result<_, _>>()?;
                let next = items.last().filter(|_| items.len() == page.limit).map(|last| last.position);
                Ok(Paged { items, next })
            })
            .await
    }
}

/// The comparison and the order for a page.
pub(super) fn direction(page: Page) -> (&'static str, &'static str) {
    if page.newest_first { ("<", "DESC") } else { (">", "ASC") }
}

/// Where a page starts: always a number, because a comparison with one is found in an index and `IS NULL OR` is not.
pub(super) fn start(page: Page) -> i64 {
    page.after.unwrap_or(if page.newest_first { i64::MAX } else { i64::MIN })
}

/// The messages in open batches, and until when their lanes are leased.
pub(super) fn in_flight(connection: &Connection) -> Result<HashMap<i64, i64>, Error> {
    let mut statement = connection.prepare_cached(
        "SELECT b.seqs, l.locked_until FROM outbox_batches b JOIN outbox_lanes l USING (lane)",
    )?;
    let mut rows = statement.query([])?;
    let mut messages = HashMap::new();
    while let Some(row) = rows.next()? {
        let seqs: Vec<i64> = serde_json::from_str(row.get_ref(0)?.as_str().map_err(rusqlite::Error::from)?)
            .map_err(|error| Error::Broken(error.to_string()))?;
        let until: i64 = row.get(1)?;
        messages.extend(seqs.into_iter().map(|seq| (seq, until)));
    }
    Ok(messages)
}

/// Reads one message, whoever holds it.
pub(super) fn find(connection: &Connection, id: MessageId) -> Result<Option<Record>, Error> {
    let in_flight = in_flight(connection)?;
    let found = connection
        .prepare_cached(concat!("SELECT ", record_columns!(), " FROM outbox_events WHERE id = ?1"))?
        .query_row([id.to_string()], |row| record(row, &in_flight))
        .optional()?;
    found.map(|record| acknowledgements(connection, record)).transpose()
}

fn record(row: &Row<'_>, in_flight: &HashMap<i64, i64>) -> rusqlite::Result<Record> {
    const FIRST: usize = MESSAGE_COLUMNS;
    let seq = row.get(FIRST + 6)?;
    let locked_until = in_flight.get(&seq);
    let optional_time = |column| Ok::<_, rusqlite::Error>(row.get::<_, Option<i64>>(column)?.map(time));
    Ok(Record {
        seq,
        message: message(row)?,
        ack_groups: groups(row, FIRST)?,
        written_at: time(row.get(FIRST + 1)?),
        state: state(row, FIRST + 2, locked_until.is_some())?,
        next_attempt_at: optional_time(FIRST + 7)?,
        locked_until: locked_until.copied().map(time),
        last_error: optional_text(row, FIRST + 8)?,
        sent_at: optional_time(FIRST + 9)?,
        dead_reason: optional_text(row, FIRST + 10)?,
        held: row.get(FIRST + 11)?,
        acknowledgements: Vec::new(),
    })
}

fn acknowledgements(connection: &Connection, mut record: Record) -> Result<Record, Error> {
    record.acknowledgements = connection
        .prepare_cached(
            "SELECT grp, acknowledged_at FROM outbox_acknowledgements WHERE seq = ?1 ORDER BY grp",
        )?
        .query_map([record.seq], |row| Ok(Acknowledgement { group: row.get(0)?, at: time(row.get(1)?) }))?
        .collect::<Result<_, _>>()?;
    Ok(record)
}

/// The rows a list looks at, by number, in its order, a bounded number of them: from the narrowest index that
/// holds all it may find.
fn look(connection: &Connection, filter: &Filter, page: Page) -> Result<Vec<i64>, Error> {
    const UNSENT: [Status; 3] = [Status::Pending, Status::InFlight, Status::Failed];
    let (sign, order) = direction(page);
    let from = start(page);
    let seqs = |source: &str, name: Option<&str>| -> Result<Vec<i64>, Error> {
        let sql = format!("SELECT seq FROM {source} AND seq {sign} ?1 ORDER BY seq {order} LIMIT ?2");
        let mut statement = connection.prepare_cached(&sql)?;
        let mut parameters: Vec<&dyn ToSql> = vec![&from, &LOOK];
        if let Some(name) = &name {
            parameters.push(name);
        }
        let found = statement.query_map(&parameters[..], |row| row.get(0))?.collect::<Result<_, _>>()?;
        Ok(found)
    };
    if let Some(group) = &filter.unacknowledged_by {
        return seqs("outbox_unacknowledged WHERE grp = ?3", Some(group));
    }
    if filter.statuses == [Status::Dead] {
        return seqs("outbox_events INDEXED BY outbox_dead WHERE status = 'dead'", None);
    }
    if filter.statuses.is_empty() || !filter.statuses.iter().all(|status| UNSENT.contains(status)) {
        return seqs("outbox_events WHERE true", None);
    }
    let mut unsent = seqs(
        "outbox_events INDEXED BY outbox_waiting WHERE ready = 0 AND status IN ('pending', 'failed')",
        None,
    )?;
    // Sendable rows are indexed by topic first, so each topic is looked at by itself.
    let mut first = connection.prepare_cached(
        "SELECT topic FROM outbox_events INDEXED BY outbox_ready WHERE ready = 1 AND topic > ?1
         ORDER BY topic LIMIT 1",
    )?;
    let mut topic = String::new();
    while let Some(next) = first.query_row([&topic], |row| text(row, 0)).optional()? {
        topic = next;
        if filter.topic.as_ref().is_none_or(|wanted| *wanted == topic) {
            unsent.extend(seqs(
                "outbox_events INDEXED BY outbox_ready WHERE ready = 1 AND topic = ?3",
                Some(&topic),
            )?);
        }
    }
    unsent.sort_unstable();
    if page.newest_first {
        unsent.reverse();
    }
    unsent.truncate(LOOK);
    Ok(unsent)
}

fn list(connection: &Connection, filter: &Filter, page: Page) -> Result<Paged<Record>, Error> {
    let seqs = look(connection, filter, page)?;
    let in_flight = in_flight(connection)?;
    let mut read = connection.prepare_cached(concat!(
        "SELECT ",
        record_columns!(),
        " FROM outbox_events WHERE seq = ?1"
    ))?;
    let mut items = Vec::new();
    for seq in &seqs {
        let Some(found) = read.query_row([seq], |row| record(row, &in_flight)).optional()? else { continue };
        if fits(filter, &found) {
            items.push(acknowledgements(connection, found)?);
            if items.len() == page.limit {
                return Ok(Paged { items, next: Some(*seq) });
            }
        }
    }
    Ok(Paged { items, next: seqs.last().copied().filter(|_| seqs.len() == LOOK) })
}

fn fits(filter: &Filter, record: &Record) -> bool {
    let same = |wanted: &Option<String>, value: Option<&str>| {
        wanted.as_deref().is_none_or(|wanted| value == Some(wanted))
    };
    (filter.statuses.is_empty() || filter.statuses.contains(&record.state.status))
        && same(&filter.topic, Some(&record.message.topic))
        && same(&filter.key, record.message.key.as_deref())
        && filter.group.as_ref().is_none_or(|group| {
            record.ack_groups.as_ref().is_some_and(|groups| groups.contains(group))
                || record.acknowledgements.iter().any(|acknowledgement| acknowledgement.group == *group)
        })
}

fn counts(connection: &Connection) -> Result<Counts, Error> {
    let now = now(connection)?;
    let (in_flight, in_flight_failed): (i64, i64) = connection.query_row(
        "SELECT coalesce(sum(size), 0), coalesce(sum(failed), 0) FROM outbox_batches",
        [],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )?;
    let written: i64 = connection
        .query_row("SELECT seq FROM sqlite_sequence WHERE name = 'outbox_events'", [], |row| row.get(0))
        .optional()?
        .unwrap_or(0);
    let positive = |number: i64| u64::try_from(number).unwrap_or(0);
    let mut counts = connection.query_row(
        "SELECT failed, sent, dead, removed, publish_success_total, publish_failure_total, dead_total,
                acknowledged_total FROM outbox_counters",
        [],
        |row| {
            let (failed, sent, dead, removed): (i64, i64, i64, i64) =
                (row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?);
            let pending = written - failed - sent - dead - removed;
            Ok(Counts {
                pending: positive(pending - (in_flight - in_flight_failed)),
                in_flight: positive(in_flight),
                failed: positive(failed - in_flight_failed),
                sent: positive(sent),
                dead: positive(dead),
                publish_success_total: row.get(4)?,
                publish_failure_total: row.get(5)?,
                dead_total: row.get(6)?,
                acknowledged_total: row.get(7)?,
                ..Counts::default()
            })
        },
    )?;
    let oldest = oldest(connection)?;
    if oldest.is_none() {
        // Numbers that a writer drew and did not use look like messages; here it is known that none is left.
        counts.pending = 0;
    }
    counts.oldest_age = oldest.map(|written_at| between(written_at, now));
    counts.write_to_sent = latency(connection, Wait::WriteToSent)?;
    counts.sent_to_acknowledged = latency(connection, Wait::SentToAcknowledged)?;
    Ok(counts)
}

/// When the oldest message that is not sent was written: the first of each index that holds such.
fn oldest(connection: &Connection) -> Result<Option<i64>, Error> {
    let mut first: Option<i64> = connection.query_row(
        "SELECT min(seq) FROM outbox_events INDEXED BY outbox_waiting
         WHERE ready = 0 AND status IN ('pending', 'failed')",
        [],
        |row| row.get(0),
    )?;
    let mut next = connection.prepare_cached(
        "SELECT topic, seq FROM outbox_events INDEXED BY outbox_ready WHERE ready = 1 AND topic > ?1
         ORDER BY topic, seq LIMIT 1",
    )?;
    let mut topic = String::new();
    while let Some((found, seq)) =
        next.query_row([&topic], |row| Ok((text(row, 0)?, row.get::<_, i64>(1)?))).optional()?
    {
        first = Some(first.map_or(seq, |first| first.min(seq)));
        topic = found;
    }
    let Some(first) = first else { return Ok(None) };
    Ok(connection
        .prepare_cached("SELECT written_at FROM outbox_events WHERE seq = ?1")?
        .query_row([first], |row| row.get(0))
        .optional()?)
}

fn latency(connection: &Connection, wait: Wait) -> Result<Latency, Error> {
    let mut latency = Latency { counts: vec![0; Latency::BOUNDS.len() + 1], sum: Duration::ZERO };
    let mut statement =
        connection.prepare_cached("SELECT bucket, n, millis FROM outbox_latencies WHERE name = ?1")?;
    let mut rows = statement.query([wait.name()])?;
    while let Some(row) = rows.next()? {
        if let Some(count) = latency.counts.get_mut(row.get::<_, usize>(0)?) {
            *count = row.get(1)?;
        }
        latency.sum += Duration::from_millis(row.get(2)?);
    }
    Ok(latency)
}
