//! Many writers whose transactions overlap, one of them stopped while it holds a low number.
//!
//! Beside the relays runs a naive one that reads whatever lies behind the last number it saw. It must miss messages: if
//! it does not, transactions did not overlap and the scenario proves nothing.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::{CONSUMER, LONG_LEASE, RELAY, Scenario};
use crate::ground::Ground;
use crate::nemesis::{Nemesis, Worker};
use crate::shop::Shop;

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct Writers {
    /// Orders to commit.
    #[arg(long, default_value_t = 200_000)]
    pub messages: u64,
    /// Customers to spread them over.
    #[arg(long, default_value_t = 1_000)]
    pub keys: u64,
    /// Writers side by side.
    #[arg(long, default_value_t = 16)]
    pub writers: u32,
    /// The longest time that a transaction stays open.
    #[arg(long, default_value = "15ms", value_parser = humantime::parse_duration)]
    pub open: Duration,
    /// How long one writer is stopped between its last statement and its commit.
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    pub stall: Duration,
}

impl Scenario for Writers {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: LONG_LEASE };
        let mut others = (0..3).map(|_| nemesis.worker(RELAY)).collect::<Result<Vec<_>>>()?;
        let relays: Vec<_> = others.iter().map(Worker::relay_name).collect();
        others.push(nemesis.worker(CONSUMER)?);
        nemesis.until_lanes_are_shared(&mut others, &relays).await?;

        // Where transactions overlap, one is stopped with a low number in its hands and a naive relay reads along.
        let overlapping = ground.shop().cursor().is_some();
        let naive = overlapping.then(|| Naive::start(ground.shop().clone()));
        let late = if overlapping { Some(Late::stop(&nemesis, &mut others).await?) } else { None };
        self.write(&nemesis, self.messages * 9 / 10, &mut others).await?;
        let mut writers = Vec::new();
        if let Some(late) = late {
            writers.push(late.go_on(self.stall).await?);
        }
        // The late one commits now, and at once others write for the same customers.
        self.write(&nemesis, self.messages, &mut others).await?;
        let report = nemesis.finish(writers, others).await?;

        ensure!(report.copies == 0, "without faults, no message is sent twice: {report}");
        ensure!(report.committed >= self.messages, "only {} orders came about", report.committed);
        let mut figures = format!("{} writers: {report}", self.writers);
        if let Some(naive) = naive {
            let missed = report.committed - naive.seen().await?;
            ensure!(missed > 0, "a naive relay would have missed nothing: this proves too little; {report}");
            figures += &format!(", a naive relay missed {missed}");
        }
        Ok(figures)
    }
}

impl Writers {
    /// Lets all writers work until there are `messages`, and the relays send them.
    async fn write(&self, nemesis: &Nemesis<'_>, messages: u64, others: &mut Vec<Worker>) -> Result<()> {
        let (count, open) = (self.writers.to_string(), humantime::format_duration(self.open).to_string());
        let (target, only) = (messages.to_string(), ["--only", "producer"]);
        let size = ["--messages", &target, "--writers", &count, "--open", &open];
        others.push(nemesis.worker(&[&only[..], &size].concat())?);
        nemesis.until_counts(others, |counts| counts.publish_success_total >= messages).await?;
        others.pop().context("the writers are the last of them")?.close().await
    }
}

/// A writer that is stopped between its last statement and its commit.
struct Late {
    worker: Worker,
    since: Instant,
}

impl Late {
    async fn stop(nemesis: &Nemesis<'_>, others: &mut [Worker]) -> Result<Self> {
        let worker = nemesis.worker(&["--only", "producer", "--stall"])?;
        nemesis.until("the late writer is stopped", others, async || worker.is_stopped()).await?;
        Ok(Self { worker, since: Instant::now() })
    }

    /// Lets it commit, not before it was stopped for `stall`.
    async fn go_on(self, stall: Duration) -> Result<Worker> {
        tokio::time::sleep(stall.saturating_sub(self.since.elapsed())).await;
        ensure!(self.worker.is_stopped()?, "the late writer went on by itself");
        self.worker.signal(Signal::CONT)?;
        Ok(self.worker)
    }
}

/// Reads on from the last number it saw, again and again.
struct Naive {
    end: Arc<Notify>,
    reader: JoinHandle<Result<u64>>,
}

impl Naive {
    fn start(shop: Arc<dyn Shop>) -> Self {
        let end = Arc::new(Notify::new());
        let ended = end.clone();
        let reader = tokio::spawn(async move {
            let cursor = shop.cursor().context("somewhere to read")?;
            let (mut seen, mut last) = (0, 0);
            loop {
                let ended = tokio::time::timeout(Duration::from_millis(1), ended.notified()).await.is_ok();
                let new = cursor.after(last).await?;
                last = new.last().copied().unwrap_or(last);
                seen += new.len() as u64;
                if ended {
                    return Ok(seen);
                }
            }
        });
        Self { end, reader }
    }

    /// How many it saw in the end.
    async fn seen(self) -> Result<u64> {
        self.end.notify_one();
        self.reader.await?
    }
}
