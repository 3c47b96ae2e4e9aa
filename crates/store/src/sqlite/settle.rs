//! Writing what became of a batch.

use std::time::Duration;

use message::{Event, Next, State, Status, step};
use rusqlite::{Connection, OptionalExtension, params};

use super::row::{groups, optional_text, state, text};
use super::{append, hold, tally};
use crate::column::{HISTORY, between, clip, groups_json, millis, word};
use crate::tally::{Tally, Wait};
use crate::{Error, Settlement, Verdict};

/// Settles one batch after another in one transaction.
pub(super) struct Settler<'a> {
    connection: &'a Connection,
    now: i64,
    holds: bool,
    tally: Tally,
}

/// What the table says of a message before it is settled.
struct Before {
    topic: String,
    key: Option<String>,
    written_at: i64,
    ack_groups: Option<Vec<String>>,
    state: State,
}

impl<'a> Settler<'a> {
    pub(super) fn new(connection: &'a Connection, now: i64) -> Result<Self, Error> {
        Ok(Self { connection, now, holds: hold::any(connection)?, tally: Tally::default() })
    }

    /// Writes the counters.
    pub(super) fn finish(self) -> Result<(), Error> {
        Ok(tally::write(self.tally, self.connection)?)
    }

    /// `false` when another relay owns the lane by now: then nothing is written.
    pub(super) fn settle(&mut self, settlement: &Settlement) -> Result<bool, Error> {
        let Settlement { batch, lease, verdicts, beside } = settlement;
        let seqs: Option<String> = self
            .connection
            .prepare_cached(
                "DELETE FROM outbox_batches WHERE lane = ?1 AND id = ?2 AND epoch = ?3 AND lease_id = ?4
                 AND EXISTS (SELECT 1 FROM outbox_lanes WHERE lane = ?1 AND epoch = ?3 AND lease_id = ?4)
                 RETURNING seqs",
            )?
            .query_row(params![lease.lane, batch.to_string(), lease.epoch, lease.id.to_string()], |row| {
                row.get(0)
            })
            .optional()?;
        let Some(seqs) = seqs else { return Ok(false) };
        let seqs: Vec<i64> = serde_json::from_str(&seqs).map_err(|error| Error::Broken(error.to_string()))?;
        if !seqs.iter().eq(verdicts.iter().map(|(seq, _)| seq)) {
            return Err(Error::Refused(format!(
                "batch {batch} has {} messages and the settlement does not name exactly these",
                seqs.len()
            )));
        }
        for (seq, verdict) in verdicts {
            self.message(*seq, verdict)?;
        }
        for message in beside {
            append::beside(self.connection, message)?;
        }
        Ok(true)
    }

    fn message(&mut self, seq: i64, verdict: &Verdict) -> Result<(), Error> {
        if matches!(verdict, Verdict::Released { error: None }) {
            return Ok(());
        }
        let before = self
            .connection
            .prepare_cached(
                "SELECT topic, key, written_at, ack_groups, status, attempts, crashes, delivery_epoch
                 FROM outbox_events WHERE seq = ?1",
            )?
            .query_row([seq], |row| {
                Ok(Before {
                    topic: text(row, 0)?,
                    key: optional_text(row, 1)?,
                    written_at: row.get(2)?,
                    ack_groups: groups(row, 3)?,
                    state: state(row, 4, true)?,
                })
            })
            .optional()?;
        // Somebody deleted the row by hand: there is nothing to write, and the rest of the batch goes on.
        let Some(before) = before else { return Ok(()) };
        match verdict {
            Verdict::Sent { ack_groups } => self.sent(seq, &before, ack_groups),
            Verdict::Failed { error, retry_after, hold } => {
                self.failed(seq, &before, error, *retry_after, *hold)
            }
            Verdict::Dead { reason, error, attempted, hold } => {
                self.dead(seq, &before, reason, error, *attempted, *hold)
            }
            Verdict::Postponed { wait } => self.postponed(seq, *wait),
            Verdict::Released { error } => self.released(seq, error.as_deref().unwrap_or_default()),
        }
    }

    /// What the transition function makes of a message, counted.
    fn step(&mut self, before: &Before, event: Event) -> Result<State, Error> {
        let Next::State(after) = step(before.state, event)? else {
            return Err(Error::Broken(format!("a message that is {} cannot vanish", event.name())));
        };
        self.tally.moved(before.state.rest, after.status);
        Ok(after)
    }

