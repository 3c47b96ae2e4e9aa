//! Taking messages: settle the last batches and choose the next ones, in one transaction.
//!
//! The claim looks at each topic that has sendable rows by itself, so that a topic whose destination is down
//! costs nothing however many of its messages wait, and hides nobody else's. A turn is a handful of statements in
//! three or four trips, however many messages it moves.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::choose::{
    Candidate, Candidates, Lanes, OpenBatches, Topic, meet, open_batches, open_topics, probe,
};
use super::connection::{Transaction, repeat};
use super::error::{Trouble, cause};
use super::mark::Sight;
use super::row::{between, lane, limit, small};
use super::settle::{BEFORE, Changes};
use super::{PostgresStore, append, hold};
use crate::column::NO_HEADERS;
use crate::pick::{self, Pick, Picker};
use crate::{
    Batch, BatchId, Claim, ClaimOrder, Claimed, Error, Lease, NewMessage, Settlement, TopicRule, Turn,
};

/// Messages whose wait is over that are made sendable in one turn.
const DUE: i64 = 1_000;

#[async_trait]
impl Claim for PostgresStore {
    async fn turn(&self, settlements: Vec<Settlement>, order: Option<ClaimOrder>) -> Result<Turn, Error> {
        if settlements.is_empty() {
            // Looking needs no lock and writes nothing: an idle relay must not disturb anybody.
            let Some(order) = &order else { return Ok(Turn::default()) };
            if let Some(idle) = repeat(|| self.look(order)).await? {
                return Ok(idle);
            }
        }
        let turn = repeat(|| self.work(&settlements, order.as_ref())).await;
        if settlements.iter().any(|settlement| !settlement.beside.is_empty()) {
            self.ring();
        }
        // It happened, and nobody hears of it.
        fail::fail_point!("store::turned", |_| {
            let reason = "the answer was lost".to_owned();
            Err(Error::Unavailable { reason, retry_after: Duration::ZERO })
        });
        turn
    }

    async fn woken(&self) {
        self.wake().await;
    }
}

impl PostgresStore {
    /// The answer when there is nothing to take, or nothing when there may be.
    async fn look(&self, order: &ClaimOrder) -> Result<Option<Turn>, Trouble> {
        let tx = self.connections.transaction().await?;
        let result = async {
            let lanes = sorted(order.leases.iter().map(|lease| lease.lane));
            let before = self.marks.horizon();
            let (begun, rows, facts, batches, met) = tokio::join!(
                biased;
                tx.begin_reading(),
                lanes_now(&tx, &lanes),
                Facts::read(&tx, &lanes),
                open_batches(&tx, &self.marks, &lanes),
                meet(&tx, &self.marks),
            );
            begun?;
            let (rows, facts, batches) = (rows?, facts?, batches?);
            met?;
            self.marks.see(facts.sight, before);
            let lanes = Lanes::read(&rows, order, batches.waiting(order), &self.marks, facts.count)?;
            if facts.draining || facts.is_due() {
                return Ok(None);
            }
            let topics = open_topics(&self.marks, &lanes, order);
            if !lanes.free.is_empty() && !topics.is_empty() {
                let before = self.marks.horizon();
                if probe(&tx, &lanes, &topics).await? {
                    return Ok(None);
                }
                for topic in &topics {
                    for lane in lanes.free.keys() {
                        self.marks.found_nothing(&topic.name, *lane, topic.start, i64::MAX, before);
                    }
                }
            }
            Ok(Some(Turn { next_due: facts.next_due(), ..Turn::default() }))
        }
        .await;
        let idle = tx.end(result).await?;
        if idle.is_some() && self.marks.lags() {
            self.pursue().await?;
        }
        self.sweep_sometimes();
        Ok(idle)
    }

    /// Draws a transaction id for the marks. It writes nothing that anybody waits for.
    async fn pursue(&self) -> Result<(), Trouble> {
        let before = self.marks.horizon();
        let tx = self.connections.transaction().await?;
        let (begun, row) =
            tokio::join!(biased; tx.begin(), tx.one("SELECT pg_current_xact_id()::text::bigint", &[]));
        let result = begun.and(row).and_then(|row| Ok(row.try_get(0)?));
        let xid = tx.end(result).await?;
        self.marks.pursue(xid, before);
        Ok(())
    }

    async fn work(&self, settlements: &[Settlement], order: Option<&ClaimOrder>) -> Result<Turn, Trouble> {
        let tx = self.connections.transaction().await?;
        let result = self.settle_and_claim(&tx, settlements, order).await;
        let (turn, settled) = tx.end(result).await?;
        for (lane, position) in settled {
            self.marks.settle(lane, position);
        }
        if let Some(doorbell) = self.doorbell.as_ref().filter(|_| !turn.batches.is_empty()) {
            doorbell.keep_awake();
        }
        self.sweep_sometimes();
        Ok(turn)
    }

