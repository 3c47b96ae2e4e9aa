//! Relays are stopped for longer than their leases last, and then go on as if nothing had happened.
//!
//! What they still hold in their hands belongs to others by then. The store must refuse it; that it was asked to is
//! seen in the trails, or the scenario fails.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::process::Signal;

use super::{CONSUMER, Scenario};
use crate::ground::Ground;
use crate::nemesis::{Nemesis, Worker};

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct Stop {
    /// Stops.
    #[arg(long, default_value_t = 100)]
    pub times: usize,
    /// The lease of a lane. A relay is stopped for three times as long.
    #[arg(long, default_value = "1s", value_parser = humantime::parse_duration)]
    pub lease: Duration,
    /// Transactions in a second.
    #[arg(long, default_value_t = 50)]
    pub pace: u32,
    /// Customers.
    #[arg(long, default_value_t = 500)]
    pub keys: u64,
}

impl Scenario for Stop {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: self.lease };
        // A broker that takes its time: what a relay has in flight is there for a while.
        let relay = || nemesis.worker(&["--only", "relay", "--delay", "100ms"]);
        let mut others = (0..3).map(|_| relay()).collect::<Result<Vec<_>>>()?;
        let relays: Vec<_> = others.iter().map(Worker::relay_name).collect();
        others.push(nemesis.worker(CONSUMER)?);
        let writer = nemesis.worker(&["--only", "producer", "--pace", &self.pace.to_string()])?;
        for time in 0..self.times {
            nemesis.until_lanes_are_shared(&mut others, &relays).await?;
            nemesis.until_busy(&mut others, &relays[time % relays.len()]).await?;
            let relay = &others[time % relays.len()];
            relay.signal(Signal::STOP)?;
            tokio::time::sleep(self.lease * 3).await;
            ensure!(relay.is_stopped()?, "a relay went on by itself");
            relay.signal(Signal::CONT)?;
        }
        let report = nemesis.finish(vec![writer], others).await?;
        ensure!(report.fenced > 0, "no relay ever came too late, so this proves nothing: {report}");
        Ok(format!("{} stops: {report}", self.times))
    }
}
