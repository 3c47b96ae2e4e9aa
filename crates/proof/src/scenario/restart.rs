//! The broker is restarted while messages flow: from the application's transaction to the handler's effect, on any pair
//! of store and broker.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testkit::servers::Own;

use super::Scenario;
use crate::ground::Ground;
use crate::nemesis::Nemesis;

/// Long enough that only a fault ends it.
const LEASE: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct Restart {
    /// Orders to commit.
    #[arg(long, default_value_t = 10_000)]
    pub messages: u64,
    /// Customers to spread them over.
    #[arg(long, default_value_t = 200)]
    pub keys: u64,
    /// The broker: a server of its own is started and stopped again.
    #[arg(long, value_parser = clap::builder::PossibleValuesParser::new(BROKERS))]
    pub broker: String,
    /// How long the broker stays away; by default it is restarted at once.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    pub away: Duration,
}

/// The servers that can be asked for.
pub const BROKERS: [&str; 5] = ["kafka", "rabbitmq", "nats", "redis", "sqs"];

impl Restart {
    /// The server of this broker, and the parameters that its URL needs here.
    fn server(&self) -> Result<(&'static str, &'static str)> {
        let name = BROKERS.into_iter().find(|name| *name == self.broker).context("no such broker")?;
        let parameters = match name {
            // Groups are declared before the first message: what nobody has asked for, some brokers do not keep.
            "rabbitmq" => "prefix=proof&groups=proof",
            "sqs" => "prefix=proof&fifo=true",
            _ => "prefix=proof",
        };
        Ok((name, parameters))
    }
}

impl Scenario for Restart {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let (name, parameters) = self.server()?;
        let server = Arc::new(blocking(move || Own::start(name)).await?);
        let joint = if server.url().contains('?') { '&' } else { '?' };
        ground.use_broker(format!("{}{joint}{parameters}", server.url()));
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: LEASE };

        // Both ends are there before anything is written: each consumer declares what it wants to hear of.
        let mut others = vec![nemesis.worker(&["--only", "relay,consumer"])?];
        let writer = nemesis.worker(&["--only", "producer", "--messages", &self.messages.to_string()])?;
        let half = self.messages / 2;
        nemesis.until_counts(&mut others, |counts| counts.acknowledged_total >= half / 2).await?;
        let before = ground.shop().store().counts().await?;
        let (stopped, restarting) = (Instant::now(), server.clone());
        let away = self.away;
        blocking(move || {
            restarting.stop();
            std::thread::sleep(away);
            restarting.resume();
        })
        .await?;
        let gone = stopped.elapsed();
        let back = Instant::now();
        nemesis.until_counts(&mut others, |counts| counts.sent >= self.messages).await?;
        let drained = back.elapsed();
        let counts = ground.shop().store().counts().await?;
        ensure!(counts.dead == 0, "an outage of the broker is nobody's fault, and {} are Dead", counts.dead);
        ensure!(before.sent < self.messages, "everything was sent before the broker was restarted");
        let report = nemesis.finish(vec![writer], others).await?;
        drop(blocking(move || drop(server)).await);
        Ok(format!("{name} was away for {gone:.1?}, drained in {drained:.1?}: {report}"))
    }
}

/// Servers are started and stopped by a program that is waited for.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    Ok(tokio::task::spawn_blocking(work).await?)
}
