//! Looking: records, lists that read a bounded number of them, and counts that are kept as they change.

use std::time::Duration;

use ::redis::Value;
use async_trait::async_trait;
use message::{MessageId, Status};

use super::RedisStore;
use super::reply::{Fields, Reader, odd, word};
use super::script::script;
use crate::column::{groups, time};
use crate::tally::Wait;
use crate::{
    Acknowledgement, Attempt, AuditEntry, Counts, Error, Filter, Hold, Inspect, Latency, Page, Paged, Record,
    Seq,
};

/// Records that one call to list looks at, whatever it is looking for, and those that one script does.
const LOOK: usize = 10_000;
const STEP: usize = 500;

/// Messages that a script is asked for at once: it stops the whole server for a while.
const ASKED: usize = 1_000;

script!(RECORD: "prelude.lua", "inspect.lua", "record.lua");
script!(LIST: "prelude.lua", "inspect.lua", "list.lua");
script!(ATTEMPTS: "prelude.lua", "attempts.lua");
script!(UNSENT_OF: "prelude.lua", "unsent.lua");
script!(COUNTS: "prelude.lua", "counts.lua");

#[async_trait]
impl Inspect for RedisStore {
    async fn record(&self, id: MessageId) -> Result<Option<Record>, Error> {
        let mut call = self.script(&RECORD);
        call.arg(id.to_string());
        let mut answer = self.read(&call).await?;
        // Nothing is answered as one nil, a record as its parts.
        match answer.optional_number()? {
            None => Ok(None),
            Some(seq) => record(seq, answer).map(Some),
        }
    }

    async fn list(&self, filter: &Filter, page: Page) -> Result<Paged<Record>, Error> {
        if page.limit == 0 {
            return Ok(Paged { items: Vec::new(), next: page.after });
        }
        let sets = sets(filter);
        let mut after = page.after;
        let mut items: Vec<Record> = Vec::new();
        for _ in 0..LOOK / STEP {
            let mut call = self.script(&LIST);
            call.arg(after.map(|seq| seq.to_string()).unwrap_or_default()).flag(page.newest_first);
            call.arg(STEP).arg(page.limit - items.len()).arg(sets.len());
            for set in &sets {
                call.arg(set);
            }
            for text in [&filter.topic, &filter.key, &filter.group] {
                call.optional(text.as_deref().map(str::as_bytes));
            }
            call.arg(filter.statuses.len());
            for status in &filter.statuses {
                call.arg(word(*status));
            }
            let mut answer = self.read(&call).await?;
            for item in answer.list()? {
                let mut item = Reader::from(item);
                items.push(record(item.number()?, item)?);
            }
            after = answer.optional_number()?.or(after);
            if !answer.flag()? {
                return Ok(Paged { items, next: None });
            }
            if items.len() >= page.limit {
                break;
            }
        }
        Ok(Paged { items, next: after })
    }

    async fn attempts(&self, id: MessageId) -> Result<Vec<Attempt>, Error> {
        let mut call = self.script(&ATTEMPTS);
        call.arg(id.to_string());
        self.read(&call).await?.map(|entry| attempt(&Reader::from(entry).text()?)).collect()
    }

    async fn unsent(&self, seqs: &[Seq]) -> Result<Vec<Seq>, Error> {
        let mut unsent = Vec::new();
        for some in seqs.chunks(ASKED) {
            let mut call = self.script(&UNSENT_OF);
            for seq in some {
                call.arg(seq);
            }
            unsent.extend(
                self.read(&call)
                    .await?
                    .map(|seq| Reader::from(seq).number())
                    .collect::<Result<Vec<_>, _>>()?,
            );
        }
        unsent.sort_unstable();
        Ok(unsent)
    }

    async fn identity(&self) -> Result<String, Error> {
        let identity: Option<String> = ::redis::cmd("HGET")
            .arg(format!("{}:settings", self.prefix))
            .arg("store_id")
            .query_async(&mut self.connection.clone())
            .await?;
        identity
            .ok_or_else(|| Error::Broken(format!("the settings of the store at {} are gone", self.prefix)))
    }

    async fn counts(&self) -> Result<Counts, Error> {
        let answer = self.read(&self.script(&COUNTS)).await?;
        counts(answer)
    }

    async fn holds(&self, limit: usize) -> Result<Vec<Hold>, Error> {
        self.list_holds(limit).await
    }

    async fn audit(&self, page: Page) -> Result<Paged<AuditEntry>, Error> {
        let entries = self.stream("audit", page).await?;
        let items: Vec<AuditEntry> = entries
            .into_iter()
            .map(|(position, mut fields)| {
                Ok(AuditEntry {
                    position,
                    at: time(fields.number("at")?),
                    actor: fields.text("actor")?,
                    action: fields.text("action")?,
                    message: fields.optional("message").and_then(|id| id.parse().ok()),
                    detail: fields.text("detail")?,
                })
            })
            .collect::<Result<_, Error>>()?;
        let next = items.last().filter(|_| items.len() == page.limit).map(|last| last.position);
        Ok(Paged { items, next })
    }
}