    /// Answers also up to which position the batches of each lane are settled now.
    async fn settle_and_claim(
        &self,
        tx: &Transaction,
        settlements: &[Settlement],
        order: Option<&ClaimOrder>,
    ) -> Result<(Turn, Vec<(u16, i64)>), Trouble> {
        let leases = settlements.iter().map(|settlement| settlement.lease);
        let lanes =
            sorted(leases.chain(order.iter().flat_map(|order| order.leases.clone())).map(|lease| lease.lane));
        let seqs: Vec<i64> = settlements
            .iter()
            .flat_map(|settlement| settlement.verdicts.iter().map(|(seq, _)| *seq))
            .collect();
        let horizon = self.marks.horizon();
        // All that follows the lock sees what those who had it before have committed.
        let (begun, locked, facts, batches, before, met) = tokio::join!(
            biased;
            tx.begin(),
            lock(tx, &lanes),
            Facts::read(tx, &lanes),
            open_batches(tx, &self.marks, &lanes),
            read_before(tx, &seqs),
            meet(tx, &self.marks),
        );
        begun?;
        let (locked, facts, batches, before) = (locked?, facts?, batches?, before?);
        met?;
        self.marks.see(facts.sight, horizon);

        let mut desk = Desk {
            store: self,
            tx,
            facts,
            open: batches,
            settled: Vec::new(),
            beside: Vec::new(),
            draining: facts.draining,
        };
        let fenced = desk.settle(settlements, &locked, &before).await?;
        let turn = match order {
            Some(order) => desk.claim(order, &locked).await?,
            None => Turn::default(),
        };
        append::beside(tx, self.parted, &desk.beside).await?;
        Ok((Turn { fenced, ..turn }, desk.settled))
    }
}

fn sorted(lanes: impl Iterator<Item = u16>) -> Vec<i16> {
    let mut lanes: Vec<i16> = lanes.map(small).collect();
    lanes.sort_unstable();
    lanes.dedup();
    lanes
}

/// What the lanes are at the moment.
async fn lanes_now(tx: &Transaction, lanes: &[i16]) -> Result<Vec<Row>, Trouble> {
    let sql = "SELECT lane, epoch, lease_id, amended FROM outbox_lanes WHERE lane = ANY ($1)";
    tx.query(sql, &[(&lanes, Type::INT2_ARRAY)]).await
}

/// Locks lanes, in their order: whoever locks several does it in the same one, so nobody waits in a circle.
pub(super) async fn lock(tx: &Transaction, lanes: &[i16]) -> Result<Vec<Row>, Trouble> {
    tx.query(
        "SELECT lane, epoch, lease_id, amended FROM outbox_lanes WHERE lane = ANY ($1) ORDER BY lane FOR UPDATE",
        &[(&lanes, Type::INT2_ARRAY)],
    )
    .await
}

async fn read_before(tx: &Transaction, seqs: &[i64]) -> Result<Vec<Row>, Trouble> {
    if seqs.is_empty() {
        return Ok(Vec::new());
    }
    tx.query(BEFORE, &[(&seqs, Type::INT8_ARRAY)]).await
}

/// What a turn needs to know of the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub(super) now: DateTime<Utc>,
    /// How many lanes there are.
    pub(super) count: u16,
    sight: Sight,
    /// Whether followers are being let go on our lanes.
    draining: bool,
    /// When the first message that waits on our lanes is due.
    due: Option<DateTime<Utc>>,
}

impl Facts {
    pub(super) async fn read(tx: &Transaction, lanes: &[i16]) -> Result<Self, Trouble> {
        let row = tx.one(include_str!("facts.sql"), &[(&lanes, Type::INT2_ARRAY)]).await?;
        Ok(Self {
            now: row.try_get(0)?,
            count: lane(&row, 1)?,
            sight: Sight { xmin: row.try_get(2)?, xid: row.try_get(3)?, drawn: row.try_get(4)? },
            draining: row.try_get(5)?,
            due: row.try_get(6)?,
        })
    }

    fn is_due(&self) -> bool {
        self.due.is_some_and(|due| due <= self.now)
    }

    fn next_due(&self) -> Option<Duration> {
        self.due.map(|due| between(self.now, due))
    }
}

/// One turn, inside its transaction, its lanes locked.
struct Desk<'a> {
    store: &'a PostgresStore,
    tx: &'a Transaction,
    facts: Facts,
    open: OpenBatches,
    /// Of each lane: up to where its batches are settled.
    settled: Vec<(u16, i64)>,
    /// What the settlements carry.
    beside: Vec<NewMessage>,
    draining: bool,
}

