//! A consumer that acknowledges to its producer after its work, in the store they share, by HTTP or by a topic, and dies
//! between any two steps of it. Each effect happens once, and no message is ever acknowledged whose effect is not committed.

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rand::Rng;

use super::{CONSUMER, SHORT_LEASE, Scenario, died};
use crate::ground::Ground;
use crate::listener;
use crate::nemesis::Nemesis;
use crate::server::{self, blocking};
use crate::shop::{Order, Shop};

/// Between effect, mark, the word to the producer and the word to the broker.
const POINTS: [&str; 6] = [
    "inbox::received",
    "inbox::handled",
    "inbox::marked",
    "inbox::acknowledged",
    "broker::acknowledged",
    "inbox::finished",
];

/// Transactions of orders in a second.
const PACE: &str = "50";

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct Handle {
    /// Crashes at each of six points.
    #[arg(long, default_value_t = 34)]
    pub crashes: u32,
    /// Customers to spread orders over.
    #[arg(long, default_value_t = 200)]
    pub keys: u64,
    /// How the group tells its producer: in the store that they share, by HTTP to the producer's API, or by a topic of Kafka
    /// that the producer listens to.
    #[arg(long, default_value = "store", value_parser = ["store", "http", "topic"])]
    pub acknowledge: String,
}

impl Scenario for Handle {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: SHORT_LEASE };
        let mut said = None;
        ground.acknowledge_by(match self.acknowledge.as_str() {
            "http" => listener::free_url()?,
            "topic" => {
                let (server, url) = server::start("kafka").await?;
                said = Some(server);
                url
            }
            _ => "store".to_owned(),
        });
        let hears = if self.acknowledge == "store" { "relay" } else { "relay,listener" };
        let writer = nemesis.worker(&["--only", "producer", "--pace", PACE])?;
        let mut relay = [nemesis.worker(&["--only", hears])?];
        let mut between = 0;
        for time in 1..=self.crashes {
            for point in POINTS {
                // Not always with the first batch: later ones find half-done work behind them.
                let crash = format!("{point}={}", rand::rng().random_range(1..=3));
                let consumer = nemesis.worker(&["--only", "consumer", "--crash", &crash])?;
                died(&nemesis, consumer, &mut relay)
                    .await
                    .with_context(|| format!("{point}, time {time}"))?;
                between += u32::from(done_and_not_acknowledged(&**ground.shop()).await? > 0);
            }
        }
        let consumer = nemesis.worker(CONSUMER)?;
        let others = relay.into_iter().chain([consumer]).collect();
        let report = nemesis.finish(vec![writer], others).await?;
        blocking(move || drop(said)).await?;
        let crashes = self.crashes * POINTS.len() as u32;
        ensure!(between > 0, "no crash came between an effect and its acknowledgement: {report}");
        Ok(format!(
            "{crashes} crashes, acknowledged by {}, {between} of them between effects and their acknowledgement: {report}",
            self.acknowledge
        ))
    }
}

/// How many effects nobody has acknowledged yet.
async fn done_and_not_acknowledged(shop: &dyn Shop) -> Result<usize> {
    // In this order: an effect that is committed stays.
    let acknowledged = shop.acknowledged().await?;
    let effects = shop.effects().await?;
    let done: HashSet<&Order> = effects.iter().collect();
    let early = acknowledged.iter().filter(|order| !done.contains(order)).count();
    ensure!(early == 0, "a promise was broken: {early} are acknowledged and not done");
    Ok(done.len() - acknowledged.len())
}
