//! Choosing what to take: which topics may be taken from, which lanes are free, and the first sendable messages of both.

use std::collections::{BTreeMap, HashMap, HashSet};

use chrono::{DateTime, Utc};
use message::{Event, Next, step};
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::connection::Transaction;
use super::error::Trouble;
use super::mark::{Horizon, Marks};
use super::row::{MESSAGE_COLUMNS, between, groups, lane, limit, message, message_columns, small, state};
use crate::{BatchId, ClaimOrder, Claimed, Error, Lease, TopicRule, pick};

/// Finds topics that were not met before, between those that were: one look for each gap, whatever is in the index.
pub(super) async fn meet(tx: &Transaction, marks: &Marks) -> Result<(), Trouble> {
    let known = marks.topics();
    let lows: Vec<&str> = std::iter::once("").chain(known.iter().map(String::as_str)).collect();
    // After all that a topic may be made of.
    let highs: Vec<&str> = known.iter().map(String::as_str).chain(std::iter::once("~")).collect();
    let rows = tx
        .query(include_str!("topics.sql"), &[(&lows, Type::TEXT_ARRAY), (&highs, Type::TEXT_ARRAY)])
        .await?;
    marks.meet(rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<String>, _>>()?);
    Ok(())
}

/// A topic that may be taken from.
pub(super) struct Topic {
    pub(super) name: String,
    pub(super) rule: TopicRule,
    /// Where its scan starts.
    pub(super) start: i64,
    /// How many at most.
    take: i64,
}

pub(super) fn open_topics(marks: &Marks, lanes: &Lanes, order: &ClaimOrder) -> Vec<Topic> {
    let open = |name: String| {
        let rule = (order.rule)(&name);
        let start = marks.start(&name, lanes.free.keys().copied());
        (rule.take > 0).then(|| Topic { start, take: limit(rule.take.min(order.limit)), name, rule })
    };
    marks.topics().into_iter().filter_map(open).collect()
}

/// A batch that is open.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) lane: u16,
    pub(super) position: i64,
    id: Uuid,
    epoch: i64,
    lease_id: Uuid,
    topics: Vec<String>,
    pub(super) seqs: Vec<i64>,
}

/// The batches that are open on some lanes.
#[derive(Debug)]
pub(super) struct OpenBatches(Vec<Open>);

impl OpenBatches {
    /// Takes the batch out, if it is open under this lease.
    pub(super) fn close(&mut self, batch: &BatchId, lease: &Lease) -> Option<Open> {
        let meant = (lease.lane, *batch, lease.epoch, lease.id);
        let place =
            self.0.iter().position(|open| (open.lane, open.id, open.epoch, open.lease_id) == meant)?;
        Some(self.0.swap_remove(place))
    }

    /// Whether a lane waits for one of them.
    pub(super) fn waiting(&self, order: &ClaimOrder) -> impl Fn(u16) -> bool + use<> {
        let waiting = self.0.iter().filter(|open| pick::waits_for(order, &open.topics));
        let lanes: HashSet<u16> = waiting.map(|open| open.lane).collect();
        move |lane| lanes.contains(&lane)
    }

    /// Up to where all batches of the lane are settled, now that the one at `closed` is.
    pub(super) fn settled(&self, lane: u16, closed: i64) -> i64 {
        let first = self.0.iter().filter(|open| open.lane == lane).map(|open| open.position).min();
        first.map_or(closed, |first| closed.min(first - 1))
    }
}

/// The open batches of these lanes. Those that were settled long ago are not looked at.
pub(super) async fn open_batches(
    tx: &Transaction,
    marks: &Marks,
    lanes: &[i16],
) -> Result<OpenBatches, Trouble> {
    let settled: Vec<i64> =
        lanes.iter().map(|lane| marks.settled(u16::try_from(*lane).unwrap_or(0))).collect();
    let rows = tx
        .query(
            "SELECT b.lane, b.position, b.id, b.epoch, b.lease_id, b.topics, b.seqs
             FROM unnest($1::smallint[], $2::bigint[]) AS m(lane, settled)
             CROSS JOIN LATERAL (
                 SELECT * FROM outbox_batches b
                 WHERE b.lane = m.lane
                       AND b.position > greatest(m.settled, (SELECT settled_to FROM outbox_lanes l WHERE l.lane = m.lane))
                 OFFSET 0) b",
            &[(&lanes, Type::INT2_ARRAY), (&settled, Type::INT8_ARRAY)],
        )
        .await?;
    let read = |row: &Row| {
        Ok(Open {
            lane: lane(row, 0)?,
            position: row.try_get(1)?,
            id: row.try_get(2)?,
            epoch: row.try_get(3)?,
            lease_id: row.try_get(4)?,
            topics: row.try_get(5)?,
            seqs: row.try_get(6)?,
        })
    };
    Ok(OpenBatches(rows.iter().map(read).collect::<Result<_, Trouble>>()?))
}

/// The lanes of an order.
pub(super) struct Lanes {
    /// Leases that are valid and wait for no open batch.
    pub(super) free: BTreeMap<u16, Lease>,
    pub(super) mask: u16,
}

