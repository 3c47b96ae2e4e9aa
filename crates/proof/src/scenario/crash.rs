//! The whole arrow crashes at every boundary between claim and acknowledgement.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{SHORT_LEASE, Scenario};
use crate::ground::Ground;
use crate::nemesis::Nemesis;

/// Every boundary at which a process may die, in the order of the arrow.
pub const CRASH_POINTS: [&str; 11] = [
    "relay::claimed",
    "broker::publishing",
    "broker::published",
    "relay::published",
    "relay::settled",
    "inbox::received",
    "inbox::handled",
    "inbox::marked",
    "inbox::acknowledged",
    "broker::acknowledged",
    "inbox::finished",
];

/// So long a process may take from its last commit to its crash.
const DYING: Duration = Duration::from_secs(5);

/// Customers.
const KEYS: u64 = 100;

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct Crash {
    /// Orders to commit for each point.
    #[arg(long, default_value_t = 5_000)]
    pub messages: u64,
    /// Crashes at each point.
    #[arg(long, default_value_t = 3)]
    pub times: u32,
}

impl Scenario for Crash {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(KEYS)
    }

    /// Each point in turn, all on one ground: later points find what earlier ones left.
    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: KEYS, lease: SHORT_LEASE };
        let mut last = None;
        for (messages, point) in (1..).map(|run| run * self.messages).zip(CRASH_POINTS) {
            for time in 1..=self.times {
                crash(&nemesis, messages, point, time).await.context(point)?;
            }
            last = Some(nemesis.finish_alone(messages).await.context(point)?);
        }
        let report = last.context("there are points")?;
        Ok(format!("{} crashes at each of {} points: {report}", self.times, CRASH_POINTS.len()))
    }
}

/// Lets a worker crash at `point`, and not always with the first batch: later ones find half-done work behind them.
async fn crash(nemesis: &Nemesis<'_>, messages: u64, point: &str, time: u32) -> Result<()> {
    let crash = format!("{point}={time}");
    let mut worker = nemesis.worker(&["--messages", &messages.to_string(), "--crash", &crash])?;
    let (mut end, mut done) = (None, None);
    let wait = nemesis.until("the crash", &mut [], async || {
        end = worker.ended()?;
        if end.is_none() && nemesis.is_done(messages).await? {
            // The last commit may be the step right before the point, and its process about to die.
            let since: &mut Instant = done.get_or_insert_with(Instant::now);
            if since.elapsed() > DYING {
                bail!("everything was done before the point was reached {time} times");
            }
        }
        Ok(end.is_some())
    });
    wait.await?;
    let status = end.context("it has ended")?;
    ensure!(status.code().is_none(), "the worker failed by itself: {status}");
    Ok(())
}
