//! Taking messages: settle the last batches and choose the next ones, in one transaction.
//!
//! The claim looks at each topic that has sendable rows by itself, so that a topic whose destination is down
//! costs one look however many of its messages wait, and hides nobody else's.

use std::collections::{HashMap, HashSet};

use async_trait::async_trait;
use message::{Event, Next, step};
use rusqlite::{Connection, OptionalExtension, params};
use uuid::Uuid;

use super::row::{MESSAGE_COLUMNS, groups, message, message_columns, now, state};
use super::settle::Settler;
use super::{SqliteStore, hold, lanes, tally};
use crate::column::{NO_HEADERS, between, word};
use crate::pick::{self, Pick, Picker};
use crate::tally::Tally;
use crate::{Batch, BatchId, Claim, ClaimOrder, Claimed, Error, Lease, Settlement, TopicRule, Turn};

/// Messages whose wait is over that are made sendable in one turn.
const DUE: usize = 1_000;

#[async_trait]
impl Claim for SqliteStore {
    async fn turn(&self, settlements: Vec<Settlement>, order: Option<ClaimOrder>) -> Result<Turn, Error> {
        if settlements.is_empty() {
            // Looking is cheap and needs no lock: an idle relay must not disturb the writers.
            let Some(order) = order.clone() else { return Ok(Turn::default()) };
            if let Some(idle) = self.file.read(move |connection| idle(connection, &order)).await? {
                return Ok(idle);
            }
        }
        let carries = settlements.iter().any(|settlement| !settlement.beside.is_empty());
        let turn = self
            .file
            .write(move |connection| {
                let now = now(connection)?;
                let mut settler = Settler::new(connection, now)?;
                let mut fenced: Vec<BatchId> = Vec::new();
                for settlement in &settlements {
                    if !settler.settle(settlement)? {
                        fenced.push(settlement.batch);
                    }
                }
                settler.finish()?;
                let turn =
                    order.map_or_else(|| Ok(Turn::default()), |order| claim(connection, now, &order))?;
                Ok(Turn { fenced, ..turn })
            })
            .await;
        if carries {
            self.ring();
        }
        // It happened, and nobody hears of it.
        fail::fail_point!("store::turned", |_| {
            let reason = "the answer was lost".to_owned();
            Err(Error::Unavailable { reason, retry_after: std::time::Duration::ZERO })
        });
        turn
    }

    async fn woken(&self) {
        self.bell.notified().await;
    }
}

/// The answer when there is nothing to take, or nothing when there may be.
fn idle(connection: &Connection, order: &ClaimOrder) -> Result<Option<Turn>, Error> {
    let draining: bool =
        connection.query_row("SELECT EXISTS (SELECT 1 FROM outbox_holds WHERE draining = 1)", [], |row| {
            row.get(0)
        })?;
    if draining {
        return Ok(None);
    }
    let topics = open_topics(connection, &*order.rule)?;
    if !topics.is_empty() {
        // Others' lanes may have a long backlog: it is stepped over here, where nobody waits for a lock.
        let one = ClaimOrder { limit: 1, ..order.clone() };
        if !Claimant::new(connection, now(connection)?, &one)?.candidates(&topics)?.is_empty() {
            return Ok(None);
        }
    }
    let next_due = next_due(connection)?;
    Ok(match next_due {
        Some(at) if at <= now(connection)? => None,
        Some(at) => Some(Turn { next_due: Some(between(now(connection)?, at)), ..Turn::default() }),
        None => Some(Turn::default()),
    })
}

fn next_due(connection: &Connection) -> Result<Option<i64>, Error> {
    Ok(connection
        .prepare_cached(
            "SELECT min(next_attempt_at) FROM outbox_events WHERE ready = 0 AND next_attempt_at IS NOT NULL",
        )?
        .query_row([], |row| row.get(0))?)
}

/// The topics that have sendable messages and whose rule lets some be taken. One index seek for each.
fn open_topics(
    connection: &Connection,
    rule: &dyn Fn(&str) -> TopicRule,
) -> Result<Vec<(String, TopicRule)>, Error> {
    let mut next = connection.prepare_cached(
        "SELECT topic FROM outbox_events INDEXED BY outbox_ready WHERE ready = 1 AND topic > ?1
         ORDER BY topic LIMIT 1",
    )?;
    let mut topics = Vec::new();
    let mut last = String::new();
    while let Some(topic) = next.query_row([&last], |row| row.get::<_, String>(0)).optional()? {
        let rule = rule(&topic);
        if rule.take > 0 {
            topics.push((topic.clone(), rule));
        }
        last = topic;
    }
    Ok(topics)
}

