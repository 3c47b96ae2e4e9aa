//! The whole arrow is killed at random moments.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use rand::Rng;

use super::{SHORT_LEASE, Scenario};
use crate::ground::Ground;
use crate::nemesis::Nemesis;

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct Kill {
    /// Orders to commit.
    #[arg(long, default_value_t = 100_000)]
    pub messages: u64,
    /// Customers to spread them over.
    #[arg(long, default_value_t = 1_000)]
    pub keys: u64,
    /// Kills.
    #[arg(long, default_value_t = 30)]
    pub kills: u32,
    /// The longest life of a worker.
    #[arg(long, default_value = "2500ms", value_parser = humantime::parse_duration)]
    pub life: Duration,
}

impl Scenario for Kill {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: SHORT_LEASE };
        let mut killed = 0;
        while killed < self.kills && !nemesis.is_done(self.messages).await? {
            let worker = nemesis.worker(&["--messages", &self.messages.to_string()])?;
            let life = rand::rng().random_range(Duration::from_millis(100)..=self.life);
            tokio::time::sleep(life).await;
            worker.kill().await?;
            killed += 1;
        }
        let report = nemesis.finish_alone(self.messages).await?;
        ensure!(killed * 3 >= self.kills, "only {killed} kills came before the work was done");
        Ok(format!("{killed} kills: {report}"))
    }
}
