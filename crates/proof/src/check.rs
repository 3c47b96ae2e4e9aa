//! The checker: what was committed against what was done. It reads databases and trails and nothing else.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use anyhow::{Result, ensure};
use rusqlite::Connection;

use crate::ground::{Ground, broker_path};
use crate::shop::Order;
use crate::trail::audit;

/// What the checker found. Everything between `committed` and `copies` must be nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Orders that were committed.
    pub committed: u64,
    /// Committed, and the handler never did its work.
    pub lost: u64,
    /// The handler did work for what was never committed.
    pub phantom: u64,
    /// The handler did the work of one order more than once.
    pub doubled: u64,
    /// Works of a customer done before an earlier one.
    pub disordered: u64,
    /// Messages that are not Sent.
    pub unsent: u64,
    /// Messages that nobody acknowledged.
    pub unacknowledged: u64,
    /// Settlements that the store took from a relay whose lane had gone to another.
    pub stale: u64,
    /// Messages that more than one settlement made Sent.
    pub resettled: u64,
    /// Copies in the broker's log beyond the first: allowed after a crash, and recognised by the inbox.
    pub copies: u64,
    /// Settlements that the store refused because they came too late.
    pub fenced: u64,
}

impl Report {
    /// Whether every promise was kept.
    ///
    /// # Errors
    /// The report, when one was not.
    pub fn verdict(&self) -> Result<()> {
        let Self { committed, copies, fenced, .. } = *self;
        let clean = Self { committed, copies, fenced, ..Self::default() };
        ensure!(*self == clean && committed > 0, "a promise was broken: {self}");
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { committed, lost, phantom, doubled, disordered, unsent, unacknowledged, .. } = self;
        let Self { stale, resettled, copies, fenced, .. } = self;
        write!(
            f,
            "committed {committed}, lost {lost}, phantom {phantom}, doubled {doubled}, disordered {disordered}, \
             unsent {unsent}, unacknowledged {unacknowledged}, stale settles {stale}, settled twice {resettled}, \
             copies in the broker {copies}, settles fenced {fenced}"
        )
    }
}

/// Compares.
///
/// # Errors
/// When a database or a trail cannot be read or is damaged.
pub async fn check(ground: &Ground) -> Result<Report> {
    let (shop, folder) = (ground.shop(), ground.folder());
    let outbox = shop.outbox().await?;
    let audit = audit(folder)?;
    // Other brokers are asked by their consumers: what they hold twice, the inbox has seen.
    let stored = if ground.broker().is_none() { stored(folder)? } else { outbox.messages };
    Ok(Report {
        unsent: outbox.unsent,
        unacknowledged: outbox.unacknowledged,
        stale: audit.stale,
        resettled: audit.twice,
        copies: stored.saturating_sub(outbox.messages),
        fenced: audit.fenced,
        ..compare(&shop.orders().await?, &shop.effects().await?)
    })
}

/// Messages that the embedded broker was ever given.
fn stored(folder: &Path) -> Result<u64> {
    let broker = Connection::open(broker_path(folder))?;
    let integrity: String = broker.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
    ensure!(integrity == "ok", "the broker's log is damaged: {integrity}");
    Ok(broker.query_row("SELECT sum(next) FROM broker_partitions", [], |row| row.get(0))?)
}

/// What was committed against what was done.
pub(crate) fn compare(orders: &[Order], effects: &[Order]) -> Report {
    let committed: HashSet<&Order> = orders.iter().collect();
    let done: HashSet<&Order> = effects.iter().collect();
    let mut last: HashMap<&str, u64> = HashMap::new();
    let disordered = effects
        .iter()
        .filter(|effect| last.insert(&effect.customer, effect.n).is_some_and(|before| effect.n <= before));
    Report {
        committed: orders.len() as u64,
        disordered: disordered.count() as u64,
        lost: committed.difference(&done).count() as u64,
        phantom: done.difference(&committed).count() as u64,
        doubled: (effects.len() - done.len()) as u64,
        ..Report::default()
    }
}
