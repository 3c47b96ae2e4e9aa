//! What goes wrong on purpose: processes killed at random moments, and at every named point.

use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::Rng;

use crate::check::{Report, check};

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

/// A worker takes longer than this only if something is stuck.
const PATIENCE: Duration = Duration::from_secs(600);

/// How to start workers: this program, with these numbers.
#[derive(Clone, Debug)]
pub struct Nemesis<'a> {
    /// The `proof` program.
    pub program: &'a Path,
    /// The folder of the databases.
    pub data: &'a Path,
    /// Orders to commit.
    pub messages: u64,
    /// Keys to spread them over.
    pub keys: u64,
    /// The lease of lanes and partitions.
    pub lease: Duration,
}

impl Nemesis<'_> {
    /// Starts a worker.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn worker(&self, extra: &[&str]) -> Result<Child> {
        Command::new(self.program)
            .arg("worker")
            .arg("--data")
            .arg(self.data)
            .args(["--messages", &self.messages.to_string(), "--keys", &self.keys.to_string()])
            .args(["--lease", &humantime::format_duration(self.lease).to_string()])
            .args(extra)
            .spawn()
            .context("cannot start a worker")
    }

    /// Kills the worker `kills` times, each time after `least` to `most`, lets the last one finish, and checks.
    ///
    /// # Errors
    /// When a worker fails by itself or the databases cannot be read.
    pub fn kill(&self, kills: u32, least: Duration, most: Duration) -> Result<(Report, u32)> {
        let mut killed = 0;
        for _ in 0..kills {
            let mut worker = self.worker(&[])?;
            std::thread::sleep(rand::rng().random_range(least..=most));
            if let Some(status) = worker.try_wait()? {
                // It was done before we came.
                ensure!(status.success(), "the worker failed by itself: {status}");
                break;
            }
            worker.kill()?;
            worker.wait()?;
            killed += 1;
        }
        self.finish()?;
        Ok((check(self.data)?, killed))
    }

    /// Lets the worker crash `times` times at `point`, then finish, and checks.
    ///
    /// # Errors
    /// When the point is never reached, a worker fails otherwise, or the databases cannot be read.
    pub fn crash_at(&self, point: &str, times: u32) -> Result<Report> {
        for time in 1..=times {
            // Not always the first batch: later ones find half-done work behind them.
            let status = wait(self.worker(&["--crash", &format!("{point}={time}")])?)?;
            ensure!(!status.success(), "{point} was never reached");
            ensure!(status.code().is_none(), "the worker failed by itself at {point}: {status}");
        }
        self.finish()?;
        check(self.data)
    }

    /// Lets a worker finish undisturbed.
    ///
    /// # Errors
    /// When it fails.
    pub fn finish(&self) -> Result<()> {
        let status = wait(self.worker(&[])?)?;
        ensure!(status.success(), "the last worker failed: {status}");
        Ok(())
    }
}

/// Waits for a worker's end.
///
/// # Errors
/// When it hangs; it is killed then.
pub fn wait(mut worker: Child) -> Result<ExitStatus> {
    let started = Instant::now();
    loop {
        if let Some(status) = worker.try_wait()? {
            return Ok(status);
        }
        if started.elapsed() > PATIENCE {
            worker.kill()?;
            worker.wait()?;
            anyhow::bail!("a worker hung for {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
