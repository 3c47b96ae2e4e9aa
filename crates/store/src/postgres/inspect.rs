//! Looking: records, lists that read a bounded number of rows, and counts that are kept as they change.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use message::{MessageId, Status};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::PostgresStore;
use super::connection::{Transaction, repeat};
use super::error::Trouble;
use super::row::{MESSAGE_COLUMNS, between, groups, limit, message, message_columns, state};
use crate::tally::Wait;
use crate::{
    Acknowledgement, Attempt, AuditEntry, Counts, Error, Filter, Hold, Inspect, Latency, Page, Paged, Record,
    Seq,
};

/// Rows that one call to list looks at, whatever it is looking for.
const LOOK: usize = 10_000;

/// Unsent messages are counted one by one up to so many; beyond, the number may be as old as [`RECENT`].
const EXACT: i64 = 100_000;

/// How old the number of a long backlog may be.
const RECENT: Duration = Duration::from_secs(5);

/// How many unsent messages there were when a long backlog was last counted.
#[derive(Debug, Default)]
pub(super) struct Backlog(Mutex<Option<(Instant, i64)>>);

/// The columns that [`record`] reads.
macro_rules! record_columns {
    () => {
        concat!(
            message_columns!(),
            ", e.ack_groups::text, e.written_at, e.status, e.attempts, e.crashes, e.delivery_epoch, e.seq,
             e.next_attempt_at, e.last_error, e.sent_at, e.dead_reason, e.held,
             ARRAY(SELECT a.grp FROM outbox_acknowledgements a WHERE a.seq = e.seq ORDER BY a.grp),
             ARRAY(SELECT a.acknowledged_at FROM outbox_acknowledgements a WHERE a.seq = e.seq ORDER BY a.grp)"
        )
    };
}

#[async_trait]
impl Inspect for PostgresStore {
    async fn identity(&self) -> Result<String, Error> {
        let rows = self.read("SELECT value FROM outbox_settings WHERE name = 'store_id'", &[]).await?;
        let row = rows
            .first()
            .ok_or_else(|| Error::Broken("the store's id is missing from its settings".to_owned()))?;
        Ok(row.try_get(0).map_err(Trouble::from)?)
    }

    async fn unsent(&self, seqs: &[Seq]) -> Result<Vec<Seq>, Error> {
        let sql = "SELECT seq FROM outbox_events WHERE seq = ANY ($1) AND status <> 'sent' ORDER BY seq";
        let rows = self.read(sql, &[(&seqs, Type::INT8_ARRAY)]).await?;
        Ok(rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>().map_err(Trouble::from)?)
    }

    async fn record(&self, id: MessageId) -> Result<Option<Record>, Error> {
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let (begun, found) = tokio::join!(biased; tx.begin_snapshot(), find(&tx, id));
            tx.end(begun.and(found)).await
        })
        .await
    }

    async fn list(&self, filter: &Filter, page: Page) -> Result<Paged<Record>, Error> {
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let (begun, found) = tokio::join!(biased; tx.begin_snapshot(), list(&tx, filter, page));
            tx.end(begun.and(found)).await
        })
        .await
    }

    async fn attempts(&self, id: MessageId) -> Result<Vec<Attempt>, Error> {
        let rows = self
            .read(
                "SELECT at, outcome, error FROM outbox_attempts
                 WHERE seq = (SELECT seq FROM outbox_events WHERE id = $1) ORDER BY position",
                &[(&id.0, Type::UUID)],
            )
            .await?;
        let attempt =
            |row: &Row| Ok(Attempt { at: row.try_get(0)?, outcome: row.try_get(1)?, error: row.try_get(2)? });
        Ok(rows.iter().map(attempt).collect::<Result<_, Trouble>>()?)
    }

    async fn counts(&self) -> Result<Counts, Error> {
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let (begun, counts) = tokio::join!(biased; tx.begin_snapshot(), counts(&tx, &self.backlog));
            tx.end(begun.and(counts)).await
        })
        .await
    }

    async fn holds(&self, most: usize) -> Result<Vec<Hold>, Error> {
        let rows = self
            .read(
                "SELECT h.topic, h.key, e.id,
                        CASE WHEN EXISTS (SELECT 1 FROM outbox_open_batches b WHERE h.seq = ANY (b.seqs)) THEN 'InFlight'
                             ELSE e.status END
                 FROM outbox_holds h LEFT JOIN outbox_events e ON e.seq = h.seq ORDER BY h.topic, h.key LIMIT $1",
                &[(&limit(most), Type::INT8)],
            )
            .await?;
        let hold = |row: &Row| {
            Ok(Hold {
                topic: row.try_get(0)?,
                key: row.try_get(1)?,
                id: row.try_get::<_, Option<Uuid>>(2)?.map(MessageId),
                status: row.try_get::<_, Option<&str>>(3)?.and_then(|word| word.parse().ok()),
            })
        };
        Ok(rows.iter().map(hold).collect::<Result<_, Trouble>>()?)
    }

    async fn audit(&self, page: Page) -> Result<Paged<AuditEntry>, Error> {
        let sql = directed(
            "SELECT position, at, actor, action, message_id, detail FROM outbox_audit
             WHERE position {sign} $1 ORDER BY position {order} LIMIT $2",
            page,
        );
        let rows = self.read(&sql, &[(&start(page), Type::INT8), (&limit(page.limit), Type::INT8)]).await?;
        let entry = |row: &Row| {
            Ok(AuditEntry {
                position: row.try_get(0)?,
                at: row.try_get(1)?,
                actor: row.try_get(2)?,
                action: row.try_get(3)?,
                message: row.try_get::<_, Option<Uuid>>(4)?.map(MessageId),
                detail: row.try_get(5)?,
            })
        };
        let items: Vec<AuditEntry> = rows.iter().map(entry).collect::<Result<_, Trouble>>()?;
        let next = items.last().filter(|_| items.len() == page.limit).map(|last| last.position);
        Ok(Paged { items, next })
    }
}

