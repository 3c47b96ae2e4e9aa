//! A consumer that acknowledges to its producer after its work, and dies between any two steps of it. Each effect happens
//! once, and no message is ever acknowledged whose effect is not committed.

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rand::Rng;

use super::{SHORT_LEASE, Scenario, died};
use crate::ground::Ground;
use crate::nemesis::Nemesis;
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
}

impl Scenario for Handle {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: SHORT_LEASE };
        let writer = nemesis.worker(&["--only", "producer", "--pace", PACE])?;
        let mut relay = [nemesis.worker(&["--only", "relay"])?];
        let mut between = 0;
        for time in 1..=self.crashes {
            for point in POINTS {
                // Not always with the first batch: later ones find half-done work behind them.
                let crash = format!("{point}={}", rand::rng().random_range(1..=3));
                let consumer = nemesis.worker(&["--only", "consumer", "--apart", "--crash", &crash])?;
                died(&nemesis, consumer, &mut relay)
                    .await
                    .with_context(|| format!("{point}, time {time}"))?;
                between += u32::from(done_and_not_acknowledged(&**ground.shop()).await? > 0);
            }
        }
        let consumer = nemesis.worker(&["--only", "consumer", "--apart"])?;
        let others = relay.into_iter().chain([consumer]).collect();
        let report = nemesis.finish(vec![writer], others).await?;
        let crashes = self.crashes * POINTS.len() as u32;
        ensure!(between > 0, "no crash came between an effect and its acknowledgement: {report}");
        Ok(format!(
            "{crashes} crashes, {between} of them between effects and their acknowledgement: {report}"
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