impl RedisStore {
    /// A page of a stream whose ids are positions.
    pub(super) async fn stream(&self, name: &str, page: Page) -> Result<Vec<(i64, Fields)>, Error> {
        let (command, open) = if page.newest_first { ("XREVRANGE", "+") } else { ("XRANGE", "-") };
        let close = if page.newest_first { "-" } else { "+" };
        let from = page.after.map_or_else(|| open.to_owned(), |position| format!("({position}-0"));
        let answer: Value = ::redis::cmd(command)
            .arg(format!("{}:{name}", self.prefix))
            .arg(from)
            .arg(close)
            .arg("COUNT")
            .arg(page.limit)
            .query_async(&mut self.connection.clone())
            .await?;
        Reader::from(answer)
            .map(|entry| {
                let mut entry = Reader::from(entry);
                let id = entry.text()?;
                let position = id.split('-').next().and_then(|number| number.parse().ok());
                Ok((position.ok_or_else(|| odd("a position"))?, entry.fields()?))
            })
            .collect()
    }
}

/// The narrowest sets of records that hold all that the filter may find.
fn sets(filter: &Filter) -> Vec<String> {
    if let Some(group) = &filter.unacknowledged_by {
        return vec![format!("unacked:{group}")];
    }
    let set = |status: &Status| match status {
        Status::Pending | Status::InFlight | Status::Failed => "unsent",
        Status::Sent => "sent",
        Status::Dead => "dead",
    };
    let wanted = if filter.statuses.is_empty() { &Status::ALL[..] } else { &filter.statuses };
    let mut sets: Vec<&str> = wanted.iter().map(set).collect();
    sets.sort_unstable();
    sets.dedup();
    sets.into_iter().map(str::to_owned).collect()
}

/// Reads a record after its number: its fields, until when it is in flight, its acknowledgements.
fn record(seq: i64, mut answer: Reader) -> Result<Record, Error> {
    let mut fields = answer.fields()?;
    let locked_until = answer.optional_number()?.map(time);
    let mut acknowledgements = Vec::new();
    let mut acks = answer.list()?;
    while !acks.is_empty() {
        acknowledgements.push(Acknowledgement { group: acks.text()?, at: time(acks.number()?) });
    }
    acknowledgements.sort_unstable_by(|one, other| one.group.cmp(&other.group));
    Ok(Record {
        seq,
        state: fields.state(locked_until.is_some())?,
        written_at: time(fields.number("written_at")?),
        next_attempt_at: fields.optional_time("next_attempt_at")?,
        locked_until,
        last_error: fields.optional("last_error"),
        sent_at: fields.optional_time("sent_at")?,
        dead_reason: fields.optional("dead_reason"),
        held: fields.optional("held").is_some(),
        ack_groups: fields.optional("ack_groups").as_deref().map(groups),
        acknowledgements,
        message: fields.message()?,
    })
}

/// Reads `at outcome error`.
fn attempt(entry: &str) -> Result<Attempt, Error> {
    let mut parts = entry.splitn(3, ' ');
    let mut part = || parts.next().ok_or_else(|| odd("an attempt"));
    Ok(Attempt {
        at: time(part()?.parse().map_err(|_| odd("an attempt"))?),
        outcome: part()?.to_owned(),
        error: part()?.to_owned(),
    })
}

fn counts(mut answer: Reader) -> Result<Counts, Error> {
    let (unsent, sent, dead) = (answer.total()?, answer.total()?, answer.total()?);
    let (in_flight, in_flight_failed) = (answer.total()?, answer.total()?);
    let oldest_age = answer.optional_number()?.map(|age| Duration::from_millis(age.unsigned_abs()));
    let mut totals = answer.fields()?;
    let mut total = |name: &str| Ok::<u64, Error>(u64::try_from(totals.number(name)?).unwrap_or(0));
    // Those in flight rest as failed or as pending.
    let failed = total("failed")?;
    Ok(Counts {
        pending: unsent.saturating_sub(failed).saturating_sub(in_flight - in_flight_failed),
        in_flight,
        failed: failed.saturating_sub(in_flight_failed),
        sent,
        dead,
        oldest_age,
        publish_success_total: total("publish_success_total")?,
        publish_failure_total: total("publish_failure_total")?,
        dead_total: total("dead_total")?,
        acknowledged_total: total("acknowledged_total")?,
        write_to_sent: latency(&mut totals, Wait::WriteToSent)?,
        sent_to_acknowledged: latency(&mut totals, Wait::SentToAcknowledged)?,
    })
}

fn latency(totals: &mut Fields, wait: Wait) -> Result<Latency, Error> {
    let name = wait.name();
    let number = |number: i64| u64::try_from(number).unwrap_or(0);
    let counts = (0..=Latency::BOUNDS.len())
        .map(|bucket| Ok(number(totals.number(&format!("{name}:{bucket}"))?)))
        .collect::<Result<_, Error>>()?;
    let sum = Duration::from_millis(number(totals.number(&format!("{name}:millis"))?));
    Ok(Latency { counts, sum })
}