/// `sql` in the direction of `page`.
pub(super) fn directed(sql: &str, page: Page) -> String {
    let (sign, order) = if page.newest_first { ("<", "DESC") } else { (">", "ASC") };
    sql.replace("{sign}", sign).replace("{order}", order)
}

/// Where a page starts: always a number, because a comparison with one is found in an index and `IS NULL OR` is not.
pub(super) fn start(page: Page) -> i64 {
    page.after.unwrap_or(if page.newest_first { i64::MAX } else { i64::MIN })
}

/// The messages in open batches, and until when their lanes are leased.
pub(super) async fn in_flight(tx: &Transaction) -> Result<HashMap<i64, DateTime<Utc>>, Trouble> {
    let mut messages = HashMap::new();
    for row in tx.query("SELECT seqs, locked_until FROM outbox_open_batches", &[]).await? {
        let until: DateTime<Utc> = row.try_get(1)?;
        messages.extend(row.try_get::<_, Vec<i64>>(0)?.into_iter().map(|seq| (seq, until)));
    }
    Ok(messages)
}

/// Reads one message, whoever holds it. The transaction has one snapshot, or the lock of the message's lane.
pub(super) async fn find(tx: &Transaction, id: MessageId) -> Result<Option<Record>, Trouble> {
    let sql = concat!("SELECT ", record_columns!(), " FROM outbox_events e WHERE e.id = $1");
    let parameters: [(&(dyn ToSql + Sync), Type); 1] = [(&id.0, Type::UUID)];
    let (flying, rows) = tokio::join!(biased; in_flight(tx), tx.query(sql, &parameters));
    let flying = flying?;
    rows?.first().map(|row| record(row, &flying)).transpose()
}

fn record(row: &Row, in_flight: &HashMap<i64, DateTime<Utc>>) -> Result<Record, Trouble> {
    const FIRST: usize = MESSAGE_COLUMNS;
    let seq = row.try_get(FIRST + 6)?;
    let locked_until = in_flight.get(&seq).copied();
    let names: Vec<String> = row.try_get(FIRST + 12)?;
    let times: Vec<DateTime<Utc>> = row.try_get(FIRST + 13)?;
    Ok(Record {
        seq,
        message: message(row, 0)?,
        ack_groups: groups(row, FIRST)?,
        written_at: row.try_get(FIRST + 1)?,
        state: state(row, FIRST + 2, locked_until.is_some())?,
        next_attempt_at: row.try_get(FIRST + 7)?,
        locked_until,
        last_error: row.try_get(FIRST + 8)?,
        sent_at: row.try_get(FIRST + 9)?,
        dead_reason: row.try_get(FIRST + 10)?,
        held: row.try_get(FIRST + 11)?,
        acknowledgements: names
            .into_iter()
            .zip(times)
            .map(|(group, at)| Acknowledgement { group, at })
            .collect(),
    })
}

/// Where a list finds the numbers of the rows it looks at, in its order: the narrowest index that holds all it may show.
fn source(filter: &Filter) -> &'static str {
    const UNSENT: [Status; 3] = [Status::Pending, Status::InFlight, Status::Failed];
    if filter.unacknowledged_by.is_some() {
        return "SELECT seq FROM outbox_unacknowledged WHERE grp = $3 AND seq {sign} $1 ORDER BY seq {order} LIMIT $2";
    }
    if filter.statuses == [Status::Dead] {
        return "SELECT seq FROM outbox_events WHERE status = 'dead' AND seq {sign} $1 ORDER BY seq {order} LIMIT $2";
    }
    if filter.statuses.is_empty() || !filter.statuses.iter().all(|status| UNSENT.contains(status)) {
        return "SELECT seq FROM outbox_events WHERE seq {sign} $1 ORDER BY seq {order} LIMIT $2";
    }
    include_str!("unsent.sql")
}

