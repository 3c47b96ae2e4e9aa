//! What is done to the workers, each on fresh ground, each ending with the checker.
//!
//! The numbers that the command takes when none are given are those of the full proof; tests use smaller ones. A
//! scenario that did not bite (no kill came in time, nothing was ever fenced) fails: it proves nothing.

mod clocks;
mod crash;
mod exact;
mod handle;
mod kill;
mod lanes;
mod once;
mod restart;
mod stop;
mod writers;

pub use clocks::Clocks;
pub use crash::{CRASH_POINTS, Crash};
pub use exact::Exact;
pub use handle::Handle;
pub use kill::Kill;
pub use lanes::ChangeLanes;
pub use once::Once;
pub use restart::{BROKERS, Restart};
pub use stop::Stop;
pub use writers::Writers;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::ground::Ground;
use crate::nemesis::{Nemesis, Worker};

/// Something that is done to workers.
pub trait Scenario {
    /// How many customers it needs.
    ///
    /// # Errors
    /// What else it needs and does not find.
    fn needs(&self, store: &str) -> Result<u64>;

    /// Lets it happen, with workers that are this `program`, and answers the figures.
    ///
    /// # Errors
    /// When a promise was broken, or nothing was shown.
    fn happen(&self, program: &Path, ground: &Ground) -> impl Future<Output = Result<String>>;
}

/// Lets a scenario happen on fresh ground of the server at `store`, and answers its figures.
///
/// # Errors
/// When a promise was broken or nothing was shown, and where to look.
pub async fn prove(scenario: &impl Scenario, program: &Path, store: &str) -> Result<String> {
    let ground = Ground::fresh(store, scenario.needs(store)?).await?;
    ground.during(async |ground| scenario.happen(program, ground).await).await
}

/// Waits until `worker` has died of its crash, while `others` go on.
async fn died(nemesis: &Nemesis<'_>, mut worker: Worker, others: &mut [Worker]) -> Result<()> {
    let mut end = None;
    nemesis
        .until("the crash", others, async || {
            end = worker.ended()?;
            Ok(end.is_some())
        })
        .await?;
    let status = end.context("it has ended")?;
    ensure!(status.code().is_none(), "the worker failed by itself: {status}");
    Ok(())
}

/// Short, because every death is waited for so long.
const SHORT_LEASE: Duration = Duration::from_millis(500);

/// So long that only a fault ends it, also on a busy machine.
const LONG_LEASE: Duration = Duration::from_secs(15);

/// Only relays.
const RELAY: &[&str] = &["--only", "relay"];

/// Only a consumer.
const CONSUMER: &[&str] = &["--only", "consumer"];
