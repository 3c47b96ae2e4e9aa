//! Writing what became of batches: the verdicts of a turn are gathered, and each kind is one statement.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use message::{Event, Next, State, step};
use mysql_async::prelude::Queryable;
use mysql_async::{Row, Value};
use serde_json::{Value as Json, json};

use super::error::Trouble;
use super::hold::{Holds, Written};
use super::lane::{self, Place, Standing};
use super::row::{Read, at, at_text, list};
use super::session::Tx;
use crate::column::{HISTORY, between, clip, groups_json, millis, word};
use crate::tally::{Tally, Wait};
use crate::{BatchId, Error, NewMessage, Sent, Settlement, Verdict};

/// Messages of which a statement tells what went wrong: with their errors they must fit into a packet.
const TOLD_AT_ONCE: usize = 250;

/// What the table says of a message before it is settled.
#[derive(Debug)]
pub(super) struct Before {
    pub(super) topic: String,
    pub(super) key: Option<String>,
    pub(super) slot: u16,
    pub(super) state: State,
    written_at: i64,
    ack_groups: Option<Vec<String>>,
}

impl Before {
    /// What the transition function makes of the message, counted.
    pub(super) fn step(&self, event: Event, tally: &mut Tally) -> Result<State, Error> {
        let Next::State(after) = step(self.state, event)? else {
            return Err(Error::Broken(format!("a message that is {} cannot vanish", event.name())));
        };
        tally.moved(self.state.rest, after.status);
        Ok(after)
    }
}

/// Reads messages in flight. Somebody may have deleted one by hand: it is missing then, and the others go on.
pub(super) async fn befores(tx: &mut Tx<'_>, seqs: &[i64]) -> Result<HashMap<i64, Before>, Trouble> {
    let mut befores = HashMap::with_capacity(seqs.len());
    if seqs.is_empty() {
        return Ok(befores);
    }
    let sql = format!(
        "SELECT seq, topic, `key`, slot, written_at, ack_groups, status, attempts, crashes, delivery_epoch
         FROM outbox_events FORCE INDEX (PRIMARY) WHERE seq IN ({})",
        list(seqs)
    );
    for mut row in tx.query::<Row, _>(sql).await? {
        let before = Before {
            topic: row.text(1)?,
            key: row.optional_text(2)?,
            slot: row.small(3)?,
            written_at: row.millis(4)?,
            ack_groups: row.groups(5)?,
            state: row.state(6, true)?,
        };
        befores.insert(row.number(0)?, before);
    }
    Ok(befores)
}

/// What a turn writes of the messages that it settles, by kind.
#[derive(Default)]
struct Rows {
    /// With those who must acknowledge them.
    sent: Vec<(i64, String)>,
    asked: Vec<(i64, Vec<String>)>,
    /// Failed or Dead.
    troubled: Vec<Json>,
    released: Vec<Json>,
    history: Vec<Json>,
    tried: BTreeSet<i64>,
}

/// The settlements of one turn, as they are gathered.
struct Settler<'a> {
    now: i64,
    keep: bool,
    holds: Holds,
    rows: Rows,
    tally: &'a mut Tally,
}

/// Settlements that may be written.
#[derive(Default)]
pub(super) struct Accepted<'a> {
    batches: Vec<(u16, String)>,
    verdicts: Vec<(i64, &'a Verdict)>,
    beside: Vec<NewMessage>,
}

impl<'a> Accepted<'a> {
    /// Takes the batches of `settlements` out of `standings`. Answers also those that come too late.
    pub(super) fn new(
        settlements: &'a [Settlement],
        standings: &mut HashMap<u16, Standing>,
    ) -> Result<(Self, Vec<BatchId>), Error> {
        let mut accepted = Self::default();
        let mut fenced = Vec::new();
        for Settlement { batch, lease, verdicts, beside } in settlements {
            let standing = standings.get_mut(&lease.lane);
            let Some(open) = standing.and_then(|standing| standing.close(&batch.to_string(), lease)) else {
                fenced.push(*batch);
                continue;
            };
            if !open.seqs.iter().eq(verdicts.iter().map(|(seq, _)| seq)) {
                return Err(Error::Refused(format!(
                    "batch {batch} has {} messages and the settlement does not name exactly these",
                    open.seqs.len()
                )));
            }
            accepted.batches.push((lease.lane, open.id));
            accepted.verdicts.extend(verdicts.iter().map(|(seq, verdict)| (*seq, verdict)));
            accepted.beside.extend(beside.iter().cloned().map(NewMessage::from));
        }
        Ok((accepted, fenced))
    }

    /// What they carry.
    pub(super) fn take_beside(&mut self) -> Vec<NewMessage> {
        std::mem::take(&mut self.beside)
    }

