//! Lanes that a transaction has for itself.
//!
//! Locked is the lane's row in `counters`, in the order of lanes, so that no two lock each other out. Under that lock the
//! lane's epoch, batch, messages and holds, and the number of lanes, stay as they are read.

use std::collections::{BTreeSet, HashMap};

use mysql_async::Row;
use mysql_async::prelude::Queryable;

use super::error::Trouble;
use super::row::{Read, list};
use super::session::Tx;
use crate::{ClaimOrder, Error, Lease, pick};

/// The lanes, and what the store says once they are locked.
#[derive(Debug)]
pub(super) struct Place {
    lanes: BTreeSet<u16>,
    count: u16,
    /// The server's clock, read under the lock.
    pub(super) now: i64,
    /// Whether any key is held at all: nearly always not, and then nobody needs to look further.
    pub(super) holds: bool,
    /// Whether followers are being let go somewhere.
    pub(super) draining: bool,
}

impl Place {
    /// What cuts a lane's number out of a slot.
    pub(super) fn mask(&self) -> u16 {
        self.count - 1
    }

    pub(super) fn lanes(&self) -> &BTreeSet<u16> {
        &self.lanes
    }

    /// How many lanes there are.
    pub(super) fn count(&self) -> u16 {
        self.count
    }

    /// The counters that this transaction has locked.
    pub(super) fn part(&self) -> u16 {
        self.lanes.first().copied().unwrap_or(0)
    }
}

/// Locks `lanes`.
pub(super) async fn lock(tx: &mut Tx<'_>, lanes: impl IntoIterator<Item = u16>) -> Result<Place, Trouble> {
    let lanes: BTreeSet<u16> = lanes.into_iter().collect();
    tx.query_drop(format!(
        "SELECT part FROM outbox_counters FORCE INDEX (PRIMARY) WHERE part IN ({}) ORDER BY part FOR UPDATE",
        list(&lanes)
    ))
    .await?;
    look(tx, lanes).await
}

/// What the store says of `lanes`, locked or not.
pub(super) async fn look(connection: &mut impl Queryable, lanes: BTreeSet<u16>) -> Result<Place, Trouble> {
    let row: Option<Row> = connection
        .exec_first(
            "SELECT utc_timestamp(3), (SELECT value FROM outbox_settings WHERE name = 'lanes'),
                    EXISTS (SELECT 1 FROM outbox_holds), EXISTS (SELECT 1 FROM outbox_holds WHERE draining = 1)",
            (),
        )
        .await?;
    let mut row = row.ok_or_else(|| Error::Broken("the server says no time".to_owned()))?;
    Ok(Place {
        lanes,
        now: row.millis(0)?,
        count: row.small(1)?,
        holds: row.flag(2)?,
        draining: row.flag(3)?,
    })
}

/// Locks the lane of `slot`, whatever the number of lanes is by then.
pub(super) async fn lock_slot(tx: &mut Tx<'_>, slot: u16) -> Result<Place, Trouble> {
    lock_slots(tx, &BTreeSet::from([slot])).await
}

/// Locks the lanes of `slots`.
pub(super) async fn lock_slots(tx: &mut Tx<'_>, slots: &BTreeSet<u16>) -> Result<Place, Trouble> {
    let count: u16 = look(tx, BTreeSet::new()).await?.count;
    let lanes = |count: u16| slots.iter().map(move |slot| slot & (count - 1));
    let place = lock(tx, lanes(count)).await?;
    if place.count == count {
        return Ok(place);
    }
    // The number of lanes changed while we waited. It cannot change again: that takes every lane's lock.
    lock(tx, lanes(place.count)).await
}

/// An open batch.
#[derive(Clone, Debug)]
pub(super) struct Open {
    pub(super) id: String,
    pub(super) seqs: Vec<i64>,
    place: u16,
    topics: Vec<String>,
    epoch: i64,
    lease: String,
}

/// How a lane stands.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    epoch: i64,
    lease: Option<String>,
    pub(super) batches: Vec<Open>,
}

impl Standing {
    /// Whether `lease` is the lane's current one.
    pub(super) fn is_held_by(&self, lease: &Lease) -> bool {
        self.epoch == lease.epoch && self.lease.as_deref() == Some(lease.id.to_string().as_str())
    }

    /// The batch `id` that was opened under `lease`, taken out, if both still stand.
    pub(super) fn close(&mut self, id: &str, lease: &Lease) -> Option<Open> {
        let same =
            |open: &Open| open.id == id && open.epoch == lease.epoch && open.lease == lease.id.to_string();
        let place = self.batches.iter().position(same).filter(|_| self.is_held_by(lease))?;
        Some(self.batches.swap_remove(place))
    }

    /// Places for the records of new batches.
    pub(super) fn places(&self) -> impl Iterator<Item = u16> {
        (0..).filter(|place| self.batches.iter().all(|open| open.place != *place))
    }

    /// Whether `lease` is its current one and nothing that `order` may take is in an open batch.
    pub(super) fn is_free_for(&self, lease: &Lease, order: &ClaimOrder) -> bool {
        self.is_held_by(lease) && !self.batches.iter().any(|open| pick::waits_for(order, &open.topics))
    }
}

/// How `lanes` stand.
pub(super) async fn standings(
    connection: &mut impl Queryable,
    lanes: &BTreeSet<u16>,
) -> Result<HashMap<u16, Standing>, Trouble> {
    let sql = format!(
        "SELECT l.lane, l.epoch, l.lease_id, b.id, b.epoch, b.lease_id, b.topics, b.seqs, b.place
         FROM outbox_lanes l LEFT JOIN outbox_batches b ON b.lane = l.lane WHERE l.lane IN ({})",
        list(lanes)
    );
    let mut standings: HashMap<u16, Standing> = HashMap::new();
    for mut row in connection.query::<Row, _>(sql).await? {
        let batch = match row.optional_text(3)? {
            None => None,
            Some(id) => Some(Open {
                id,
                epoch: row.number(4)?,
                lease: row.text(5)?,
                topics: serde_json::from_str(&row.text(6)?).map_err(unreadable)?,
                seqs: seqs(&row.text(7)?)?,
                place: row.small(8)?,
            }),
        };
        let standing = Standing { epoch: row.number(1)?, lease: row.optional_text(2)?, batches: Vec::new() };
        standings.entry(row.small(0)?).or_insert(standing).batches.extend(batch);
    }
    Ok(standings)
}

/// The messages that a batch record names.
pub(super) fn seqs(json: &str) -> Result<Vec<i64>, Error> {
    serde_json::from_str(json).map_err(unreadable)
}

fn unreadable(error: serde_json::Error) -> Error {
    Error::Broken(format!("a batch record cannot be read: {error}"))
}

/// Removes batch records, by lane and id.
pub(super) async fn close(tx: &mut Tx<'_>, batches: &[(u16, String)]) -> Result<(), Trouble> {
    if batches.is_empty() {
        return Ok(());
    }
    // By lane too: no row of another lane is so much as looked at.
    let sql = format!(
        "DELETE b FROM outbox_batches b FORCE INDEX (PRIMARY) WHERE b.lane IN ({}) AND b.id IN ({})",
        list(batches.iter().map(|(lane, _)| lane).collect::<BTreeSet<_>>()),
        list(batches.iter().map(|(_, id)| format!("'{id}'")))
    );
    Ok(tx.query_drop(sql).await?)
}
