//! For the relay's heartbeat: who may work on which lane.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::claim::TopicRule;
use crate::Error;

/// The right to work on a lane. All three must match for anything to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    /// Which lane.
    pub lane: u16,
    /// Rises with every change of hands and never falls or repeats.
    pub epoch: i64,
    /// Random: a store that lost its last moments in a failover could hand out an epoch twice.
    pub id: Uuid,
}

/// One life of one relay process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Random at each start: a name that is used again must not inherit the work of a dead one.
    pub id: Uuid,
    /// For people: the process id, say.
    pub name: String,
}

/// A relay says that it is alive and what it holds.
#[derive(Clone)]
pub struct Beat {
    /// Who.
    pub instance: Instance,
    /// How long a lease lasts from now.
    pub lease: Duration,
    /// What it holds and wants to keep.
    pub held: Vec<Lease>,
    /// Whether it wants more lanes: not while it is draining.
    pub take: bool,
    /// How the routes treat each topic: messages orphaned too often become Dead and may hold their key.
    pub rule: Arc<dyn Fn(&str) -> TopicRule + Send + Sync>,
}

/// The store's answer to a beat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Beaten {
    /// All that the instance holds now: renewed and newly taken. What is missing here is lost.
    pub held: Vec<Lease>,
    /// How many of those it should drain and release for others.
    pub surplus: usize,
    /// How many more it would be given if they were free.
    pub wanting: usize,
    /// Instances alive, this one included.
    pub instances: usize,
    /// Messages that earlier owners of newly taken lanes left in flight.
    pub orphans: usize,
    /// How many of those are Dead now because they were left so too often.
    pub dead: usize,
}

/// What a relay that gives lanes back did with the messages of batches that are still open on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing: it never heard of those batches, because the answer to its claim was lost.
    Untouched,
    /// Nobody can tell: it fell over them.
    Unknown,
}

/// A lane as an operator sees it.
#[derive(Clone, Debug)]
pub struct LaneView {
    /// Which lane.
    pub lane: u16,
    /// Its current epoch.
    pub epoch: i64,
    /// The name of the relay that holds it.
    pub owner: Option<String>,
    /// Until when, by the store's clock.
    pub locked_until: Option<DateTime<Utc>>,
    /// Messages in flight on it.
    pub in_flight: u64,
}

/// Leases of lanes.
///
/// # Contract
/// 1. A lane has at most one lease that has not run out, whatever instances and clocks do.
/// 2. Every change of hands raises the lane's epoch; no epoch of a lane is ever used twice.
/// 3. A lease is renewed only for its own epoch and id; an instance that lost it hears so.
/// 4. Taking a lane resolves all batches that its former owner left: their messages are sendable again
///    with one crash more, or Dead at the limit.
/// 5. An instance is given free lanes up to its share, ⌈lanes / instances alive⌉; nothing is taken from
///    a living owner. One that holds more than its share is told the surplus.
/// 6. A released lane is free at once; a dead owner's when its lease runs out. Messages that a releasing owner left
///    [untouched](Left::Untouched) are sendable again as they were: that an answer was lost is not their fault.
/// 7. The number of lanes changes only while no lane is leased and no batch is open. A change that was asked
///    for makes every holder's surplus all it has.
#[async_trait]
pub trait Lanes: Send + Sync {
    /// Renews, takes and answers in one transaction.
    ///
    /// Called on the heartbeat's own thread and connection, so that nothing else can delay it.
    async fn beat(&self, beat: &Beat) -> Result<Beaten, Error>;

    /// Gives lanes back. Leases that are not held are ignored. Open batches of released lanes are closed if their messages
    /// are untouched, and else left for the next owner to resolve.
    async fn release(&self, leases: &[Lease], left: Left) -> Result<(), Error>;

    /// The instance is gone for good: its lanes are free and it no longer counts.
    async fn leave(&self, instance: &Instance) -> Result<(), Error>;

    /// All lanes.
    async fn lanes(&self) -> Result<Vec<LaneView>, Error>;

    /// Asks for another number of lanes (a power of two up to 1024). `true` when it is in force already;
    /// else running relays drain first.
    async fn set_lanes(&self, count: u16) -> Result<bool, Error>;
}
