//! A route that promises exactly once into Kafka or the embedded broker: its relay dies at every point of the transaction,
//! and is stopped for longer than its leases last. The log, read as committed, has each message once.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use broker::Surroundings;
use message::MessageId;
use rand::Rng;
use rustix::process::Signal;
use testkit::servers::Own;

use super::{CONSUMER, SHORT_LEASE, Scenario, blocking, died};
use crate::ground::{Ground, broker_path};
use crate::nemesis::{Nemesis, Worker};
use crate::shop::TOPIC;

/// Where a relay may die that sends to the embedded broker.
const EMBEDDED_POINTS: [&str; 3] = ["broker::publishing", "broker::published", "relay::settled"];

/// Where one may that sends to Kafka: with lanes that it claimed and did not take over, and then in the order of a transaction.
const KAFKA_POINTS: [&str; 6] = [
    "kafka::claimed",
    "kafka::begun",
    "kafka::sent",
    "kafka::committing",
    "kafka::committed",
    "relay::settled",
];

/// Transactions of orders in a second: they go on until the relay dies.
const PACE: &str = "50";

/// The same, while relays are stopped.
const SLOW_PACE: &str = "20";

/// Orders that whoever comes after a crash adds to those it finds.
const MORE: u64 = 20;

/// What comes after the last message, if anything does, comes within this.
const END: Duration = Duration::from_secs(3);

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct Exact {
    /// Crashes at each point.
    #[arg(long, default_value_t = 40)]
    pub crashes: u32,
    /// Stops of a relay for three times its lease, while another takes its lanes.
    #[arg(long, default_value_t = 10)]
    pub stops: u32,
    /// Customers to spread orders over.
    #[arg(long, default_value_t = 200)]
    pub keys: u64,
    /// Where the messages go: kafka or embedded.
    #[arg(long, default_value = "kafka", value_parser = ["kafka", "embedded"])]
    pub broker: String,
}

impl Scenario for Exact {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: SHORT_LEASE };
        let (server, points) = match self.broker.as_str() {
            "embedded" => (None, &EMBEDDED_POINTS[..]),
            _ => (Some(blocking(|| Own::start("kafka")).await?), &KAFKA_POINTS[..]),
        };
        if let Some(server) = &server {
            ground.use_broker(format!("{}?prefix=proof", server.url()));
        }
        let mut consumer = [nemesis.worker(CONSUMER)?];
        for time in 1..=self.crashes {
            for point in points {
                crash(&nemesis, point).await.with_context(|| format!("{point}, time {time}"))?;
                recover(&nemesis).await.with_context(|| format!("after {point}, time {time}"))?;
                consumer[0].at_work()?;
            }
        }
        let writer = nemesis.worker(&["--only", "producer", "--pace", SLOW_PACE])?;
        let mut others = vec![relay(&nemesis, &[])?, relay(&nemesis, &[])?];
        let relays: Vec<_> = others.iter().map(Worker::relay_name).collect();
        others.extend(consumer);
        for time in 0..self.stops {
            nemesis.until_lanes_are_shared(&mut others, &relays).await?;
            let stopped = &others[time as usize % relays.len()];
            stopped.signal(Signal::STOP)?;
            tokio::time::sleep(SHORT_LEASE * 3).await;
            stopped.signal(Signal::CONT)?;
        }
        let report = nemesis.finish(vec![writer], others).await?;
        let url = ground.broker().unwrap_or("embedded://");
        let log = log(url, ground.folder(), report.committed).await?;
        let once: HashSet<&MessageId> = log.iter().collect();
        let (crashes, stops) = (self.crashes * points.len() as u32, self.stops);
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
    // Lanes are claimed once.
    let most = if point == "kafka::claimed" { 1 } else { 3 };
    let crash = format!("{point}={}", rand::rng().random_range(1..=most));
    died(nemesis, selling(nemesis, &["--pace", PACE, "--crash", &crash])?, &mut []).await
}

/// Lets all of them be sent, and a few more: what dies with relays again and again is put aside for a person.
async fn recover(nemesis: &Nemesis<'_>) -> Result<()> {
    let messages = nemesis.ground.shop().orders().await?.len() as u64 + MORE;
    let mut worker = [selling(nemesis, &["--messages", &messages.to_string()])?];
    nemesis.until_counts(&mut worker, |counts| counts.sent == messages).await?;
    let [worker] = worker;
    worker.kill().await
}

fn selling(nemesis: &Nemesis<'_>, more: &[&str]) -> Result<Worker> {
    nemesis.worker(&[&["--only", "producer,relay", "--exact"], more].concat())
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
