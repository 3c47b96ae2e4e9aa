//! Writing what became of batches: worked out message by message, written set by set.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use message::{Event, Next, State, Status, step};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::connection::Transaction;
use super::error::{Trouble, cause};
use super::hold::Book;
use super::row::{after, between, count, groups, state};
use super::tally;
use crate::column::{HISTORY, clip, crashes_relays, groups_json, word};
use crate::tally::{Tally, Wait};
use crate::{Error, Sent, TopicRule, Verdict};

/// What [`Changes::read`] reads of the messages `$1`, and of the holds of their keys.
pub(super) const BEFORE: &str =
    "SELECT e.seq, e.topic, e.key, e.written_at, e.ack_groups::text, e.status, e.attempts, e.crashes, e.delivery_epoch,
            h.seq, h.draining, e.last_error
     FROM outbox_events e LEFT JOIN outbox_holds h ON h.topic = e.topic AND h.key = e.key
     WHERE e.seq = ANY ($1)";

/// What the table says of a message in flight before it is settled.
#[derive(Debug)]
struct Before {
    topic: String,
    key: Option<String>,
    written_at: DateTime<Utc>,
    ack_groups: Option<Vec<String>>,
    state: State,
    last_error: Option<String>,
}

/// A message that the broker has.
#[derive(Debug)]
struct Confirmed {
    seq: i64,
    /// Who must acknowledge it.
    groups: Vec<String>,
    /// What it was before it was in flight.
    rest: Status,
}

/// How a record that is not sent is written.
#[derive(Debug)]
struct After {
    seq: i64,
    state: State,
    ready: bool,
    next_attempt_at: Option<DateTime<Utc>>,
    last_error: Option<String>,
    dead_reason: Option<String>,
}

/// What a transaction writes of messages that were in flight.
#[derive(Debug)]
pub(super) struct Changes {
    now: DateTime<Utc>,
    before: HashMap<i64, Before>,
    sent: Vec<Confirmed>,
    others: Vec<After>,
    /// Tries in vain: which message, what became of it, and why.
    attempts: Vec<(i64, &'static str, String)>,
    book: Book,
    tally: Tally,
}

impl Changes {
    pub(super) fn new(now: DateTime<Utc>) -> Self {
        Self {
            now,
            before: HashMap::new(),
            sent: Vec::new(),
            others: Vec::new(),
            attempts: Vec::new(),
            book: Book::default(),
            tally: Tally::default(),
        }
    }

    /// Notes what [`BEFORE`] found.
    pub(super) fn read(&mut self, rows: &[Row]) -> Result<(), Trouble> {
        for row in rows {
            let before = Before {
                topic: row.try_get(1)?,
                key: row.try_get(2)?,
                written_at: row.try_get(3)?,
                ack_groups: groups(row, 4)?,
                state: state(row, 5, true)?,
                last_error: row.try_get(11)?,
            };
            self.book.note(&before.topic, before.key.as_deref(), row, 9)?;
            self.before.insert(row.try_get(0)?, before);
        }
        Ok(())
    }

    /// What the relay says of a message.
    pub(super) fn settle(&mut self, seq: i64, verdict: &Verdict) -> Result<(), Trouble> {
        // Somebody may have deleted the row by hand: there is nothing to write, and the rest of the batch goes on.
        let Some(before) = self.before.remove(&seq) else { return Ok(()) };
        match verdict {
            Verdict::Sent { ack_groups } => self.confirm(seq, before, ack_groups),
            Verdict::Failed { error, retry_after, hold } => {
                // The relay has decided by its route's policy that another attempt is left.
                let state = self.step(&before, Event::Failed { max_attempts: u32::MAX })?;
                self.others.push(After {
                    seq,
                    state,
                    ready: false,
                    next_attempt_at: Some(after(self.now, *retry_after)),
                    last_error: Some(clip(error).to_owned()),
                    dead_reason: None,
                });
                if let Some(key) = before.key.as_deref().filter(|_| *hold) {
                    self.book.place(&before.topic, key, seq);
                }
                self.in_vain(seq, "failed", error);
                Ok(())
            }
            Verdict::Dead { reason, error, attempted, hold } => {
                let event = if *attempted { Event::Rejected } else { Event::GaveUp };
                let state = self.step(&before, event)?;
                self.bury(seq, before, state, reason.clone(), Some(error), *hold);
                self.in_vain(seq, "dead", error);
                Ok(())
            }
            Verdict::Postponed { wait } => {
                let state = self.step(&before, Event::Released)?;
                self.book.lift(&before.topic, before.key.as_deref(), seq);
                self.others.push(After {
                    seq,
                    state,
                    ready: false,
                    next_attempt_at: Some(after(self.now, *wait)),
                    last_error: before.last_error,
                    dead_reason: None,
                });
                Ok(())
            }
            Verdict::Released { error: None } => Ok(()),
            Verdict::Released { error: Some(error) } => {
                let state = self.step(&before, Event::Released)?;
                self.others.push(After {
                    seq,
                    state,
                    ready: true,
                    next_attempt_at: None,
                    last_error: Some(clip(error).to_owned()),
                    dead_reason: None,
                });
                self.in_vain(seq, "released", error);
                Ok(())
            }
        }
    }