fn claim(connection: &Connection, now: i64, order: &ClaimOrder) -> Result<Turn, Error> {
    promote(connection, now)?;
    let draining = hold::drain_some(connection)?;
    let mut claimant = Claimant::new(connection, now, order)?;
    if claimant.lanes.is_empty() {
        return Ok(Turn::default());
    }
    let topics = open_topics(connection, &*order.rule)?;
    let candidates = claimant.candidates(&topics)?;
    let full = candidates.len() >= order.limit;
    let rules: HashMap<&str, TopicRule> =
        topics.iter().map(|(topic, rule)| (topic.as_str(), *rule)).collect();
    for candidate in candidates {
        if !claimant.pick(candidate, &rules)? {
            break;
        }
    }
    let more = full || draining || claimant.picker.left_some();
    let batches = claimant.open()?;
    let next_due = if batches.is_empty() { next_due(connection)?.map(|at| between(now, at)) } else { None };
    Ok(Turn { fenced: Vec::new(), batches, more, next_due })
}

/// Makes messages whose wait is over sendable, whichever lane they are on: it decides nothing yet.
fn promote(connection: &Connection, now: i64) -> Result<(), Error> {
    let due: Vec<i64> = connection
        .prepare_cached(
            "SELECT seq FROM outbox_events WHERE ready = 0 AND next_attempt_at IS NOT NULL AND next_attempt_at <= ?1
             ORDER BY next_attempt_at LIMIT ?2",
        )?
        .query_map(params![now, DUE], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    for seq in due {
        connection
            .prepare_cached("UPDATE outbox_events SET ready = 1, next_attempt_at = NULL WHERE seq = ?1")?
            .execute([seq])?;
    }
    Ok(())
}

/// The lanes that wait for an open batch.
fn waiting(connection: &Connection, order: &ClaimOrder) -> Result<HashSet<u16>, Error> {
    let mut lanes = HashSet::new();
    let mut statement = connection.prepare_cached("SELECT lane, topics FROM outbox_batches")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let topics: Vec<String> = serde_json::from_str(&row.get::<_, String>(1)?)
            .map_err(|error| Error::Broken(format!("a batch record cannot be read: {error}")))?;
        if pick::waits_for(order, &topics) {
            lanes.insert(row.get(0)?);
        }
    }
    Ok(lanes)
}

/// A message that may be claimed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    seq: i64,
    lane: u16,
    channel: usize,
}

/// One claim, inside its transaction.
struct Claimant<'a> {
    connection: &'a Connection,
    now: i64,
    order: &'a ClaimOrder,
    mask: u16,
    /// The leases that are valid and wait for no open batch.
    lanes: HashMap<u16, Lease>,
    picker: Picker,
    holds: bool,
    tally: Tally,
}

impl<'a> Claimant<'a> {
    fn new(connection: &'a Connection, now: i64, order: &'a ClaimOrder) -> Result<Self, Error> {
        let count = lanes::count(connection)?;
        let waiting = waiting(connection, order)?;
        let mut free = HashMap::new();
        for lease in &order.leases {
            let valid: bool = connection
                .prepare_cached(
                    "SELECT EXISTS (SELECT 1 FROM outbox_lanes WHERE lane = ?1 AND epoch = ?2 AND lease_id = ?3)",
                )?
                .query_row(params![lease.lane, lease.epoch, lease.id.to_string()], |row| row.get(0))?;
            if valid && lease.lane < count && !waiting.contains(&lease.lane) {
                free.insert(lease.lane, *lease);
            }
        }
        Ok(Self {
            connection,
            now,
            order,
            mask: count - 1,
            lanes: free,
            picker: Picker::new(order),
            holds: hold::any(connection)?,
            tally: Tally::default(),
        })
    }

    /// The first sendable messages of our lanes, by sequence number, over all topics.
    fn candidates(&self, topics: &[(String, TopicRule)]) -> Result<Vec<Candidate>, Error> {
        let mut found = Vec::new();
        for (topic, rule) in topics {
            let most = rule.take.min(self.order.limit);
            let mut taken = 0;
            let mut statement = self.connection.prepare_cached(
                "SELECT seq, slot FROM outbox_events INDEXED BY outbox_ready WHERE ready = 1 AND topic = ?1
                 ORDER BY seq",
            )?;
            let mut rows = statement.query([topic])?;
            while let Some(row) = rows.next()? {
                let lane = row.get::<_, u16>(1)? & self.mask;
                if self.lanes.contains_key(&lane) {
                    found.push(Candidate { seq: row.get(0)?, lane, channel: rule.channel });
                    taken += 1;
                    if taken == most {
                        break;
                    }
                }
            }
        }
        found.sort_unstable();
        found.truncate(self.order.limit);
        Ok(found)
    }

