//! Relays whose clocks are wrong by an hour, with a broker that turns many messages away.
//!
//! All times are the store's. A relay that reckoned with its own clock would take a lane that another holds, or try a
//! message before its wait is over, or leave it for an hour.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use store::{Filter, Page, Record, Store};

use super::{LONG_LEASE, Scenario};
use crate::ground::Ground;
use crate::nemesis::{Nemesis, Worker};
use crate::trail::audit;
use crate::worker::retry;

/// How far ahead each relay's clock is, in seconds.
const AHEAD: [i64; 4] = [-3_600, -5, 5, 3_600];

/// Clocks are wrong by as much as they were told to be, give or take this, in milliseconds.
const SLACK: u64 = 2_000;

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct Clocks {
    /// Orders to commit.
    #[arg(long, default_value_t = 20_000)]
    pub messages: u64,
    /// Customers to spread them over.
    #[arg(long, default_value_t = 2_000)]
    pub keys: u64,
    /// The share of messages that the broker turns away each time.
    #[arg(long, default_value_t = 0.3)]
    pub failing: f64,
}

impl Scenario for Clocks {
    fn needs(&self, store: &str) -> Result<u64> {
        ensure!(
            !store.starts_with("sqlite"),
            "SQLite runs inside each process and takes its time from there: on one machine there is one clock"
        );
        faketime()?;
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: LONG_LEASE };
        let library = faketime()?;
        let failing = self.failing.to_string();
        let relay = |ahead: i64| {
            let ahead = format!("{ahead:+}");
            // Only what the time is: how long something takes is the same for everybody.
            let variables = [("LD_PRELOAD", &*library), ("FAKETIME", &ahead), ("DONT_FAKE_MONOTONIC", "1")];
            nemesis.worker_with(&["--only", "relay", "--failing", &failing], &variables)
        };
        let mut workers = AHEAD.into_iter().map(relay).collect::<Result<Vec<_>>>()?;
        let relays: Vec<_> = workers.iter().map(Worker::relay_name).collect();
        nemesis.until_lanes_are_shared(&mut workers, &relays).await?;
        workers.push(nemesis.worker(&[
            "--only",
            "producer,consumer",
            "--messages",
            &self.messages.to_string(),
        ])?);
        nemesis.until_counts(&mut workers, |counts| counts.publish_success_total >= self.messages).await?;
        let report = nemesis.finish(Vec::new(), workers).await?;

        ensure!(report.copies == 0, "a message was claimed twice: {report}");
        clocks_were_wrong(ground)?;
        let (retries, early) = retries(&*ground.shop().store()).await?;
        ensure!(retries > 0, "nothing was tried again, so this proves nothing: {report}");
        ensure!(early == 0, "{early} of {retries} retries came before their wait was over; {report}");
        Ok(format!("clocks {AHEAD:?} s ahead: {report}, retries {retries}, early {early}"))
    }
}

/// Where the library is that tells a process a wrong time.
fn faketime() -> Result<String> {
    let folders = std::fs::read_dir("/usr/lib")?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut places = folders.chain([PathBuf::from("/usr/lib"), PathBuf::from("/usr/local/lib")]);
    let found = places.find_map(|place| {
        let library = place.join("faketime/libfaketimeMT.so.1");
        library.exists().then(|| library.to_string_lossy().into_owned())
    });
    found.context("libfaketime is not there: install it with `apt-get install faketime`")
}

/// Each relay's clock was as wrong as it was told to be, and each did some of the work.
fn clocks_were_wrong(ground: &Ground) -> Result<()> {
    let relays = audit(ground.folder())?.relays;
    for ahead in AHEAD {
        let told = |(is, _): &&(i64, u64)| is.abs_diff(ahead * 1_000) < SLACK;
        let (_, settled) = relays.iter().find(told).with_context(|| {
            format!("no relay's clock was {ahead} s ahead: libfaketime does not work here; {relays:?}")
        })?;
        ensure!(*settled > 0, "the relay whose clock is {ahead} s ahead did nothing");
    }
    Ok(())
}

/// How many times messages were tried again, and how many of those times too early, by the store's clock.
async fn retries(store: &dyn Store) -> Result<(u64, u64)> {
    let (policy, mut retries, mut early) = (retry(), 0, 0);
    let mut after = None;
    loop {
        let page = store.list(&Filter::default(), Page { after, limit: 500, newest_first: false }).await?;
        for record in page.items.iter().filter(|record| record.state.attempts > 0) {
            let waits = waits(store, record).await?;
            retries += waits.len() as u64;
            early +=
                waits.iter().filter(|(attempt, wait)| *wait < policy.least_delay(*attempt)).count() as u64;
        }
        after = page.next;
        if after.is_none() {
            return Ok((retries, early));
        }
    }
}

/// The waits of a message, each with the number of the failure before it. A try is written down when it has ended, so
/// none of them looks shorter than it was.
async fn waits(store: &dyn Store, record: &Record) -> Result<Vec<(u32, Duration)>> {
    let mut ends: Vec<_> =
        store.attempts(record.message.id).await?.iter().map(|attempt| attempt.at).collect();
    // Of many failures only the last are kept.
    let first = 1 + record.state.attempts.saturating_sub(u32::try_from(ends.len())?);
    ends.extend(record.sent_at);
    let waits = ends.windows(2).map(|pair| (pair[1] - pair[0]).to_std().unwrap_or_default());
    Ok((first..).zip(waits).collect())
}
