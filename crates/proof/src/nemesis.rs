//! What goes wrong on purpose: workers are started, killed, stopped for a while and let go on.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use store::Counts;
use tokio::process::{Child, Command};

use crate::check::{Report, check};
use crate::ground::Ground;

/// Nothing moves for as long as this only if something is stuck.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// How to start workers: this program, on this ground.
#[derive(Clone, Copy)]
pub struct Nemesis<'a> {
    /// The `proof` program.
    pub program: &'a Path,
    /// Where it all happens.
    pub ground: &'a Ground,
    /// Customers.
    pub keys: u64,
    /// The lease of lanes and partitions.
    pub lease: Duration,
}

impl Nemesis<'_> {
    /// Starts a worker with these arguments.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn worker(&self, arguments: &[&str]) -> Result<Worker> {
        self.worker_with(arguments, &[])
    }

    /// Starts a worker with these arguments and variables.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn worker_with(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Result<Worker> {
        let address = self.ground.address();
        let child = Command::new(self.program)
            .arg("worker")
            .arg("--folder")
            .arg(self.ground.folder())
            .args(["--name", &address.name, "--keys", &self.keys.to_string()])
            .args(["--lease", &humantime::format_duration(self.lease).to_string()])
            .args(arguments)
            // Not an argument: others can read those, and it may hold a password.
            .env("POSTRIDER_PROOF_STORE", &address.store)
            .env("POSTRIDER_PROOF_BROKER", self.ground.broker().unwrap_or_default())
            .env("POSTRIDER_PROOF_ACKNOWLEDGE", self.ground.acknowledge())
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a worker")?;
        let pid =
            child.id().and_then(|id| Pid::from_raw(id.cast_signed())).context("a worker without a number")?;
        Ok(Worker { child, pid })
    }

    /// Waits until `fact` is true while all of `workers` go on. `what` says what was missing.
    ///
    /// # Errors
    /// When it does not become true, or a worker ends by itself.
    pub async fn until(
        &self,
        what: &str,
        workers: &mut [Worker],
        mut fact: impl AsyncFnMut() -> Result<bool>,
    ) -> Result<Duration> {
        let started = Instant::now();
        while !fact().await? {
            for worker in &mut *workers {
                worker.at_work()?;
            }
            ensure!(started.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
            tokio::time::sleep(PAUSE).await;
        }
        Ok(started.elapsed())
    }

    /// Waits until relays of these names, and only they, share all lanes.
    ///
    /// # Errors
    /// When they do not, or a worker ends by itself.
    pub async fn until_lanes_are_shared(
        &self,
        workers: &mut [Worker],
        relays: &[String],
    ) -> Result<Duration> {
        let store = self.ground.shop().store();
        self.until("the relays share the lanes", workers, async || {
            let lanes = store.lanes().await?;
            let held = |relay: &String| lanes.iter().any(|lane| lane.owner.as_ref() == Some(relay));
            let known = |owner: &Option<String>| owner.as_ref().is_some_and(|owner| relays.contains(owner));
            Ok(relays.iter().all(held) && lanes.iter().all(|lane| known(&lane.owner)))
        })
        .await
    }

    /// Waits until `relay` has messages in its hands.
    ///
    /// # Errors
    /// When it never does.
    pub async fn until_busy(&self, workers: &mut [Worker], relay: &str) -> Result<Duration> {
        let store = self.ground.shop().store();
        self.until("the relay has something in flight", workers, async || {
            let lanes = store.lanes().await?;
            Ok(lanes.iter().any(|lane| lane.owner.as_deref() == Some(relay) && lane.in_flight > 0))
        })
        .await
    }

    /// Waits until the store's counts are as they should be. Fails when nothing moves, or when a worker ends.
    ///
    /// # Errors
    /// When it does not come to that.
    pub async fn until_counts(
        &self,
        workers: &mut [Worker],
        reached: impl Fn(&Counts) -> bool,
    ) -> Result<()> {
        let mut moved = (Instant::now(), (0, 0));
        loop {
            let counts = self.ground.shop().store().counts().await?;
            if reached(&counts) {
                return Ok(());
            }
            for worker in &mut *workers {
                worker.at_work()?;
            }
            let now = (counts.publish_success_total, counts.acknowledged_total);
            if now != moved.1 {
                moved = (Instant::now(), now);
            }
            ensure!(moved.0.elapsed() < PATIENCE, "nothing has moved for {PATIENCE:?}: {counts:?}");
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Whether `messages` are written, sent and acknowledged.
    ///
    /// # Errors
    /// When the store does not say.
    pub async fn is_done(&self, messages: u64) -> Result<bool> {
        Ok(all_done(&self.ground.shop().store().counts().await?, messages))
    }

    /// Lets `writers` end, then waits until all that they wrote is done, lets `others` end, and checks.
    ///
    /// # Errors
    /// When a worker fails, it does not come to an end, or a promise was broken.
    pub async fn finish(&self, writers: Vec<Worker>, mut others: Vec<Worker>) -> Result<Report> {
        for writer in writers {
            writer.close().await?;
        }
        let messages = self.ground.shop().outbox().await?.messages;
        self.until_counts(&mut others, |counts| all_done(counts, messages)).await?;
        for worker in others {
            worker.close().await?;
        }
        let report = check(self.ground).await?;
        report.verdict()?;
        Ok(report)
    }

    /// Starts one worker that does everything, lets it write until there are `messages`, and finishes.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub async fn finish_alone(&self, messages: u64) -> Result<Report> {
        let mut worker = [self.worker(&["--messages", &messages.to_string()])?];
        self.until_counts(&mut worker, |counts| all_done(counts, messages)).await?;
        self.finish(Vec::new(), worker.into()).await
    }
}

fn all_done(counts: &Counts, messages: u64) -> bool {
    counts.sent == messages && counts.acknowledged_total >= messages
}

/// A process at work. Killed when it is dropped.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    pid: Pid,
}

impl Worker {
    /// What people see of its relay.
    pub fn relay_name(&self) -> String {
        format!("relay-{}", self.pid.as_raw_nonzero())
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(self.pid, signal).with_context(|| format!("cannot send {signal:?} to a worker"))
    }

    /// Whether a signal has stopped it.
    ///
    /// # Errors
    /// When it is gone.
    pub fn is_stopped(&self) -> Result<bool> {
        let stat = PathBuf::from(format!("/proc/{}/stat", self.pid.as_raw_nonzero()));
        let stat = std::fs::read_to_string(stat).context("a worker is gone")?;
        Ok(stat.rsplit(") ").next().is_some_and(|state| state.starts_with('T')))
    }

    /// Fails if it has ended.
    ///
    /// # Errors
    /// How it ended.
    pub fn at_work(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("a worker ended by itself: {status}"),
        }
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn ended(&mut self) -> Result<Option<std::process::ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Kills it as `kill -9` does.
    ///
    /// # Errors
    /// When it has ended by itself, and not well.
    pub async fn kill(mut self) -> Result<()> {
        self.at_work()?;
        Ok(self.child.kill().await?)
    }

    /// Tells it to end and waits until it has.
    ///
    /// # Errors
    /// When it fails or hangs.
    pub async fn close(mut self) -> Result<()> {
        drop(self.child.stdin.take());
        let status = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        let status = status.with_context(|| format!("a worker did not end within {PATIENCE:?}"))??;
        ensure!(status.success(), "a worker failed: {status}");
        Ok(())
    }
}
