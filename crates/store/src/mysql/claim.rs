//! Taking messages: settle the last batches and choose the next ones, in one transaction.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use message::{Event, Next, Status, step};
use mysql_async::Row;
use mysql_async::prelude::Queryable;
use serde_json::Value as Json;
use uuid::Uuid;

use super::candidate::{Candidate, Found, Search, quoted};
use super::error::Trouble;
use super::hold::{self, Holds};
use super::lane::{self, Place, Standing};
use super::row::{MESSAGE_COLUMNS, Read, at, at_text, list, message_columns};
use super::session::{Tx, commit};
use super::settle::Accepted;
use super::{MysqlStore, tally};
use crate::column::{NO_HEADERS, between, word};
use crate::pick::{self, Pick, Picker};
use crate::tally::Tally;
use crate::{Batch, Claim, ClaimOrder, Claimed, Error, Lease, Settlement, TopicRule, Turn};

/// Messages whose wait is over that are made sendable in one turn.
const DUE: usize = 1_000;

/// How large messages have been: as many are read together as probably fit into a batch.
#[derive(Debug)]
pub(super) struct Weight(AtomicUsize);

impl Default for Weight {
    fn default() -> Self {
        Self(AtomicUsize::new(4 << 10))
    }
}

impl Weight {
    /// Messages to read for a batch of so many bytes.
    fn fitting(&self, bytes: usize) -> usize {
        (bytes.saturating_mul(2) / self.0.load(Ordering::Relaxed).max(1)).clamp(16, 10_000)
    }

    fn learn(&self, messages: &[Claimed]) {
        if let Some(mean) =
            messages.iter().map(|claimed| claimed.message.size()).sum::<usize>().checked_div(messages.len())
        {
            let old = self.0.load(Ordering::Relaxed);
            self.0.store((old * 3 + mean.max(64)) / 4, Ordering::Relaxed);
        }
    }
}