    /// Messages that are sendable until this is written, and then no more.
    pub(super) fn leaving(&self) -> HashSet<i64> {
        let stays = |verdict: &Verdict| matches!(verdict, Verdict::Released { .. });
        self.verdicts.iter().filter(|(_, verdict)| !stays(verdict)).map(|(seq, _)| *seq).collect()
    }

    /// Writes them. Answers what became of holds.
    pub(super) async fn write(
        mut self,
        tx: &mut Tx<'_>,
        place: &Place,
        sent: Sent,
        tally: &mut Tally,
    ) -> Result<Written, Trouble> {
        lane::close(tx, &self.batches).await?;
        self.verdicts.retain(|(_, verdict)| !matches!(verdict, Verdict::Released { error: None }));
        let seqs: Vec<i64> = self.verdicts.iter().map(|(seq, _)| *seq).collect();
        let befores = befores(tx, &seqs).await?;
        let keep = sent != Sent::Delete;
        let mut settler =
            Settler { now: place.now, keep, holds: Holds::default(), rows: Rows::default(), tally };
        if place.holds || self.verdicts.iter().any(|(_, verdict)| holds(verdict)) {
            let keys =
                befores.values().filter_map(|before| Some((before.topic.as_str(), before.key.as_deref()?)));
            settler.holds.load(tx, keys).await?;
        }
        for (seq, verdict) in self.verdicts {
            if let Some(before) = befores.get(&seq) {
                settler.message(seq, before, verdict)?;
            }
        }
        settler.write(tx).await
    }
}

/// Whether later messages of its key wait for it from now on.
fn holds(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Failed { hold: true, .. } | Verdict::Dead { hold: true, .. })
}

impl Settler<'_> {
    fn message(&mut self, seq: i64, before: &Before, verdict: &Verdict) -> Result<(), Error> {
        match verdict {
            Verdict::Sent { ack_groups } => self.sent(seq, before, ack_groups),
            Verdict::Failed { error, retry_after, hold } => {
                self.failed(seq, before, error, *retry_after, *hold)
            }
            Verdict::Dead { reason, error, attempted, hold } => {
                let event = if *attempted { Event::Rejected } else { Event::GaveUp };
                let after = before.step(event, self.tally)?;
                let died = at_text(self.now);
                self.rows.troubled.push(json!([
                    seq,
                    word(after.status),
                    after.attempts,
                    null,
                    clip(error),
                    reason,
                    died
                ]));
                self.holds.stand(seq);
                match before.key.as_deref().filter(|_| *hold) {
                    Some(key) => self.holds.place(&before.topic, key, before.slot, seq),
                    None => self.holds.lift(&before.topic, before.key.as_deref(), seq),
                }
                self.in_vain(seq, "dead", error);
                Ok(())
            }
            Verdict::Postponed { wait } => {
                let after = before.step(Event::Released, self.tally)?;
                let due = at_text(self.now.saturating_add(millis(*wait)));
                let (status, attempts) = (word(after.status), after.attempts);
                self.rows.troubled.push(json!([seq, status, attempts, due, null, null, null]));
                self.holds.stand(seq);
                self.holds.lift(&before.topic, before.key.as_deref(), seq);
                Ok(())
            }
            Verdict::Released { error } => {
                let error = error.as_deref().unwrap_or_default();
                self.rows.released.push(json!([seq, clip(error)]));
                self.in_vain(seq, "released", error);
                Ok(())
            }
        }
    }

    fn sent(&mut self, seq: i64, before: &Before, ack_groups: &[String]) -> Result<(), Error> {
        let after = before.step(Event::Confirmed, self.tally)?;
        debug_assert_eq!(after.status, message::Status::Sent);
        let groups = before.ack_groups.as_deref().unwrap_or(ack_groups);
        self.rows.sent.push((seq, groups_json(groups)));
        if !groups.is_empty() {
            self.rows.asked.push((seq, groups.to_vec()));
        }
        self.holds.stand(seq);
        self.holds.lift(&before.topic, before.key.as_deref(), seq);
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
        let after = before.step(Event::Failed { max_attempts: u32::MAX }, self.tally)?;
        let due = at_text(self.now.saturating_add(millis(retry_after)));
        let (status, attempts) = (word(after.status), after.attempts);
        self.rows.troubled.push(json!([seq, status, attempts, due, clip(error), null, null]));
        self.holds.stand(seq);
        if let Some(key) = before.key.as_deref().filter(|_| hold) {
            self.holds.place(&before.topic, key, before.slot, seq);
        }
        self.in_vain(seq, "failed", error);
        Ok(())
    }

    fn in_vain(&mut self, seq: i64, outcome: &str, error: &str) {
        self.tally.tried_in_vain();
        self.rows.history.push(json!([seq, outcome, clip(error)]));
        self.rows.tried.insert(seq);
    }

    async fn write(self, tx: &mut Tx<'_>) -> Result<Written, Trouble> {
        let Self { now, keep, holds, rows, tally } = self;
        let waiting = unacknowledged(tx, &rows.asked).await?;
        let (stay, go): (Vec<_>, Vec<_>) =
            rows.sent.into_iter().partition(|(seq, _)| keep || waiting.contains_key(seq));
        if !stay.is_empty() {
            tx.exec_drop(include_str!("settle/sent.sql"), (json!(stay).to_string(), at(now))).await?;
        }
        ask(tx, &waiting).await?;
        if !go.is_empty() {
            let gone: Vec<i64> = go.into_iter().map(|(seq, _)| seq).collect();
            tally.sent -= i64::try_from(gone.len()).unwrap_or(i64::MAX);
            remove(tx, &gone).await?;
        }
        for (sql, rows) in [
            (include_str!("settle/troubled.sql"), rows.troubled),
            (include_str!("settle/released.sql"), rows.released),
        ] {
            for some in rows.chunks(TOLD_AT_ONCE) {
                tx.exec_drop(sql, (Json::from(some).to_string(),)).await?;
            }
        }
        history(tx, now, rows.history, &rows.tried).await?;
        holds.write(tx).await
    }
}

