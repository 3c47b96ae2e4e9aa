//! The checker: what was committed against what was done. It reads the databases and nothing else.

use std::fmt;
use std::path::Path;

use anyhow::{Result, ensure};
use rusqlite::Connection;

use crate::worker::{GROUP, broker_path, store_path};

/// What the checker found. Everything up to `broker_copies` must be nothing.
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
    /// Works of a key done before an earlier one of it.
    pub disordered: u64,
    /// Messages that are not Sent.
    pub unsent: u64,
    /// Messages that nobody acknowledged.
    pub unacknowledged: u64,
    /// Copies in the broker's log beyond the first: allowed after a crash, and recognised by the inbox.
    pub broker_copies: u64,
}

impl Report {
    /// Whether every promise was kept.
    ///
    /// # Errors
    /// The report, when one was not.
    pub fn verdict(&self) -> Result<()> {
        let clean = Self { committed: self.committed, broker_copies: self.broker_copies, ..Self::default() };
        ensure!(*self == clean && self.committed > 0, "a promise was broken: {self}");
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { committed, lost, phantom, doubled, disordered, unsent, unacknowledged, broker_copies } =
            self;
        write!(
            f,
            "committed {committed}, lost {lost}, phantom {phantom}, doubled {doubled}, disordered {disordered}, \
             unsent {unsent}, unacknowledged {unacknowledged}, copies in the broker {broker_copies}"
        )
    }
}

/// Compares.
///
/// # Errors
/// When a database cannot be read or is damaged.
pub fn check(data: &Path) -> Result<Report> {
    let store = Connection::open(store_path(data))?;
    let broker = Connection::open(broker_path(data))?;
    for connection in [&store, &broker] {
        let integrity: String = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
        ensure!(integrity == "ok", "a database is damaged: {integrity}");
    }
    let count = |sql: &str| store.query_row(sql, [], |row| row.get::<_, u64>(0));
    Ok(Report {
        committed: count("SELECT count(*) FROM orders")?,
        lost: count("SELECT count(*) FROM (SELECT key, n FROM orders EXCEPT SELECT key, n FROM effects)")?,
        phantom: count("SELECT count(*) FROM (SELECT key, n FROM effects EXCEPT SELECT key, n FROM orders)")?,
        doubled: count("SELECT count(*) - count(DISTINCT key || '/' || n) FROM effects")?,
        disordered: count(
            "SELECT count(*) FROM (SELECT n, lag(n) OVER (PARTITION BY key ORDER BY position) AS before FROM effects)
             WHERE n <= before",
        )?,
        unsent: count("SELECT count(*) FROM outbox_events WHERE status <> 'sent'")?,
        unacknowledged: store.query_row(
            "SELECT count(*) FROM outbox_events e
             WHERE NOT EXISTS (SELECT 1 FROM acknowledgements a WHERE a.seq = e.seq AND a.grp = ?1)",
            [GROUP],
            |row| row.get(0),
        )?,
        broker_copies: broker
            .query_row("SELECT sum(next) FROM broker_partitions", [], |row| row.get::<_, u64>(0))?
            .saturating_sub(count("SELECT count(*) FROM outbox_events")?),
    })
}