impl Desk<'_> {
    /// Settles; answers the batches that came too late: another relay owns their lanes now.
    async fn settle(
        &mut self,
        settlements: &[Settlement],
        locked: &[Row],
        before: &[Row],
    ) -> Result<Vec<BatchId>, Trouble> {
        let mut fenced = Vec::new();
        let mut changes = Changes::new(self.facts.now);
        changes.read(before)?;
        let mut closed = Vec::new();
        for Settlement { batch, lease, verdicts, beside } in settlements {
            let open = if owned(locked, lease)? { self.open.close(batch, lease) } else { None };
            let Some(open) = open else {
                fenced.push(*batch);
                continue;
            };
            if !open.seqs.iter().eq(verdicts.iter().map(|(seq, _)| seq)) {
                return Err(Error::Refused(format!(
                    "batch {batch} has {} messages and the settlement does not name exactly these",
                    open.seqs.len()
                ))
                .into());
            }
            for (seq, verdict) in verdicts {
                changes.settle(*seq, verdict)?;
            }
            closed.push((open.lane, open.position));
            self.beside.extend(beside.iter().cloned().map(NewMessage::from));
        }
        self.settled =
            closed.iter().map(|(lane, position)| (*lane, self.open.settled(*lane, *position))).collect();
        if !closed.is_empty() {
            let (written, removed) = tokio::join!(
                biased;
                changes.write(self.tx, self.store.sent),
                remove_batches(self.tx, &closed),
            );
            let (draining, written) = match written {
                Ok(draining) => (draining, Ok(())),
                Err(trouble) => (false, Err(trouble)),
            };
            cause([written, removed])?;
            self.draining |= draining;
        }
        Ok(fenced)
    }

    async fn claim(&mut self, order: &ClaimOrder, locked: &[Row]) -> Result<Turn, Trouble> {
        let waiting = self.open.waiting(order);
        let lanes = Lanes::read(locked, order, waiting, &self.store.marks, self.facts.count)?;
        if lanes.free.is_empty() {
            return Ok(Turn::default());
        }
        let left = self.free_what_waited(&lanes).await?;
        let topics = open_topics(&self.store.marks, &lanes, order);
        let before = self.store.marks.horizon();
        let candidates = Candidates::read(self.tx, &lanes, &topics, order, self.facts.now).await?;
        candidates.mark(&self.store.marks, &lanes, &topics, before);
        let full = candidates.full;
        let (picker, mended) = self.pick(candidates, &topics, order).await?;
        let more = full || left || mended || picker.left_some();
        let batches = self.record(picker, &lanes).await?;
        let next_due = if batches.is_empty() { self.facts.next_due() } else { None };
        Ok(Turn { fenced: Vec::new(), batches, more, next_due })
    }

    /// Makes sendable what is due and what waited behind others. Answers whether some is left for the next turn.
    async fn free_what_waited(&self, lanes: &Lanes) -> Result<bool, Trouble> {
        let numbers = lanes.numbers();
        let mut again = Vec::new();
        let mut left = false;
        if self.facts.is_due() {
            let rows = self
                .tx
                .query(
                    include_str!("promote.sql"),
                    &[
                        (&self.facts.now, Type::TIMESTAMPTZ),
                        (&small(lanes.mask), Type::INT2),
                        (&numbers, Type::INT2_ARRAY),
                        (&DUE, Type::INT8),
                    ],
                )
                .await?;
            again.extend(hold::again(&rows)?);
            left |= limit(rows.len()) == DUE;
        }
        if self.draining {
            let (drained, more) = hold::drain(self.tx, lanes.mask, &numbers).await?;
            again.extend(drained);
            left |= more;
        }
        for (topic, slot, seq) in again {
            self.store.marks.lower(&topic, slot & lanes.mask, seq);
        }
        Ok(left)
    }

    /// Fills the batches, parks followers of held keys and gives up what cannot be read. Answers also whether anything
    /// was given up: that may let others go.
    async fn pick(
        &self,
        candidates: Candidates,
        topics: &[Topic],
        order: &ClaimOrder,
    ) -> Result<(Picker, bool), Trouble> {
        let rules: HashMap<&str, TopicRule> =
            topics.iter().map(|topic| (topic.name.as_str(), topic.rule)).collect();
        let mut picker = Picker::new(order);
        let (mut held, mut unreadable) = (Vec::new(), Vec::new());
        for candidate in candidates.found {
            let Candidate { lane, claimed, behind } = candidate;
            let rule = rules.get(claimed.message.topic.as_str()).copied();
            let (seq, hold_dead) = (claimed.seq, rule.is_some_and(|rule| rule.hold_dead));
            let behind = behind && rule.is_some_and(|rule| rule.hold_failed);
            let channel = rule.map_or(0, |rule| rule.channel);
            match picker.offer((lane, channel), claimed, behind) {
                Pick::Taken | Pick::Passed => {}
                Pick::Held => held.push(seq),
                Pick::Unreadable => unreadable.push((seq, hold_dead)),
                Pick::Full => break,
            }
        }
        hold::park(self.tx, &held).await?;
        let mended = !unreadable.is_empty();
        if mended {
            let seqs: Vec<i64> = unreadable.iter().map(|(seq, _)| *seq).collect();
            let mut changes = Changes::new(self.facts.now);
            changes.read(&read_before(self.tx, &seqs).await?)?;
            for (seq, hold) in unreadable {
                changes.quarantine(seq, NO_HEADERS, hold)?;
            }
            changes.write(self.tx, self.store.sent).await?;
        }
        Ok((picker, mended))
    }

    /// Writes the batch records.
    async fn record(&self, picker: Picker, lanes: &Lanes) -> Result<Vec<Batch>, Trouble> {
        let batches: Vec<Batch> = picker
            .batches()
            .map(|((lane, channel), messages)| Batch {
                id: Uuid::now_v7(),
                channel,
                lease: lanes.free[&lane],
                messages,
            })
            .collect();
        if batches.is_empty() {
            return Ok(batches);
        }
        let numbers: Vec<i16> = batches.iter().map(|batch| small(batch.lease.lane)).collect();
        let ids: Vec<Uuid> = batches.iter().map(|batch| batch.id).collect();
        let epochs: Vec<i64> = batches.iter().map(|batch| batch.lease.epoch).collect();
        let leases: Vec<Uuid> = batches.iter().map(|batch| batch.lease.id).collect();
        let topics: Vec<String> = batches.iter().map(|batch| names(&batch.messages)).collect();
        let seqs: Vec<String> = batches.iter().map(|batch| numbers_of(&batch.messages)).collect();
        let size = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
        let sizes: Vec<i32> = batches.iter().map(|batch| size(batch.messages.len())).collect();
        let was_failed = |claimed: &&Claimed| claimed.state.rest == message::Status::Failed;
        let failed: Vec<i32> =
            batches.iter().map(|batch| size(batch.messages.iter().filter(was_failed).count())).collect();
        self.tx
            .execute(
                "INSERT INTO outbox_batches (lane, id, epoch, lease_id, topics, seqs, size, failed, claimed_at)
                 SELECT b.lane, b.id, b.epoch, b.lease_id, b.topics::text[], b.seqs::bigint[], b.size, b.failed, $9
                 FROM unnest($1::smallint[], $2::uuid[], $3::bigint[], $4::uuid[], $5::text[], $6::text[], $7::integer[],
                             $8::integer[]) AS b(lane, id, epoch, lease_id, topics, seqs, size, failed)",
                &[
                    (&numbers, Type::INT2_ARRAY),
                    (&ids, Type::UUID_ARRAY),
                    (&epochs, Type::INT8_ARRAY),
                    (&leases, Type::UUID_ARRAY),
                    (&topics, Type::TEXT_ARRAY),
                    (&seqs, Type::TEXT_ARRAY),
                    (&sizes, Type::INT4_ARRAY),
                    (&failed, Type::INT4_ARRAY),
                    (&self.facts.now, Type::TIMESTAMPTZ),
                ],
            )
            .await?;
        Ok(batches)
    }
}

