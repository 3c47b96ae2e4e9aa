//! Looking: records, lists that read a bounded number of rows, and counts that are kept or read from an index.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use message::{MessageId, Status};
use mysql_async::Row;
use mysql_async::prelude::Queryable;

use super::error::Trouble;
use super::row::{MESSAGE_COLUMNS, Read, list as numbers, message_columns};
use super::{MysqlStore, lane};
use crate::column::{between, time, word};
use crate::tally::Wait;
use crate::{
    Acknowledgement, Attempt, AuditEntry, Counts, Error, Filter, Hold, Inspect, Latency, Page, Paged, Record,
    Seq,
};

/// Rows that one call to list looks at, whatever it is looking for, and how many it reads at a time.
const LOOK: usize = 10_000;
const READ: usize = 250;

/// A backlog longer than this is counted again only every few seconds: reading its index takes a while.
const LONG: u64 = 100_000;
const OLDEST_COUNT: Duration = Duration::from_secs(3);

/// Messages that are in an open batch: until when their lanes are leased.
pub(super) type InFlight = HashMap<i64, i64>;

/// How many are Pending, Failed and Dead, batches or not, and when that was counted.
#[derive(Debug, Default)]
pub(super) struct Counted(Mutex<Option<(Instant, [u64; 3])>>);

/// The columns that [`record`] reads.
macro_rules! record_columns {
    () => {
        concat!(
            message_columns!(),
            ", ack_groups, written_at, status, attempts, crashes, delivery_epoch, seq, next_attempt_at,
             last_error, sent_at, dead_reason, held, slot"
        )
    };
}

#[async_trait]
impl Inspect for MysqlStore {
    async fn record(&self, id: MessageId) -> Result<Option<Record>, Error> {
        self.run(move |store| async move {
            let mut view = store.view().await?;
            let found = find(&mut view, id).await?;
            view.rollback().await?;
            Ok(found.map(|(record, _)| record))
        })
        .await
    }

    async fn list(&self, filter: &Filter, page: Page) -> Result<Paged<Record>, Error> {
        let filter = Arc::new(filter.clone());
        self.run(move |store| {
            let filter = Arc::clone(&filter);
            async move {
                let mut view = store.view().await?;
                let listed = list(&mut view, &filter, page).await?;
                view.rollback().await?;
                Ok(listed)
            }
        })
        .await
    }

    async fn attempts(&self, id: MessageId) -> Result<Vec<Attempt>, Error> {
        self.run(move |store| async move {
            let mut connection = store.connection().await?;
            let rows: Vec<Row> = connection
                .exec(
                    "SELECT at, outcome, error FROM outbox_attempts
                     WHERE seq = (SELECT seq FROM outbox_events WHERE id = ? LIMIT 1) ORDER BY position",
                    (id.to_string(),),
                )
                .await?;
            let attempt = |mut row: Row| -> Result<Attempt, Trouble> {
                Ok(Attempt { at: time(row.millis(0)?), outcome: row.text(1)?, error: row.text(2)? })
            };
            rows.into_iter().map(attempt).collect()
        })
        .await
    }

    async fn unsent(&self, seqs: &[Seq]) -> Result<Vec<Seq>, Error> {
        if seqs.is_empty() {
            return Ok(Vec::new());
        }
        let seqs = Arc::new(numbers(seqs));
        self.run(move |store| {
            let seqs = Arc::clone(&seqs);
            async move {
                let sql = format!(
                    "SELECT seq FROM outbox_events FORCE INDEX (PRIMARY) WHERE seq IN ({seqs}) AND status <> 'sent' ORDER BY seq"
                );
                let mut connection = store.connection().await?;
                Ok(connection.query(sql).await?)
            }
        })
        .await
    }

    async fn identity(&self) -> Result<String, Error> {
        self.run(|store| async move {
            let mut connection = store.connection().await?;
            let id: Option<String> =
                connection.query_first("SELECT value FROM outbox_settings WHERE name = 'store_id'").await?;
            Ok(id.ok_or_else(|| Error::Broken("the store has lost its identity".to_owned()))?)
        })
        .await
    }

    async fn counts(&self) -> Result<Counts, Error> {
        self.run(|store| async move { store.count().await }).await
    }