#[async_trait]
impl Claim for MysqlStore {
    async fn turn(&self, settlements: Vec<Settlement>, order: Option<ClaimOrder>) -> Result<Turn, Error> {
        let order = order.filter(|order| !order.leases.is_empty());
        if settlements.is_empty() && order.is_none() {
            return Ok(Turn::default());
        }
        let asked = Arc::new((settlements, order));
        let turn = self
            .run(move |store| {
                let asked = Arc::clone(&asked);
                async move {
                    let (settlements, order) = &*asked;
                    if let Some(order) = order.as_ref().filter(|_| settlements.is_empty())
                        && let Some(idle) = store.idle(order).await?
                    {
                        return Ok(idle);
                    }
                    store.take_turn(settlements, order.as_ref()).await
                }
            })
            .await;
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

impl MysqlStore {
    /// The answer when there is nothing to take, or nothing when there may be. Looking takes no lock: an idle relay
    /// must not disturb the writers.
    async fn idle(&self, order: &ClaimOrder) -> Result<Option<Turn>, Trouble> {
        let mut connection = self.connection().await?;
        let lanes: BTreeSet<u16> = order.leases.iter().map(|lease| lease.lane).collect();
        let place = lane::look(&mut connection, lanes).await?;
        if place.draining {
            return Ok(None);
        }
        let topics = self.topics.open(&mut connection, &*order.rule).await?;
        let leaving = &HashSet::new();
        let search = Search { topics: &topics, lanes: place.lanes(), mask: place.mask(), limit: 1, leaving };
        if !search.run(&mut connection).await?.candidates.is_empty() {
            return Ok(None);
        }
        Ok(match next_due(&mut connection, &place).await? {
            Some(due) if due <= place.now => None,
            Some(due) => Some(Turn { next_due: Some(between(place.now, due)), ..Turn::default() }),
            None => Some(Turn::default()),
        })
    }

    /// Finds before it settles: what a settle takes out of the claim index is only marked there, and every look at it
    /// in the same transaction would step over those marks one by one.
    async fn take_turn(
        &self,
        settlements: &[Settlement],
        order: Option<&ClaimOrder>,
    ) -> Result<Turn, Trouble> {
        let mut tx = self.begin().await?;
        let leases = settlements.iter().map(|settlement| settlement.lease);
        let leases = leases.chain(order.iter().flat_map(|order| order.leases.iter().copied()));
        let mut place = lane::lock(&mut tx, leases.map(|lease| lease.lane)).await?;
        let mut standings = lane::standings(&mut tx, place.lanes()).await?;
        let (mut accepted, fenced) = Accepted::new(settlements, &mut standings)?;
        let beside = accepted.take_beside();
        let mut moved = Tally::default();
        let mut hunt = match order {
            None => None,
            Some(order) => Some(self.hunt(&mut tx, &place, &standings, order, &accepted.leaving()).await?),
        };
        if !settlements.is_empty() {
            let written = accepted.write(&mut tx, &place, self.sent, &mut moved).await?;
            place.draining |= written.lifted;
            place.holds |= written.placed;
        }
        let mut left = false;
        if place.draining {
            left = hold::drain(&mut tx, &place).await?;
            // Those that were let go come before newer ones of their keys.
            if let Some((hunt, order)) = hunt.as_mut().zip(order) {
                *hunt = self.hunt(&mut tx, &place, &standings, order, &HashSet::new()).await?;
            }
        }
        let turn = match hunt.zip(order) {
            None => Turn::default(),
            Some((hunt, order)) => self.claim(&mut tx, &place, (order, &standings), hunt, &mut moved).await?,
        };
        tally::write(moved, &mut tx, place.part()).await?;
        commit(self.write_beside(tx, &beside).await?).await?;
        if !beside.is_empty() {
            self.ring();
        }
        Ok(Turn { fenced, more: turn.more || left && order.is_some(), ..turn })
    }

    /// Looks for what may be claimed.
    async fn hunt(
        &self,
        tx: &mut Tx<'_>,
        place: &Place,
        standings: &HashMap<u16, Standing>,
        order: &ClaimOrder,
        leaving: &HashSet<i64>,
    ) -> Result<Hunt, Trouble> {
        promote(tx, place).await?;
        let free = |lease: &&Lease| {
            let standing = standings.get(&lease.lane);
            lease.lane < place.count() && standing.is_some_and(|standing| standing.is_free_for(lease, order))
        };
        let lanes: HashMap<u16, Lease> =
            order.leases.iter().filter(free).map(|lease| (lease.lane, *lease)).collect();
        if lanes.is_empty() {
            return Ok(Hunt::default());
        }
        let topics = self.topics.open(tx, &*order.rule).await?;
        let own: BTreeSet<u16> = lanes.keys().copied().collect();
        let search = Search { topics: &topics, lanes: &own, mask: place.mask(), limit: order.limit, leaving };
        let found = search.run(tx).await?;
        Ok(Hunt { lanes, topics, found })
    }

    async fn claim(
        &self,
        tx: &mut Tx<'_>,
        place: &Place,
        (order, standings): (&ClaimOrder, &HashMap<u16, Standing>),
        hunt: Hunt,
        moved: &mut Tally,
    ) -> Result<Turn, Trouble> {
        if hunt.lanes.is_empty() {
            return Ok(Turn::default());
        }
        let rules = hunt.topics.iter().map(|(topic, rule)| (topic.as_str(), *rule)).collect();
        let mut claimant = Claimant::new(place, order, rules);
        claimant.fill(tx, &hunt.found.candidates, &self.weight).await?;
        let more = hunt.found.more || claimant.picker.left_some();
        let batches = claimant.open(tx, &hunt.lanes, standings, moved).await?;
        let next_due = match batches.is_empty() {
            true => next_due(tx, place).await?.map(|due| between(place.now, due)),
            false => None,
        };
        Ok(Turn { fenced: Vec::new(), batches, more, next_due })
    }
}

/// What was found, and where.
#[derive(Default)]
struct Hunt {
    /// The leases that are valid and wait for no open batch.
    lanes: HashMap<u16, Lease>,
    topics: Vec<(String, TopicRule)>,
    found: Found,
}

/// When the first waiting message of our lanes is due.
async fn next_due(connection: &mut impl Queryable, place: &Place) -> Result<Option<i64>, Trouble> {
    let sql = format!(
        "SELECT next_attempt_at FROM outbox_events FORCE INDEX (outbox_due)
         WHERE next_attempt_at IS NOT NULL AND slot & {} IN ({}) ORDER BY next_attempt_at LIMIT 1",
        place.mask(),
        list(place.lanes())
    );
    match connection.query_first::<Row, _>(sql).await? {
        None => Ok(None),
        Some(mut row) => Ok(row.optional_millis(0)?),
    }
}

/// Makes messages of our lanes whose wait is over sendable: it decides nothing yet.
async fn promote(tx: &mut Tx<'_>, place: &Place) -> Result<(), Trouble> {
    // Found first and written by number: an UPDATE that looks for rows itself would wait for those of other lanes.
    let sql = format!(
        "SELECT seq FROM outbox_events FORCE INDEX (outbox_due)
         WHERE next_attempt_at <= '{}' AND slot & {} IN ({}) ORDER BY next_attempt_at LIMIT {DUE}",
        at_text(place.now),
        place.mask(),
        list(place.lanes())
    );
    let due: Vec<i64> = tx.query(sql).await?;
    if due.is_empty() {
        return Ok(());
    }
    let sql = format!(
        "UPDATE outbox_events FORCE INDEX (PRIMARY) SET ready = 1, next_attempt_at = NULL WHERE seq IN ({})",
        list(due)
    );
    Ok(tx.query_drop(sql).await?)
}

/// One claim, inside its transaction.
struct Claimant<'a> {
    place: &'a Place,
    order: &'a ClaimOrder,
    rules: HashMap<&'a str, TopicRule>,
    picker: Picker,
    holds: Holds,
    parked: Vec<i64>,
    /// Those that no broker could be given, with their status before.
    unreadable: Vec<(i64, Status)>,
}

impl<'a> Claimant<'a> {
    fn new(place: &'a Place, order: &'a ClaimOrder, rules: HashMap<&'a str, TopicRule>) -> Self {
        Self {
            place,
            order,
            rules,
            picker: Picker::new(order),
            holds: Holds::default(),
            parked: Vec::new(),
            unreadable: Vec::new(),
        }
    }

