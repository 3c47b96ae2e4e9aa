//! The number of lanes changes under traffic, while a relay joins and another is killed.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{CONSUMER, Scenario};
use crate::ground::Ground;
use crate::nemesis::Nemesis;

/// Up and down, to both ends.
const COUNTS: [u16; 8] = [64, 4, 128, 1, 32, 1024, 2, 16];

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct ChangeLanes {
    /// Changes.
    #[arg(long, default_value_t = 40)]
    pub changes: usize,
    /// The lease of a lane.
    #[arg(long, default_value = "1s", value_parser = humantime::parse_duration)]
    pub lease: Duration,
    /// Transactions in a second.
    #[arg(long, default_value_t = 50)]
    pub pace: u32,
    /// Customers.
    #[arg(long, default_value_t = 500)]
    pub keys: u64,
}

impl Scenario for ChangeLanes {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: self.lease };
        let relay = || nemesis.worker(&["--only", "relay", "--delay", "20ms"]);
        let consumer = nemesis.worker(CONSUMER)?;
        let writer = nemesis.worker(&["--only", "producer", "--pace", &self.pace.to_string()])?;
        let mut relays = vec![relay()?, relay()?];
        let store = ground.shop().store();
        let mut slowest = Duration::ZERO;
        for (change, count) in (0..self.changes).zip(COUNTS.iter().cycle()) {
            let sent = store.counts().await?.publish_success_total;
            store.set_lanes(*count).await.context("the change is refused")?;
            // In the middle of the change.
            if change % 2 == 0 {
                relays.push(relay()?);
            } else {
                relays.remove(0).kill().await?;
            }
            let took = nemesis.until("the change comes into force", &mut relays, async || {
                let lanes = store.lanes().await?;
                Ok(lanes.len() == usize::from(*count) && lanes.iter().all(|lane| lane.owner.is_some()))
            });
            slowest = slowest.max(took.await.with_context(|| format!("{count} lanes"))?);
            nemesis.until_counts(&mut relays, |counts| counts.publish_success_total > sent).await?;
        }
        relays.push(consumer);
        let report = nemesis.finish(vec![writer], relays).await?;
        Ok(format!("{} changes, the slowest in {slowest:.1?}: {report}", self.changes))
    }
}