async fn list(tx: &Transaction, filter: &Filter, page: Page) -> Result<Paged<Record>, Trouble> {
    let (from, look) = (start(page), limit(LOOK));
    // What the index cannot tell: a topic for the unsent, a group for the unacknowledged.
    let name = filter.unacknowledged_by.as_ref().or(filter.topic.as_ref());
    let sql = source(filter);
    let mut parameters: Vec<(&(dyn ToSql + Sync), Type)> = vec![(&from, Type::INT8), (&look, Type::INT8)];
    if sql.contains("$3") {
        parameters.push((&name, Type::TEXT));
    }
    let seqs: Vec<i64> = tx
        .query(&directed(sql, page), &parameters)
        .await?
        .iter()
        .map(|row| row.try_get(0))
        .collect::<Result<_, _>>()?;
    let flying = in_flight(tx).await?;
    let mut items = Vec::new();
    // Read in steps: the first ones often suffice.
    for step in seqs.chunks(page.limit.clamp(100, 2_000)) {
        for row in read(tx, step, page).await? {
            let found = record(&row, &flying)?;
            if fits(filter, &found) {
                items.push(found);
                if items.len() == page.limit {
                    let next = items.last().map(|last| last.seq);
                    return Ok(Paged { items, next });
                }
            }
        }
    }
    Ok(Paged { items, next: seqs.last().copied().filter(|_| seqs.len() == LOOK) })
}

async fn read(tx: &Transaction, seqs: &[i64], page: Page) -> Result<Vec<Row>, Trouble> {
    let sql = concat!(
        "SELECT ",
        record_columns!(),
        " FROM outbox_events e WHERE e.seq = ANY ($1) ORDER BY e.seq {order}"
    );
    tx.query(&directed(sql, page), &[(&seqs, Type::INT8_ARRAY)]).await
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

async fn counts(tx: &Transaction, backlog: &Backlog) -> Result<Counts, Trouble> {
    let (row, waits) = tokio::join!(
        biased;
        async { tx.one(include_str!("counts.sql"), &[(&(EXACT + 1), Type::INT8)]).await },
        tx.query("SELECT name, bucket, sum(n)::bigint, sum(millis)::bigint FROM outbox_latencies GROUP BY name, bucket", &[]),
    );
    let (row, waits) = (row?, waits?);
    let number = |column| row.try_get::<_, i64>(column);
    let positive = |number: i64| u64::try_from(number).unwrap_or(0);
    let (failed, in_flight, in_flight_failed) = (number(0)?, number(7)?, number(8)?);
    let unsent = match number(9)? {
        few if few <= EXACT => few,
        _ => backlog.count(tx).await?,
    };
    let now: DateTime<Utc> = row.try_get(11)?;
    let oldest: Option<DateTime<Utc>> = row.try_get(10)?;
    Ok(Counts {
        pending: positive(unsent - failed - (in_flight - in_flight_failed)),
        in_flight: positive(in_flight),
        failed: positive(failed - in_flight_failed),
        sent: positive(number(1)?),
        dead: positive(number(2)?),
        oldest_age: oldest.map(|written_at| between(written_at, now)),
        publish_success_total: positive(number(3)?),
        publish_failure_total: positive(number(4)?),
        dead_total: positive(number(5)?),
        acknowledged_total: positive(number(6)?),
        write_to_sent: latency(&waits, Wait::WriteToSent)?,
        sent_to_acknowledged: latency(&waits, Wait::SentToAcknowledged)?,
    })
}

impl Backlog {
    /// How many messages are unsent, counted at most every so often.
    async fn count(&self, tx: &Transaction) -> Result<i64, Trouble> {
        let last = *self.0.lock().expect("nobody panics while a number is copied");
        if let Some((at, number)) = last
            && at.elapsed() < RECENT
        {
            return Ok(number);
        }
        let row = tx.one(include_str!("backlog.sql"), &[]).await?;
        let number = row.try_get(0)?;
        *self.0.lock().expect("nobody panics while a number is copied") = Some((Instant::now(), number));
        Ok(number)
    }
}

fn latency(rows: &[Row], wait: Wait) -> Result<Latency, Trouble> {
    let mut latency = Latency { counts: vec![0; Latency::BOUNDS.len() + 1], sum: Duration::ZERO };
    for row in rows {
        if row.try_get::<_, &str>(0)? != wait.name() {
            continue;
        }
        let number = |column| Ok::<_, Trouble>(u64::try_from(row.try_get::<_, i64>(column)?).unwrap_or(0));
        let bucket = usize::try_from(row.try_get::<_, i16>(1)?).unwrap_or(0);
        if let Some(count) = latency.counts.get_mut(bucket) {
            *count = number(2)?;
        }
        latency.sum += Duration::from_millis(number(3)?);
    }
    Ok(latency)
}