    /// The relay that held it is gone. Answers whether it is Dead now.
    pub(super) fn orphan(&mut self, seq: i64, rule: &dyn Fn(&str) -> TopicRule) -> Result<bool, Trouble> {
        let Some(before) = self.before.remove(&seq) else { return Ok(false) };
        let state = self.step(&before, Event::Orphaned)?;
        if state.status == Status::Dead {
            let hold = rule(&before.topic).hold_dead;
            self.bury(seq, before, state, crashes_relays(state.crashes), None, hold);
            return Ok(true);
        }
        let last_error = before.last_error;
        self.others.push(After {
            seq,
            state,
            ready: true,
            next_attempt_at: None,
            last_error,
            dead_reason: None,
        });
        Ok(false)
    }

    /// No broker could be given it: it is given up as soon as it is met, so that it stops nobody.
    pub(super) fn quarantine(&mut self, seq: i64, reason: &str, hold: bool) -> Result<(), Trouble> {
        let Some(before) = self.before.remove(&seq) else { return Ok(()) };
        let state = self.step(&before, Event::GaveUp)?;
        self.bury(seq, before, state, reason.to_owned(), None, hold);
        Ok(())
    }

    /// What the transition function makes of a message, counted.
    fn step(&mut self, before: &Before, event: Event) -> Result<State, Trouble> {
        let Next::State(after) = step(before.state, event)? else {
            return Err(Error::Broken(format!("a message that is {} cannot vanish", event.name())).into());
        };
        self.tally.moved(before.state.rest, after.status);
        Ok(after)
    }

    fn confirm(&mut self, seq: i64, before: Before, ack_groups: &[String]) -> Result<(), Trouble> {
        self.step(&before, Event::Confirmed)?;
        self.book.lift(&before.topic, before.key.as_deref(), seq);
        self.tally.succeeded();
        self.tally.waited(Wait::WriteToSent, between(before.written_at, self.now));
        let groups = before.ack_groups.unwrap_or_else(|| ack_groups.to_vec());
        self.sent.push(Confirmed { seq, groups, rest: before.state.rest });
        Ok(())
    }

    fn bury(
        &mut self,
        seq: i64,
        before: Before,
        state: State,
        reason: String,
        error: Option<&str>,
        hold: bool,
    ) {
        match before.key.as_deref().filter(|_| hold) {
            Some(key) => self.book.place(&before.topic, key, seq),
            None => self.book.lift(&before.topic, before.key.as_deref(), seq),
        }
        let last_error = error.map(|error| clip(error).to_owned()).or(before.last_error);
        let dead_reason = Some(reason);
        self.others.push(After { seq, state, ready: false, next_attempt_at: None, last_error, dead_reason });
    }

    fn in_vain(&mut self, seq: i64, outcome: &'static str, error: &str) {
        self.tally.tried_in_vain();
        self.attempts.push((seq, outcome, clip(error).to_owned()));
    }