    fn sent(&mut self, seq: i64, before: &Before, ack_groups: &[String]) -> Result<(), Error> {
        let after = self.step(before, Event::Confirmed)?;
        let ack_groups = before.ack_groups.as_deref().unwrap_or(ack_groups);
        self.connection
            .prepare_cached(
                "UPDATE outbox_events SET status = ?2, ready = 0, sent_at = ?3, ack_groups = ?4 WHERE seq = ?1",
            )?
            .execute(params![seq, word(after.status), self.now, groups_json(ack_groups)])?;
        for group in ack_groups {
            // A consumer may be quicker than this settle: what it acknowledged must not be asked for again.
            self.connection
                .prepare_cached(
                    "INSERT INTO outbox_unacknowledged (grp, seq)
                     SELECT ?1, ?2 WHERE NOT EXISTS (SELECT 1 FROM outbox_acknowledgements WHERE seq = ?2 AND grp = ?1)
                     ON CONFLICT DO NOTHING",
                )?
                .execute(params![group, seq])?;
        }
        if self.holds {
            hold::stand(self.connection, seq)?;
            hold::lift(self.connection, seq)?;
        }
        self.tally.succeeded();
        self.tally.waited(Wait::WriteToSent, between(before.written_at, self.now));
        Ok(())
    }

    fn failed(
        &mut self,
        seq: i64,
        before: &Before,
        error: &str,
        retry_after: Duration,
        hold: bool,
    ) -> Result<(), Error> {
        // The relay has decided by its route's policy that another attempt is left.
        let after = self.step(before, Event::Failed { max_attempts: u32::MAX })?;
        self.connection
            .prepare_cached(
                "UPDATE outbox_events SET status = ?2, ready = 0, held = 0, attempts = ?3,
                        next_attempt_at = ?4, last_error = ?5 WHERE seq = ?1",
            )?
            .execute(params![
                seq,
                word(after.status),
                after.attempts,
                self.now.saturating_add(millis(retry_after)),
                clip(error)
            ])?;
        self.place(seq, before, hold)?;
        self.in_vain(seq, "failed", error)
    }

    fn dead(
        &mut self,
        seq: i64,
        before: &Before,
        reason: &str,
        error: &str,
        attempted: bool,
        hold: bool,
    ) -> Result<(), Error> {
        let after = self.step(before, if attempted { Event::Rejected } else { Event::GaveUp })?;
        debug_assert_eq!(after.status, Status::Dead);
        self.connection
            .prepare_cached(
                "UPDATE outbox_events SET status = ?2, ready = 0, held = 0, attempts = ?3,
                        next_attempt_at = NULL, last_error = ?4, dead_reason = ?5, dead_at = ?6 WHERE seq = ?1",
            )?
            .execute(params![seq, word(after.status), after.attempts, clip(error), reason, self.now])?;
        if hold && before.key.is_some() {
            self.place(seq, before, hold)?;
        } else if self.holds {
            hold::lift(self.connection, seq)?;
        }
        self.in_vain(seq, "dead", error)
    }

    fn postponed(&mut self, seq: i64, wait: Duration) -> Result<(), Error> {
        let due = self.now.saturating_add(millis(wait));
        self.connection
            .prepare_cached(
                "UPDATE outbox_events SET ready = 0, held = 0, next_attempt_at = ?2 WHERE seq = ?1",
            )?
            .execute(params![seq, due])?;
        if self.holds {
            hold::lift(self.connection, seq)?;
        }
        Ok(())
    }

    fn released(&mut self, seq: i64, error: &str) -> Result<(), Error> {
        self.connection
            .prepare_cached("UPDATE outbox_events SET last_error = ?2 WHERE seq = ?1")?
            .execute(params![seq, clip(error)])?;
        self.in_vain(seq, "released", error)
    }

    fn place(&mut self, seq: i64, before: &Before, hold: bool) -> Result<(), Error> {
        if let Some(key) = before.key.as_ref().filter(|_| hold) {
            hold::place(self.connection, &before.topic, key, seq)?;
            self.holds = true;
        }
        Ok(())
    }

    fn in_vain(&mut self, seq: i64, outcome: &str, error: &str) -> Result<(), Error> {
        self.tally.tried_in_vain();
        self.connection
            .prepare_cached("INSERT INTO outbox_attempts (seq, at, outcome, error) VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![seq, self.now, outcome, clip(error)])?;
        self.connection
            .prepare_cached(
                "DELETE FROM outbox_attempts WHERE position IN
                 (SELECT position FROM outbox_attempts WHERE seq = ?1 ORDER BY position DESC LIMIT -1 OFFSET ?2)",
            )?
            .execute(params![seq, HISTORY])?;
        Ok(())
    }
}