    /// Puts a message into its batch, or parks it. `false` when the batches are full.
    fn pick(&mut self, candidate: Candidate, rules: &HashMap<&str, TopicRule>) -> Result<bool, Error> {
        let Candidate { seq, lane, channel } = candidate;
        if self.picker.is_closed((lane, channel)) {
            return Ok(true);
        }
        let claimed = self.read(seq)?;
        let rule = rules.get(claimed.message.topic.as_str()).copied();
        let ordered = rule.is_some_and(|rule| rule.hold_failed);
        let held = match claimed.message.key.as_ref().filter(|_| ordered && self.holds) {
            Some(key) => hold::blocks(self.connection, &claimed.message.topic, key, seq)?,
            None => false,
        };
        match self.picker.offer((lane, channel), claimed, held) {
            Pick::Taken | Pick::Passed => {}
            Pick::Held => hold::park(self.connection, seq)?,
            Pick::Unreadable => self.quarantine(seq, rule.is_some_and(|rule| rule.hold_dead))?,
            Pick::Full => return Ok(false),
        }
        Ok(true)
    }

    /// A row that no broker could be given: given up as soon as it is met, so that it stops nobody.
    fn quarantine(&mut self, seq: i64, hold: bool) -> Result<(), Error> {
        let claimed = self.read(seq)?;
        let Next::State(after) = step(claimed.state, Event::GaveUp)? else {
            return Err(Error::Broken("a quarantined message cannot vanish".to_owned()));
        };
        self.tally.moved(claimed.state.rest, after.status);
        self.connection.execute(
            "UPDATE outbox_events SET status = ?2, ready = 0, dead_reason = ?3, dead_at = ?4 WHERE seq = ?1",
            params![seq, word(after.status), NO_HEADERS, self.now],
        )?;
        match claimed.message.key.as_ref().filter(|_| hold) {
            Some(key) => hold::place(self.connection, &claimed.message.topic, key, seq)?,
            None => hold::lift(self.connection, seq)?,
        }
        self.holds = hold::any(self.connection)?;
        Ok(())
    }

    fn read(&self, seq: i64) -> Result<Claimed, Error> {
        const EXTRA: usize = MESSAGE_COLUMNS;
        let mut claimed = self
            .connection
            .prepare_cached(concat!(
                "SELECT ",
                message_columns!(),
                ", ack_groups, written_at, status, attempts, crashes, delivery_epoch
                 FROM outbox_events WHERE seq = ?1"
            ))?
            .query_row([seq], |row| {
                Ok(Claimed {
                    seq,
                    message: message(row)?.into(),
                    ack_groups: groups(row, EXTRA)?,
                    age: between(row.get(EXTRA + 1)?, self.now),
                    state: state(row, EXTRA + 2, false)?,
                })
            })?;
        let Next::State(in_flight) = step(claimed.state, Event::Claim)? else {
            return Err(Error::Broken("a claimed message cannot vanish".to_owned()));
        };
        claimed.state = in_flight;
        Ok(claimed)
    }

    /// Writes the batch records.
    fn open(self) -> Result<Vec<Batch>, Error> {
        tally::write(self.tally, self.connection)?;
        let mut batches = Vec::new();
        for ((lane, channel), messages) in self.picker.batches() {
            let batch = Batch { id: Uuid::now_v7(), channel, lease: self.lanes[&lane], messages };
            let seqs: Vec<i64> = batch.messages.iter().map(|claimed| claimed.seq).collect();
            let failed =
                batch.messages.iter().filter(|claimed| claimed.state.rest == message::Status::Failed).count();
            self.connection
                .prepare_cached(
                    "INSERT INTO outbox_batches (lane, id, epoch, lease_id, topics, seqs, size, failed, claimed_at)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
                )?
                .execute(params![
                    lane,
                    batch.id.to_string(),
                    batch.lease.epoch,
                    batch.lease.id.to_string(),
                    serde_json::to_string(&pick::topics(&batch.messages)).expect("names are JSON"),
                    serde_json::to_string(&seqs).expect("numbers are JSON"),
                    seqs.len(),
                    failed,
                    self.now
                ])?;
            batches.push(batch);
        }
        Ok(batches)
    }
}