impl Lanes {
    /// Takes those of the order that stand, by the rows that [`lock`] reads.
    pub(super) fn read(
        rows: &[Row],
        order: &ClaimOrder,
        busy: impl Fn(u16) -> bool,
        marks: &Marks,
        count: u16,
    ) -> Result<Self, Trouble> {
        let mut free = BTreeMap::new();
        for row in rows {
            let found = (lane(row, 0)?, row.try_get::<_, i64>(1)?, row.try_get::<_, Option<Uuid>>(2)?);
            let lease = order.leases.iter().find(|lease| found == (lease.lane, lease.epoch, Some(lease.id)));
            if let Some(lease) = lease.filter(|lease| !busy(lease.lane) && lease.lane < count) {
                marks.enter(*lease, row.try_get(3)?);
                free.insert(lease.lane, *lease);
            }
        }
        Ok(Self { free, mask: count - 1 })
    }

    pub(super) fn numbers(&self) -> Vec<i16> {
        self.free.keys().map(|lane| small(*lane)).collect()
    }
}

/// Whether any of these topics has a sendable message on these lanes.
pub(super) async fn probe(tx: &Transaction, lanes: &Lanes, topics: &[Topic]) -> Result<bool, Trouble> {
    let names: Vec<&str> = topics.iter().map(|topic| topic.name.as_str()).collect();
    let starts: Vec<i64> = topics.iter().map(|topic| topic.start).collect();
    let row = tx
        .one(
            include_str!("probe.sql"),
            &[
                (&names, Type::TEXT_ARRAY),
                (&starts, Type::INT8_ARRAY),
                (&small(lanes.mask), Type::INT2),
                (&lanes.numbers(), Type::INT2_ARRAY),
            ],
        )
        .await?;
    Ok(row.try_get(0)?)
}

/// A sendable message that a claim met.
pub(super) struct Candidate {
    pub(super) lane: u16,
    pub(super) claimed: Claimed,
    /// Its key is held by an earlier one.
    pub(super) behind: bool,
}

/// The first sendable messages of our lanes, by number, over all topics.
pub(super) struct Candidates {
    pub(super) found: Vec<Candidate>,
    /// Whether the limits cut off others.
    pub(super) full: bool,
    /// How many of each topic were met, and the number of the last of them.
    met: HashMap<String, (i64, i64)>,
    /// The number at which the order's limit cut all topics off.
    cut: Option<i64>,
}

impl Candidates {
    pub(super) async fn read(
        tx: &Transaction,
        lanes: &Lanes,
        topics: &[Topic],
        order: &ClaimOrder,
        now: DateTime<Utc>,
    ) -> Result<Self, Trouble> {
        const EXTRA: usize = MESSAGE_COLUMNS;
        let names: Vec<&str> = topics.iter().map(|topic| topic.name.as_str()).collect();
        let starts: Vec<i64> = topics.iter().map(|topic| topic.start).collect();
        let takes: Vec<i64> = topics.iter().map(|topic| topic.take).collect();
        let rows = tx
            .query(
                concat!("SELECT ", message_columns!(), ", ", include_str!("candidates.sql")),
                &[
                    (&names, Type::TEXT_ARRAY),
                    (&starts, Type::INT8_ARRAY),
                    (&takes, Type::INT8_ARRAY),
                    (&small(lanes.mask), Type::INT2),
                    (&lanes.numbers(), Type::INT2_ARRAY),
                    (&limit(order.limit), Type::INT8),
                    (&limit(order.bytes), Type::INT8),
                ],
            )
            .await?;
        let mut found = Vec::with_capacity(rows.len());
        let mut met: HashMap<String, (i64, i64)> = HashMap::new();
        let mut all = 0;
        let mut cut = None;
        for row in &rows {
            let seq = row.try_get(EXTRA)?;
            let mut claimed = Claimed {
                seq,
                message: message(row, 0)?.into(),
                ack_groups: groups(row, EXTRA + 2)?,
                age: between(row.try_get(EXTRA + 3)?, now),
                state: state(row, EXTRA + 4, false)?,
            };
            let Next::State(in_flight) = step(claimed.state, Event::Claim)? else {
                return Err(Error::Broken("a claimed message cannot vanish".to_owned()).into());
            };
            claimed.state = in_flight;
            let topic = met.entry(claimed.message.topic.clone()).or_default();
            *topic = (topic.0 + 1, seq);
            all = row.try_get(EXTRA + 9)?;
            cut = Some(seq);
            let lane = lane(row, EXTRA + 1)? & lanes.mask;
            found.push(Candidate { lane, claimed, behind: row.try_get(EXTRA + 8)? });
        }
        // By the number of messages, or by their bytes.
        let full = all >= limit(order.limit) || limit(found.len()) < all;
        Ok(Self { found, full, met, cut: cut.filter(|_| full) })
    }

    /// Raises the marks to where nothing was found.
    pub(super) fn mark(&self, marks: &Marks, lanes: &Lanes, topics: &[Topic], before: Horizon) {
        let mut first: HashMap<(&str, u16), i64> = HashMap::new();
        for candidate in &self.found {
            first
                .entry((&candidate.claimed.message.topic, candidate.lane))
                .or_insert(candidate.claimed.seq - 1);
        }
        for topic in topics {
            // How far this topic was looked at: to its end, to its own limit, or to that of all.
            let end = match self.met.get(&topic.name) {
                Some((met, last)) if *met >= topic.take => *last,
                _ => self.cut.unwrap_or(i64::MAX),
            };
            for lane in lanes.free.keys() {
                let end = first.get(&(topic.name.as_str(), *lane)).copied().unwrap_or(end);
                marks.found_nothing(&topic.name, *lane, topic.start, end, before);
            }
        }
    }
}