    /// Fills the batches from the front of `candidates`.
    async fn fill(
        &mut self,
        tx: &mut Tx<'_>,
        candidates: &[Candidate],
        weight: &Weight,
    ) -> Result<(), Trouble> {
        let mut rest = candidates;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(weight.fitting(self.order.bytes).min(rest.len()));
            rest = later;
            let read = self.read(tx, now).await?;
            weight.learn(&read);
            if self.place.holds {
                let keys = read.iter().map(|claimed| &claimed.message);
                let keys = keys.filter_map(|message| Some((message.topic.as_str(), message.key.as_deref()?)));
                self.holds.load(tx, keys).await?;
            }
            let slots: HashMap<i64, u16> = now.iter().copied().collect();
            for claimed in read {
                if !self.pick(slots[&claimed.seq], claimed)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Reads the messages as they are once claimed. One that somebody deleted meanwhile is missing.
    async fn read(&self, tx: &mut Tx<'_>, candidates: &[Candidate]) -> Result<Vec<Claimed>, Trouble> {
        const EXTRA: usize = MESSAGE_COLUMNS;
        let sql = format!(
            concat!(
                "SELECT ",
                message_columns!(),
                ", ack_groups, written_at, status, attempts, crashes, delivery_epoch, seq
                 FROM outbox_events FORCE INDEX (PRIMARY) WHERE seq IN ({}) ORDER BY seq"
            ),
            list(candidates.iter().map(|(seq, _)| seq))
        );
        let mut read = Vec::with_capacity(candidates.len());
        for mut row in tx.query::<Row, _>(sql).await? {
            let Next::State(state) = step(row.state(EXTRA + 2, false)?, Event::Claim)? else {
                return Err(Trouble::Final(Error::Broken("a claimed message cannot vanish".to_owned())));
            };
            read.push(Claimed {
                seq: row.number(EXTRA + 6)?,
                message: row.message()?.into(),
                ack_groups: row.groups(EXTRA)?,
                age: between(row.millis(EXTRA + 1)?, self.place.now),
                state,
            });
        }
        Ok(read)
    }

    /// Puts a message into its batch, or parks it. `false` when the batches are full.
    fn pick(&mut self, slot: u16, claimed: Claimed) -> Result<bool, Error> {
        let (seq, rest) = (claimed.seq, claimed.state.rest);
        let (topic, key) = (claimed.message.topic.clone(), claimed.message.key.clone());
        let rule = self.rules.get(topic.as_str()).copied();
        let ordered = rule.is_some_and(|rule| rule.hold_failed);
        let held = ordered && key.as_ref().is_some_and(|key| self.holds.blocks(&topic, key, seq));
        let channel = rule.map_or(0, |rule| rule.channel);
        match self.picker.offer((slot & self.place.mask(), channel), claimed, held) {
            Pick::Taken | Pick::Passed => {}
            Pick::Held => self.parked.push(seq),
            Pick::Unreadable => {
                // Given up as soon as it is met, so that it stops nobody.
                self.unreadable.push((seq, rest));
                match key.as_ref().filter(|_| rule.is_some_and(|rule| rule.hold_dead)) {
                    Some(key) => self.holds.place(&topic, key, slot, seq),
                    None => self.holds.lift(&topic, key.as_deref(), seq),
                }
            }
            Pick::Full => return Ok(false),
        }
        Ok(true)
    }

    /// Writes the batch records, and what became of those that were not taken.
    async fn open(
        self,
        tx: &mut Tx<'_>,
        lanes: &HashMap<u16, Lease>,
        standings: &HashMap<u16, Standing>,
        moved: &mut Tally,
    ) -> Result<Vec<Batch>, Trouble> {
        hold::park(tx, &self.parked).await?;
        if !self.unreadable.is_empty() {
            for (_, rest) in &self.unreadable {
                moved.moved(*rest, Status::Dead);
            }
            let sql = format!(
                "UPDATE outbox_events FORCE INDEX (PRIMARY)
                 SET status = '{}', ready = 0, dead_reason = ?, dead_at = ? WHERE seq IN ({})",
                word(Status::Dead),
                list(self.unreadable.iter().map(|(seq, _)| seq))
            );
            tx.exec_drop(sql, (NO_HEADERS, at(self.place.now))).await?;
        }
        self.holds.write(tx).await?;
        let batches: Vec<Batch> = self
            .picker
            .batches()
            .map(|((lane, channel), messages)| Batch {
                id: Uuid::now_v7(),
                channel,
                lease: lanes[&lane],
                messages,
            })
            .collect();
        if batches.is_empty() {
            return Ok(batches);
        }
        let mut rows = Vec::with_capacity(batches.len());
        for of_lane in batches.chunk_by(|one, other| one.lease.lane == other.lease.lane) {
            let places = standings.get(&of_lane[0].lease.lane).into_iter().flat_map(Standing::places);
            rows.extend(
                of_lane.iter().zip(places).map(|(batch, place)| record(batch, place, self.place.now)),
            );
        }
        tx.query_drop(format!(
            "INSERT INTO outbox_batches (lane, place, id, epoch, lease_id, topics, seqs, size, failed, claimed_at) VALUES {}",
            rows.join(", ")
        ))
        .await?;
        Ok(batches)
    }
}

/// The values of a batch record: numbers, ids, names and a time, none of which needs escaping.
fn record(batch: &Batch, place: u16, now: i64) -> String {
    let seqs: Vec<String> = batch.messages.iter().map(|claimed| claimed.seq.to_string()).collect();
    let failed = batch.messages.iter().filter(|claimed| claimed.state.rest == Status::Failed).count();
    format!(
        "({}, {place}, '{}', {}, '{}', {}, '[{}]', {}, {failed}, '{}')",
        batch.lease.lane,
        batch.id,
        batch.lease.epoch,
        batch.lease.id,
        quoted(&Json::from(pick::topics(&batch.messages)).to_string()),
        seqs.join(","),
        seqs.len(),
        at_text(now)
    )
}