    async fn holds(&self, limit: usize) -> Result<Vec<Hold>, Error> {
        self.run(move |store| async move {
            let mut view = store.view().await?;
            let in_flight = in_flight(&mut view).await?;
            let rows: Vec<Row> = view
                .exec(
                    "SELECT h.topic, h.`key`, h.seq, e.id, e.status
                     FROM outbox_holds h LEFT JOIN outbox_events e ON e.seq = h.seq ORDER BY h.topic, h.`key` LIMIT ?",
                    (limit,),
                )
                .await?;
            view.rollback().await?;
            let hold = |mut row: Row| -> Result<Hold, Trouble> {
                let flies = in_flight.contains_key(&row.number(2)?);
                let rest = row.optional_text(4)?.and_then(|word| word.parse().ok());
                Ok(Hold {
                    topic: row.text(0)?,
                    key: row.text(1)?,
                    id: row.optional_text(3)?.and_then(|id| id.parse().ok()),
                    status: if flies { Some(Status::InFlight) } else { rest },
                })
            };
            rows.into_iter().map(hold).collect()
        })
        .await
    }

    async fn audit(&self, page: Page) -> Result<Paged<AuditEntry>, Error> {
        self.run(move |store| async move {
            let mut connection = store.connection().await?;
            let (sign, order) = direction(page);
            let sql = format!(
                "SELECT position, at, actor, action, message_id, detail FROM outbox_audit
                 WHERE position {sign} ? ORDER BY position {order} LIMIT ?"
            );
            let mut items = Vec::new();
            for mut row in connection.exec::<Row, _, _>(sql, (start(page), page.limit)).await? {
                items.push(AuditEntry {
                    position: row.number(0)?,
                    at: time(row.millis(1)?),
                    actor: row.text(2)?,
                    action: row.text(3)?,
                    message: row.optional_text(4)?.and_then(|id| id.parse().ok()),
                    detail: row.text(5)?,
                });
            }
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

pub(super) async fn in_flight(connection: &mut impl Queryable) -> Result<InFlight, Trouble> {
    let sql = "SELECT b.seqs, l.locked_until FROM outbox_batches b JOIN outbox_lanes l ON l.lane = b.lane";
    let mut messages = HashMap::new();
    for mut row in connection.exec::<Row, _, _>(sql, ()).await? {
        let until = row.millis(1)?;
        messages.extend(lane::seqs(&row.text(0)?)?.into_iter().map(|seq| (seq, until)));
    }
    Ok(messages)
}

/// Reads one message, whoever holds it, and its slot. In one view of all tables, or under the lock of its lane: what
/// is in flight is seen in two looks.
pub(super) async fn find(
    connection: &mut impl Queryable,
    id: MessageId,
) -> Result<Option<(Record, u16)>, Trouble> {
    let sql = concat!("SELECT ", record_columns!(), " FROM outbox_events WHERE id = ? ORDER BY seq LIMIT 1");
    let in_flight = in_flight(connection).await?;
    let Some(row) = connection.exec_first::<Row, _, _>(sql, (id.to_string(),)).await? else {
        return Ok(None);
    };
    let (record, slot) = record(row, &in_flight)?;
    let mut records = [record];
    acknowledgements(connection, &mut records).await?;
    let [record] = records;
    Ok(Some((record, slot)))
}

fn record(mut row: Row, in_flight: &InFlight) -> Result<(Record, u16), Error> {
    const FIRST: usize = MESSAGE_COLUMNS;
    let seq = row.number(FIRST + 6)?;
    let locked_until = in_flight.get(&seq);
    let record = Record {
        seq,
        message: row.message()?,
        ack_groups: row.groups(FIRST)?,
        written_at: time(row.millis(FIRST + 1)?),
        state: row.state(FIRST + 2, locked_until.is_some())?,
        next_attempt_at: row.optional_time(FIRST + 7)?,
        locked_until: locked_until.copied().map(time),
        last_error: row.optional_text(FIRST + 8)?,
        sent_at: row.optional_time(FIRST + 9)?,
        dead_reason: row.optional_text(FIRST + 10)?,
        held: row.flag(FIRST + 11)?,
        acknowledgements: Vec::new(),
    };
    Ok((record, row.small(FIRST + 12)?))
}

/// Reads who acknowledged `records`.
async fn acknowledgements(connection: &mut impl Queryable, records: &mut [Record]) -> Result<(), Trouble> {
    if records.is_empty() {
        return Ok(());
    }
    let places: HashMap<i64, usize> =
        records.iter().enumerate().map(|(place, record)| (record.seq, place)).collect();
    let sql = format!(
        "SELECT seq, grp, acknowledged_at FROM outbox_acknowledgements WHERE seq IN ({}) ORDER BY seq, grp",
        numbers(places.keys())
    );
    for mut row in connection.query::<Row, _>(sql).await? {
        let place = places[&row.number(0)?];
        let acknowledgement = Acknowledgement { group: row.text(1)?, at: time(row.millis(2)?) };
        records[place].acknowledgements.push(acknowledgement);
    }
    Ok(())
}

/// The rows a list looks at, by number, in its order, a bounded number of them: from the narrowest index that
/// holds all it may find.
async fn look(connection: &mut impl Queryable, filter: &Filter, page: Page) -> Result<Vec<i64>, Trouble> {
    let (sign, order) = direction(page);
    let from = start(page);
    let tail = format!("AND seq {sign} {from} ORDER BY seq {order} LIMIT {LOOK}");
    if let Some(group) = &filter.unacknowledged_by {
        let sql = format!(
            "SELECT seq FROM outbox_unacknowledged u FORCE INDEX (PRIMARY) WHERE grp = ? AND NOT EXISTS (
                 SELECT 1 FROM outbox_acknowledgements a WHERE a.seq = u.seq AND a.grp = u.grp) {tail}"
        );
        return Ok(connection.exec(sql, (group,)).await?);
    }
    // In flight is no status of the table: such messages are Pending or Failed there.
    let mut statuses: BTreeSet<&str> = BTreeSet::new();
    for status in &filter.statuses {
        statuses.insert(word(*status));
        if *status == Status::InFlight {
            statuses.insert(word(Status::Failed));
        }
    }
    if statuses.is_empty() || statuses.contains(word(Status::Sent)) {
        let sql = format!("SELECT seq FROM outbox_events FORCE INDEX (PRIMARY) WHERE true {tail}");
        return Ok(connection.query(sql).await?);
    }
    let part = |status: &str, ready: u8| {
        format!(
            "(SELECT seq FROM outbox_events FORCE INDEX (outbox_status_seq)
              WHERE status = '{status}' AND ready = {ready} {tail})"
        )
    };
    let parts: Vec<String> = statuses.iter().flat_map(|status| [part(status, 0), part(status, 1)]).collect();
    let mut seqs: Vec<i64> = connection.query(parts.join(" UNION ALL ")).await?;
    seqs.sort_unstable();
    if page.newest_first {
        seqs.reverse();
    }
    seqs.truncate(LOOK);
    Ok(seqs)
}

async fn list(
    connection: &mut impl Queryable,
    filter: &Filter,
    page: Page,
) -> Result<Paged<Record>, Trouble> {
    let in_flight = in_flight(connection).await?;
    let seqs = look(connection, filter, page).await?;
    let mut items = Vec::new();
    for chunk in seqs.chunks(READ.min(page.limit.max(1))) {
        let sql = format!(
            concat!(
                "SELECT ",
                record_columns!(),
                " FROM outbox_events FORCE INDEX (PRIMARY) WHERE seq IN ({})"
            ),
            numbers(chunk)
        );
        let mut read = Vec::with_capacity(chunk.len());
        for row in connection.query::<Row, _>(sql).await? {
            read.push(record(row, &in_flight)?.0);
        }
        acknowledgements(connection, &mut read).await?;
        let mut read: HashMap<i64, Record> = read.into_iter().map(|record| (record.seq, record)).collect();
        for seq in chunk {
            let Some(record) = read.remove(seq).filter(|record| fits(filter, record)) else { continue };
            items.push(record);
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

impl MysqlStore {
    async fn count(&self) -> Result<Counts, Trouble> {
        let mut tx = self.view().await?;
        let mut counts = totals(&mut tx).await?;
        let row: Option<Row> = tx
            .exec_first("SELECT coalesce(sum(size), 0), coalesce(sum(failed), 0) FROM outbox_batches", ())
            .await?;
        let mut row = row.ok_or_else(|| Error::Broken("the batches cannot be counted".to_owned()))?;
        let (in_flight, in_flight_failed): (u64, u64) = (row.small(0)?, row.small(1)?);
        let [pending, failed, dead] = self.resting(&mut tx).await?;
        counts.in_flight = in_flight;
        counts.pending = (pending + in_flight_failed).saturating_sub(in_flight);
        counts.failed = failed.saturating_sub(in_flight_failed);
        counts.dead = dead;
        counts.oldest_age = oldest(&mut tx).await?;
        counts.write_to_sent = latency(&mut tx, Wait::WriteToSent).await?;
        counts.sent_to_acknowledged = latency(&mut tx, Wait::SentToAcknowledged).await?;
        tx.rollback().await?;
        Ok(counts)
    }

    /// How many are Pending, Failed and Dead in the table. Only these are read, and of Sent ones none; when they are
    /// very many, the answer may be a few seconds old.
    async fn resting(&self, connection: &mut impl Queryable) -> Result<[u64; 3], Trouble> {
        let recent = *self.counted.0.lock().expect("nobody panics while holding a number");
        if let Some((when, counted)) = recent
            && counted.iter().sum::<u64>() > LONG
            && when.elapsed() < OLDEST_COUNT
        {
            return Ok(counted);
        }
        let mut counted = [0; 3];
        let rows: Vec<Row> = connection
            .exec(
                "SELECT status, count(*) FROM outbox_events FORCE INDEX (outbox_status_seq)
                 WHERE status IN ('pending', 'failed', 'dead') GROUP BY status",
                (),
            )
            .await?;
        for mut row in rows {
            let place = match row.text(0)?.as_str() {
                "pending" => 0,
                "failed" => 1,
                _ => 2,
            };
            counted[place] = row.small(1)?;
        }
        *self.counted.0.lock().expect("nobody panics while holding a number") =
            Some((Instant::now(), counted));
        Ok(counted)
    }
}

async fn totals(connection: &mut impl Queryable) -> Result<Counts, Trouble> {
    let row: Option<Row> = connection
        .exec_first(
            "SELECT cast(sum(sent) AS SIGNED), cast(sum(publish_success_total) AS SIGNED),
                    cast(sum(publish_failure_total) AS SIGNED), cast(sum(dead_total) AS SIGNED),
                    cast(sum(acknowledged_total) AS SIGNED) FROM outbox_counters",
            (),
        )
        .await?;
    let mut row = row.ok_or_else(|| Error::Broken("the counters are gone".to_owned()))?;
    Ok(Counts {
        sent: u64::try_from(row.number(0)?).unwrap_or(0),
        publish_success_total: row.small(1)?,
        publish_failure_total: row.small(2)?,
        dead_total: row.small(3)?,
        acknowledged_total: row.small(4)?,
        ..Counts::default()
    })
}

/// How long the oldest message that is not sent has been waiting: the first of each part of the index that holds such.
async fn oldest(connection: &mut impl Queryable) -> Result<Option<Duration>, Trouble> {
    let part = |(status, ready): (&str, u8)| {
        format!(
            "(SELECT seq FROM outbox_events FORCE INDEX (outbox_status_seq)
              WHERE status = '{status}' AND ready = {ready} ORDER BY seq LIMIT 1)"
        )
    };
    let parts = [("pending", 0), ("pending", 1), ("failed", 0), ("failed", 1)].map(part);
    let firsts: Vec<i64> = connection.query(parts.join(" UNION ALL ")).await?;
    let Some(first) = firsts.into_iter().min() else { return Ok(None) };
    let row: Option<Row> = connection
        .exec_first("SELECT written_at, utc_timestamp(3) FROM outbox_events WHERE seq = ?", (first,))
        .await?;
    match row {
        None => Ok(None),
        Some(mut row) => Ok(Some(between(row.millis(0)?, row.millis(1)?))),
    }
}

async fn latency(connection: &mut impl Queryable, wait: Wait) -> Result<Latency, Trouble> {
    let mut latency = Latency { counts: vec![0; Latency::BOUNDS.len() + 1], sum: Duration::ZERO };
    let rows: Vec<Row> = connection
        .exec(
            "SELECT bucket, cast(sum(n) AS SIGNED), cast(sum(millis) AS SIGNED)
             FROM outbox_latencies WHERE name = ? GROUP BY bucket",
            (wait.name(),),
        )
        .await?;
    for mut row in rows {
        if let Some(count) = latency.counts.get_mut(row.small::<usize>(0)?) {
            *count = row.small(1)?;
        }
        latency.sum += Duration::from_millis(row.small(2)?);
    }
    Ok(latency)
}