    /// Writes all of it. Answers whether followers of a key are to be let go.
    pub(super) async fn write(mut self, tx: &Transaction, keep: Sent) -> Result<bool, Trouble> {
        let (gone, kept): (Vec<&Confirmed>, Vec<&Confirmed>) =
            self.sent.iter().partition(|one| keep == Sent::Delete && one.groups.is_empty());
        for one in &gone {
            // Deleting counts by what the table says, where they never were sent.
            self.tally.moved(Status::Sent, one.rest);
        }
        // Each sends its first statement when it is first polled, in this order: usually that is all, and one trip.
        let (gone, sent, others, attempts, draining, counted) = tokio::join!(
            biased;
            delete_sent(tx, &gone),
            write_sent(tx, self.now, &kept),
            write_others(tx, self.now, &self.others),
            write_attempts(tx, self.now, &self.attempts),
            self.book.write(tx),
            tally::write(tx, self.tally),
        );
        let (draining, held) = match draining {
            Ok(draining) => (draining, Ok(())),
            Err(trouble) => (false, Err(trouble)),
        };
        cause([gone, sent, others, attempts, held, counted])?;
        Ok(draining)
    }
}

/// Deletes messages that nobody wants to see any more.
async fn delete_sent(tx: &Transaction, gone: &[&Confirmed]) -> Result<(), Trouble> {
    if !gone.is_empty() {
        let seqs: Vec<i64> = gone.iter().map(|one| one.seq).collect();
        tx.execute("DELETE FROM outbox_events WHERE seq = ANY ($1)", &[(&seqs, Type::INT8_ARRAY)]).await?;
    }
    Ok(())
}

/// Marks messages as sent.
async fn write_sent(tx: &Transaction, now: DateTime<Utc>, kept: &[&Confirmed]) -> Result<(), Trouble> {
    if kept.is_empty() {
        return Ok(());
    }
    let seqs: Vec<i64> = kept.iter().map(|one| one.seq).collect();
    let lists: Vec<String> = kept.iter().map(|one| groups_json(&one.groups)).collect();
    tx.execute(
        "UPDATE outbox_events e SET status = 'sent', ready = false, held = false, sent_at = $3, ack_groups = s.groups::jsonb
         FROM unnest($1::bigint[], $2::text[]) AS s(seq, groups) WHERE e.seq = s.seq",
        &[(&seqs, Type::INT8_ARRAY), (&lists, Type::TEXT_ARRAY), (&now, Type::TIMESTAMPTZ)],
    )
    .await?;
    let asked = kept.iter().flat_map(|one| one.groups.iter().map(|group| (group.as_str(), one.seq)));
    let (groups, seqs): (Vec<&str>, Vec<i64>) = asked.unzip();
    if !groups.is_empty() {
        // A consumer may be quicker than this settle: what it acknowledged must not be asked for again. One that is
        // at it waits for the update above, or this statement waited there for it and sees what it did.
        tx.execute(
            "INSERT INTO outbox_unacknowledged (grp, seq)
             SELECT u.grp, u.seq FROM unnest($1::text[], $2::bigint[]) AS u(grp, seq)
             WHERE NOT EXISTS (SELECT 1 FROM outbox_acknowledgements a WHERE a.seq = u.seq AND a.grp = u.grp)
             ON CONFLICT DO NOTHING",
            &[(&groups, Type::TEXT_ARRAY), (&seqs, Type::INT8_ARRAY)],
        )
        .await?;
    }
    Ok(())
}

async fn write_others(tx: &Transaction, now: DateTime<Utc>, others: &[After]) -> Result<(), Trouble> {
    if others.is_empty() {
        return Ok(());
    }
    let seqs: Vec<i64> = others.iter().map(|after| after.seq).collect();
    let statuses: Vec<&str> = others.iter().map(|after| word(after.state.status)).collect();
    let ready: Vec<bool> = others.iter().map(|after| after.ready).collect();
    let attempts: Vec<i32> = others.iter().map(|after| count(after.state.attempts)).collect();
    let crashes: Vec<i32> = others.iter().map(|after| count(after.state.crashes)).collect();
    let due: Vec<Option<DateTime<Utc>>> = others.iter().map(|after| after.next_attempt_at).collect();
    let errors: Vec<Option<&str>> = others.iter().map(|after| after.last_error.as_deref()).collect();
    let reasons: Vec<Option<&str>> = others.iter().map(|after| after.dead_reason.as_deref()).collect();
    tx.execute(
        include_str!("settle.sql"),
        &[
            (&seqs, Type::INT8_ARRAY),
            (&statuses, Type::TEXT_ARRAY),
            (&ready, Type::BOOL_ARRAY),
            (&attempts, Type::INT4_ARRAY),
            (&crashes, Type::INT4_ARRAY),
            (&due, Type::TIMESTAMPTZ_ARRAY),
            (&errors, Type::TEXT_ARRAY),
            (&reasons, Type::TEXT_ARRAY),
            (&now, Type::TIMESTAMPTZ),
        ],
    )
    .await?;
    Ok(())
}

async fn write_attempts(
    tx: &Transaction,
    now: DateTime<Utc>,
    attempts: &[(i64, &'static str, String)],
) -> Result<(), Trouble> {
    if attempts.is_empty() {
        return Ok(());
    }
    let seqs: Vec<i64> = attempts.iter().map(|attempt| attempt.0).collect();
    let outcomes: Vec<&str> = attempts.iter().map(|attempt| attempt.1).collect();
    let errors: Vec<&str> = attempts.iter().map(|attempt| attempt.2.as_str()).collect();
    tx.execute(
        "INSERT INTO outbox_attempts (seq, at, outcome, error)
         SELECT a.seq, $4, a.outcome, a.error FROM unnest($1::bigint[], $2::text[], $3::text[]) AS a(seq, outcome, error)",
        &[
            (&seqs, Type::INT8_ARRAY),
            (&outcomes, Type::TEXT_ARRAY),
            (&errors, Type::TEXT_ARRAY),
            (&now, Type::TIMESTAMPTZ),
        ],
    )
    .await?;
    tx.execute(
        "DELETE FROM outbox_attempts a USING unnest($1::bigint[]) AS m(seq)
         WHERE a.seq = m.seq AND a.position <=
               (SELECT position FROM outbox_attempts WHERE seq = m.seq ORDER BY position DESC OFFSET $2 LIMIT 1)",
        &[(&seqs, Type::INT8_ARRAY), (&HISTORY, Type::INT8)],
    )
    .await?;
    Ok(())
}
