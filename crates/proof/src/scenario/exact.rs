//! A route that promises exactly once into Kafka: its relay dies at every point of the transaction, and is stopped for
//! longer than its leases last. The log, read as committed, has each message once.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use broker::Surroundings;
use message::MessageId;
use rand::Rng;
use rustix::process::Signal;
use testkit::servers::Own;

use super::{CONSUMER, SHORT_LEASE, Scenario, blocking};
use crate::ground::{Ground, broker_path};
use crate::nemesis::{Nemesis, Worker};
use crate::shop::TOPIC;

/// Where a relay may die, in the order of a transaction.
pub const TRANSACTION_POINTS: [&str; 5] =
    ["kafka::begun", "kafka::sent", "kafka::committing", "kafka::committed", "relay::settled"];

/// Transactions of orders in a second: there is always something to send.
const PACE: &str = "20";

/// What comes after the last message, if anything does, comes within this.
const END: Duration = Duration::from_secs(3);

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct Exact {
    /// Crashes at each point.
    #[arg(long, default_value_t = 40)]
    pub crashes: u32,
    /// Relays that are stopped while another takes their lanes.
    #[arg(long, default_value_t = 10)]
    pub stops: u32,
    /// Customers to spread orders over.
    #[arg(long, default_value_t = 200)]
    pub keys: u64,
}

impl Scenario for Exact {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: SHORT_LEASE };
        let server = blocking(|| Own::start("kafka")).await?;
        ground.use_broker(format!("{}?prefix=proof", server.url()));
        let mut consumer = [nemesis.worker(CONSUMER)?];
        let writer = nemesis.worker(&["--only", "producer", "--pace", PACE])?;
        for time in 1..=self.crashes {
            for point in TRANSACTION_POINTS {
                crash(&nemesis, point).await.with_context(|| format!("{point}, time {time}"))?;
                consumer[0].at_work()?;
            }
        }
        for time in 1..=self.stops {
            stop(&nemesis).await.with_context(|| format!("stop {time}"))?;
        }
        let [consumer] = consumer;
        let report = nemesis.finish(vec![writer], vec![relay(&nemesis, &[])?, consumer]).await?;
        let url = ground.broker().context("it was told")?.to_owned();
        let log = log(&url, ground.folder(), report.committed).await?;
        let once: HashSet<&MessageId> = log.iter().collect();
        let (crashes, stops) = (self.crashes * TRANSACTION_POINTS.len() as u32, self.stops);
        let figures = format!(
            "{crashes} crashes, {stops} stops: committed {}, in the log {}, of them twice {}, not in the log {}; {report}",
            report.committed,
            log.len(),
            log.len() - once.len(),
            report.committed.saturating_sub(once.len() as u64)
        );
        ensure!(
            log.len() == once.len() && once.len() as u64 == report.committed,
            "a promise was broken: {figures}"
        );
        blocking(move || drop(server)).await?;
        Ok(figures)
    }
}

fn relay(nemesis: &Nemesis<'_>, more: &[&str]) -> Result<Worker> {
    nemesis.worker(&[&["--only", "relay", "--exact"], more].concat())
}

/// Lets a relay die at `point`, not always with its first transaction.
async fn crash(nemesis: &Nemesis<'_>, point: &str) -> Result<()> {
    let times = rand::rng().random_range(1..=5);
    let mut worker = relay(nemesis, &["--crash", &format!("{point}={times}")])?;
    let mut end = None;
    nemesis
        .until("the crash", &mut [], async || {
            end = worker.ended()?;
            Ok(end.is_some())
        })
        .await?;
    let status = end.context("it has ended")?;
    ensure!(status.code().is_none(), "the relay failed by itself: {status}");
    Ok(())
}

/// Stops a relay at any moment until another has its lanes and sends, and lets it go on.
async fn stop(nemesis: &Nemesis<'_>) -> Result<()> {
    let store = nemesis.ground.shop().store();
    let sent = async || anyhow::Ok(store.counts().await?.sent);
    let mut first = [relay(nemesis, &[])?];
    let before = sent().await?;
    let some = rand::rng().random_range(1..200);
    nemesis.until("the first relay sends", &mut first, async || Ok(sent().await? >= before + some)).await?;
    first[0].signal(Signal::STOP)?;
    let mut second = [relay(nemesis, &[])?];
    let name = [second[0].relay_name()];
    nemesis.until_lanes_are_shared(&mut second, &name).await?;
    let between = sent().await?;
    nemesis.until("the second relay sends", &mut second, async || Ok(sent().await? > between)).await?;
    first[0].signal(Signal::CONT)?;
    // Both go on for a while, and share the lanes.
    let after = sent().await?;
    let [one] = first;
    let [other] = second;
    let mut both = [one, other];
    nemesis.until("both relays send", &mut both, async || Ok(sent().await? > after + 50)).await?;
    for worker in both {
        worker.kill().await?;
    }
    Ok(())
}

/// The ids in the log, as committed: at least `expected`, and whatever comes after them.
async fn log(url: &str, folder: &Path, expected: u64) -> Result<Vec<MessageId>> {
    let broker = broker::open(url, &Surroundings { file: broker_path(folder), max_payload: 1 << 20 })?;
    let subscriber = broker.subscriber.context("it can be read")?;
    let mut reader = subscriber.subscribe("auditor", &[TOPIC.to_owned()]).await?;
    let mut ids = Vec::new();
    loop {
        let patience = if (ids.len() as u64) < expected { END * 10 } else { END };
        let Ok(more) = tokio::time::timeout(patience, reader.receive(10_000)).await else { break };
        ids.extend(more?.into_iter().map(|delivery| delivery.message.id));
    }
    reader.close().await;
    Ok(ids)
}