/// Whether the lane is still under this lease.
fn owned(locked: &[Row], lease: &Lease) -> Result<bool, Trouble> {
    for row in locked {
        let found = (lane(row, 0)?, row.try_get::<_, i64>(1)?, row.try_get::<_, Option<Uuid>>(2)?);
        if found == (lease.lane, lease.epoch, Some(lease.id)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Numbers as PostgreSQL writes an array: arrays of arrays must be of one length, texts need not.
fn numbers_of(messages: &[Claimed]) -> String {
    let seqs: Vec<String> = messages.iter().map(|claimed| claimed.seq.to_string()).collect();
    format!("{{{}}}", seqs.join(","))
}

/// Topics likewise. Quoted, because one may be called `null`; what a topic is made of needs no more.
fn names(messages: &[Claimed]) -> String {
    let topics: Vec<String> = pick::topics(messages).iter().map(|topic| format!("\"{topic}\"")).collect();
    format!("{{{}}}", topics.join(","))
}

async fn remove_batches(tx: &Transaction, closed: &[(u16, i64)]) -> Result<(), Trouble> {
    let positions: Vec<i64> = closed.iter().map(|(_, position)| *position).collect();
    tx.execute("DELETE FROM outbox_batches WHERE position = ANY ($1)", &[(&positions, Type::INT8_ARRAY)])
        .await?;
    Ok(())
}