/// Of the groups that must acknowledge, those that have not. A consumer may be quicker than this settlement: what it
/// acknowledged must not be asked for again.
async fn unacknowledged(
    tx: &mut Tx<'_>,
    asked: &[(i64, Vec<String>)],
) -> Result<BTreeMap<i64, BTreeSet<String>>, Trouble> {
    let mut waiting: BTreeMap<i64, BTreeSet<String>> =
        asked.iter().map(|(seq, groups)| (*seq, groups.iter().cloned().collect())).collect();
    if waiting.is_empty() {
        return Ok(waiting);
    }
    let sql = format!("SELECT seq, grp FROM outbox_acknowledgements WHERE seq IN ({})", list(waiting.keys()));
    for mut row in tx.query::<Row, _>(sql).await? {
        let (seq, group) = (row.number(0)?, row.text(1)?);
        if let Some(groups) = waiting.get_mut(&seq) {
            groups.remove(&group);
        }
    }
    waiting.retain(|_, groups| !groups.is_empty());
    Ok(waiting)
}

async fn ask(tx: &mut Tx<'_>, waiting: &BTreeMap<i64, BTreeSet<String>>) -> Result<(), Trouble> {
    let pairs: Vec<Json> = waiting
        .iter()
        .flat_map(|(seq, groups)| groups.iter().map(move |group| json!([group, seq])))
        .collect();
    if !pairs.is_empty() {
        tx.exec_drop(include_str!("settle/ask.sql"), (Json::from(pairs).to_string(),)).await?;
    }
    Ok(())
}

/// Removes records, and what hangs on them.
pub(super) async fn remove(tx: &mut Tx<'_>, seqs: &[i64]) -> Result<u64, Trouble> {
    let seqs = list(seqs);
    tx.query_drop(format!("DELETE e FROM outbox_events e FORCE INDEX (PRIMARY) WHERE e.seq IN ({seqs})"))
        .await?;
    let removed = tx.affected_rows();
    tx.query_drop(format!(
        "DELETE a FROM outbox_attempts a FORCE INDEX (outbox_attempts_seq) WHERE a.seq IN ({seqs})"
    ))
    .await?;
    tx.query_drop(format!(
        "DELETE a FROM outbox_acknowledgements a FORCE INDEX (PRIMARY) WHERE a.seq IN ({seqs})"
    ))
    .await?;
    Ok(removed)
}

/// Adds to the history of tries in vain, and cuts off what is too old of it.
async fn history(tx: &mut Tx<'_>, now: i64, rows: Vec<Json>, seqs: &BTreeSet<i64>) -> Result<(), Trouble> {
    if rows.is_empty() {
        return Ok(());
    }
    for some in rows.chunks(TOLD_AT_ONCE) {
        let values: (Value, String) = (at(now), Json::from(some).to_string());
        tx.exec_drop(include_str!("settle/history.sql"), values).await?;
    }
    tx.query_drop(format!(
        "DELETE a FROM (SELECT position FROM (
             SELECT position, row_number() OVER (PARTITION BY seq ORDER BY position DESC) AS age
             FROM outbox_attempts FORCE INDEX (outbox_attempts_seq) WHERE seq IN ({})) x WHERE age > {HISTORY}) old
         STRAIGHT_JOIN outbox_attempts a FORCE INDEX (PRIMARY) ON a.position = old.position",
        list(seqs)
    ))
    .await?;
    Ok(())
}
