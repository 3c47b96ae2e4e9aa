//! The broker is restarted while messages flow, or stays away for a while: from the application's transaction to the
//! handler's effect, on any pair of store and broker.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use store::{Filter, Page, Paged, Store};
use testkit::servers::Own;

use super::Scenario;
use crate::elsewhere::{self, Watched};
use crate::ground::Ground;
use crate::nemesis::{Nemesis, Worker};
use crate::receiver;
use crate::server::{self, blocking};

/// Long enough that only a fault ends it.
const LEASE: Duration = Duration::from_secs(10);

/// What goes elsewhere while the broker is away may take so long at most: relays look once in a second, and the machine
/// may be busy.
const UNAFFECTED: Duration = Duration::from_secs(3);

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

/// What can be asked for.
pub const BROKERS: [&str; 7] = ["kafka", "rabbitmq", "nats", "redis", "sqs", "pubsub", "http"];

/// Servers that stand in for a service and forget at a restart what they had confirmed. They hang instead.
const FORGETFUL: [&str; 2] = ["sqs", "pubsub"];

/// Longer than any publisher waits for an answer.
const HANGS: Duration = Duration::from_secs(12);

/// What is restarted.
enum Place {
    /// A server of a broker.
    Server(Arc<Own>),
    /// One that must not be stopped.
    Forgetful(Arc<Own>),
    /// The service that requests go to.
    Receiver(Worker),
}

impl Place {
    /// Starts the broker of this name and tells the ground of it.
    async fn start(name: &str, nemesis: &Nemesis<'_>) -> Result<Self> {
        if name == "http" {
            let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr())?;
            nemesis.ground.use_broker(receiver::url(free));
            return Ok(Self::Receiver(nemesis.worker(RECEIVER)?));
        }
        let name = BROKERS.into_iter().find(|known| *known == name).context("no such broker")?;
        let (server, url) = server::start(name).await?;
        nemesis.ground.use_broker(url);
        let server = Arc::new(server);
        Ok(if FORGETFUL.contains(&name) { Self::Forgetful(server) } else { Self::Server(server) })
    }

    /// Who is there beside the writer.
    fn parts(&self) -> &'static str {
        match self {
            Self::Server(_) | Self::Forgetful(_) => "relay,consumer",
            Self::Receiver(_) => "relay",
        }
    }

    /// Stops it, waits until `gone` is over, and starts it again.
    async fn restart(self, nemesis: &Nemesis<'_>, gone: impl Future<Output = Result<()>>) -> Result<Self> {
        match self {
            Self::Server(server) => {
                let stopping = server.clone();
                blocking(move || stopping.stop()).await?;
                gone.await?;
                let starting = server.clone();
                blocking(move || starting.resume()).await?;
                Ok(Self::Server(server))
            }
            Self::Forgetful(server) => {
                let stalled = server.stall();
                let (gone, ()) = tokio::join!(gone, tokio::time::sleep(HANGS));
                drop(stalled);
                gone?;
                Ok(Self::Forgetful(server))
            }
            Self::Receiver(worker) => {
                worker.kill().await?;
                gone.await?;
                Ok(Self::Receiver(nemesis.worker(RECEIVER)?))
            }
        }
    }

    async fn close(self) -> Result<()> {
        match self {
            Self::Server(server) | Self::Forgetful(server) => blocking(move || drop(server)).await,
            Self::Receiver(worker) => worker.close().await,
        }
    }
}

const RECEIVER: &[&str] = &["--only", "receiver"];

impl Scenario for Restart {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: LEASE };
        let place = Place::start(&self.broker, &nemesis).await?;

        // Both ends are there before anything is written: each consumer declares what it wants to hear of.
        let mut others = vec![nemesis.worker(&["--only", place.parts()])?];
        let writer = nemesis.worker(&["--only", "producer", "--messages", &self.messages.to_string()])?;
        nemesis.until_counts(&mut others, |counts| counts.sent >= self.messages / 4).await?;
        let before = ground.shop().store().counts().await?;
        ensure!(before.sent < self.messages, "everything was sent before the broker was restarted");

        let stopped = Instant::now();
        let mut other = Watched::default();
        let place = place
            .restart(&nemesis, async {
                other = elsewhere::watch(&*ground.shop().store(), self.away).await?;
                Ok(())
            })
            .await?;
        let (gone, back) = (stopped.elapsed(), Instant::now());
        let Watched { messages, slowest } = other;
        ensure!(slowest < UNAFFECTED, "one of {messages} that went elsewhere meanwhile took {slowest:?}");

        let all = self.messages + messages;
        nemesis.until_counts(&mut others, |counts| counts.sent >= all).await?;
        let drained = back.elapsed();
        let counts = ground.shop().store().counts().await?;
        ensure!(counts.dead == 0, "an outage of the broker is nobody's fault, and {} are Dead", counts.dead);
        let (spent, error) = attempts(&*ground.shop().store()).await?;
        ensure!(
            spent == 0,
            "an outage of the broker is nobody's fault, and {spent} attempts were spent: {}",
            error.unwrap_or_default()
        );
        let report = nemesis.finish(vec![writer], others).await?;
        place.close().await?;
        let name = &self.broker;
        let elsewhere = format!("{messages} went elsewhere in {slowest:.1?} at most");
        Ok(format!("{name} was away for {gone:.1?}, drained in {drained:.1?}, {elsewhere}: {report}"))
    }
}

/// Attempts that all messages together have spent, and why one of them.
async fn attempts(store: &dyn Store) -> Result<(u64, Option<String>)> {
    let (mut spent, mut error) = (0, None);
    let mut page = Page { after: None, limit: 1_000, newest_first: false };
    loop {
        let Paged { items, next } = store.list(&Filter::default(), page).await?;
        for record in items.iter().filter(|record| record.state.attempts > 0) {
            spent += u64::from(record.state.attempts);
            if error.is_none() {
                error = store.attempts(record.message.id).await?.into_iter().next_back().map(|one| one.error);
            }
        }
        let Some(next) = next else { return Ok((spent, error)) };
        page.after = Some(next);
    }
}
