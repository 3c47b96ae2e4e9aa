//! A route that promises exactly once, by transactions of Kafka or the embedded broker, or because NATS or Redis Streams
//! recognises what is sent again: its relay dies at every point, and is stopped for longer than its leases last. The log,
//! read as committed, has each message once.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use message::MessageId;
use rand::Rng;
use rustix::process::Signal;

use super::{CONSUMER, SHORT_LEASE, Scenario, died};
use crate::ground::Ground;
use crate::log;
use crate::nemesis::{Nemesis, Worker};
use crate::server::{self, blocking};

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

/// Where one may that sends to a broker which recognises messages. `anywhere` is a kill at a random moment: it finds some
/// messages on their way, and some answers.
const WINDOW_POINTS: [&str; 4] = ["relay::claimed", ANYWHERE, "relay::published", "relay::settled"];
const ANYWHERE: &str = "anywhere";

/// How long a relay lives that is killed at a random moment, at most.
const LIFE: Duration = Duration::from_millis(1_500);

/// How long such a broker recognises a message: longer than any relay is away, and with the planted fault shorter.
const REMEMBERS: Duration = Duration::from_secs(600);
const FORGETS: Duration = Duration::from_secs(1);

/// Transactions of orders in a second: they go on until the relay dies.
const PACE: &str = "50";

/// The same, while relays are stopped.
const SLOW_PACE: &str = "20";

/// Orders that whoever comes after a crash adds to those it finds.
const MORE: u64 = 20;

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
    /// Where the messages go.
    #[arg(long, default_value = "kafka", value_parser = ["kafka", "embedded", "nats", "redis"])]
    pub broker: String,
    /// Plant a fault that has to be found: NATS or Redis recognises a message for a second only, and each relay comes later.
    #[arg(long)]
    pub fault: bool,
}

impl Scenario for Exact {
    fn needs(&self, _: &str) -> Result<u64> {
        let window = ["nats", "redis"].contains(&self.broker.as_str());
        ensure!(window || !self.fault, "{} does not forget: choose nats or redis", self.broker);
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: SHORT_LEASE };
        let (server, points) = match self.broker.as_str() {
            "embedded" => (None, &EMBEDDED_POINTS[..]),
            "nats" => (Some(server::start("nats").await?), &WINDOW_POINTS[..]),
            "redis" => (Some(server::start("redis").await?), &WINDOW_POINTS[..]),
            _ => (Some(server::start("kafka").await?), &KAFKA_POINTS[..]),
        };
        if let Some((_, url)) = &server {
            ground.use_broker(format!("{url}{}", self.window()));
        }
        let mut consumer = [nemesis.worker(CONSUMER)?];
        for time in 1..=self.crashes {
            for point in points {
                crash(&nemesis, point).await.with_context(|| format!("{point}, time {time}"))?;
                if self.fault {
                    // Redis forgets after two windows at the latest.
                    tokio::time::sleep(FORGETS * 2).await;
                }
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
        let log = log::ids(url, ground).await?;
        let once: HashSet<&MessageId> = log.iter().collect();
        let (twice, missing) = (log.len() - once.len(), report.committed.abs_diff(once.len() as u64));
        let (crashes, stops) = (self.crashes * points.len() as u32, self.stops);
        let figures = format!(
            "{crashes} crashes, {stops} stops: committed {}, in the log {}, of them twice {}, not in the log {}; {report}",
            report.committed,
            log.len(),
            twice,
            missing
        );
        ensure!(missing == 0 && (self.fault || twice == 0), "a promise was broken: {figures}");
        ensure!(!self.fault || twice > 0, "nobody noticed the planted fault: {figures}");
        blocking(move || drop(server)).await?;
        Ok(figures)
    }
}

impl Exact {
    /// How long the broker recognises a message, for its URL.
    fn window(&self) -> String {
        let window = if self.fault { FORGETS } else { REMEMBERS };
        let window = humantime::format_duration(window);
        match self.broker.as_str() {
            "nats" => format!("&duplicates={window}"),
            "redis" => format!("&deduplication={window}"),
            _ => String::new(),
        }
    }
}

fn relay(nemesis: &Nemesis<'_>, more: &[&str]) -> Result<Worker> {
    nemesis.worker(&[&["--only", "relay", "--exact"], more].concat())
}

/// Lets a relay die at `point`, not always with its first transaction.
async fn crash(nemesis: &Nemesis<'_>, point: &str) -> Result<()> {
    // Lanes are claimed once.
    let most = if point == "kafka::claimed" { 1 } else { 3 };
    if point == ANYWHERE {
        let relay = selling(nemesis, &["--pace", PACE])?;
        tokio::time::sleep(rand::rng().random_range(LIFE / 10..=LIFE)).await;
        return relay.kill().await;
    }
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
