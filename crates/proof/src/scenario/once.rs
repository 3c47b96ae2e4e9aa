//! A route and a group that promise at most once, killed at random moments: what may be lost is, and nothing comes twice.
//!
//! On Kafka it is the relay that is killed, and its line is cut again and again, so that answers get lost: there a client
//! that tried again by itself would send twice.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use rand::Rng;
use rusqlite::Connection;
use store::Counts;

use super::{SHORT_LEASE, Scenario};
use crate::check::compare;
use crate::ground::{Ground, broker_path};
use crate::log;
use crate::nemesis::Nemesis;
use crate::server::Kafka;
use crate::worker::GROUP;

/// Transactions of orders in a second, where they go on until the last kill.
const PACE: &str = "50";

/// So long a line carries everything, at most, and so long the broker's answers are lost before it is cut.
const CARRIES: Duration = Duration::from_millis(300);
const DEAF: Duration = Duration::from_millis(50);

/// Makes Kafka's client try again by itself.
const RETRYING: &str = "kafka::retrying";

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct Once {
    /// Orders to commit. To Kafka, they go on until the last kill.
    #[arg(long, default_value_t = 200_000)]
    pub messages: u64,
    /// Customers to spread them over.
    #[arg(long, default_value_t = 1_000)]
    pub keys: u64,
    /// Kills.
    #[arg(long, default_value_t = 200)]
    pub kills: u32,
    /// The longest life of a worker.
    #[arg(long, default_value = "1500ms", value_parser = humantime::parse_duration)]
    pub life: Duration,
    /// Where the messages go.
    #[arg(long, default_value = "embedded", value_parser = ["embedded", "kafka"])]
    pub broker: String,
    /// Plant a fault that has to be found: Kafka's client tries again by itself.
    #[arg(long)]
    pub fault: bool,
}

impl Scenario for Once {
    fn needs(&self, _: &str) -> Result<u64> {
        ensure!(!self.fault || self.broker == "kafka", "only Kafka's client can be made to try again");
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: SHORT_LEASE };
        match self.broker.as_str() {
            "kafka" => self.by_a_line(&nemesis).await,
            _ => self.whole(&nemesis).await,
        }
    }
}

impl Once {
    /// The whole arrow is killed.
    async fn whole(&self, nemesis: &Nemesis<'_>) -> Result<String> {
        let ground = nemesis.ground;
        let messages = self.messages.to_string();
        let arguments = ["--once", "--messages", &messages];
        let store = ground.shop().store();
        let mut killed = 0;
        while killed < self.kills && store.counts().await?.sent < self.messages {
            let worker = nemesis.worker(&arguments)?;
            let life = rand::rng().random_range(Duration::from_millis(100)..=self.life);
            tokio::time::sleep(life).await;
            worker.kill().await?;
            killed += 1;
        }
        ensure!(killed * 3 >= self.kills, "only {killed} kills came before the work was done");
        let mut workers = [nemesis.worker(&arguments)?];
        // A commit whose writer was killed may come after the next writer has counted: then there are more.
        let all_sent =
            |counts: &Counts| counts.sent >= self.messages && counts.pending + counts.in_flight == 0;
        nemesis.until_counts(&mut workers, all_sent).await?;
        let folder = ground.folder();
        nemesis.until("the group has seen everything", &mut workers, async || all_seen(folder)).await?;
        for worker in workers {
            worker.close().await?;
        }
        let sent = log::ids("embedded://", ground).await?;
        let twice = sent.len() - sent.iter().collect::<HashSet<_>>().len();
        let effects = compare(&ground.shop().orders().await?, &ground.shop().effects().await?);
        let report = format!(
            "{killed} kills: committed {}, sent {}, sent twice {twice}, not done {}, done twice {}, phantom {}, disordered {}",
            effects.committed,
            sent.len(),
            effects.lost,
            effects.doubled,
            effects.phantom,
            effects.disordered
        );
        let broken = twice as u64 + effects.doubled + effects.phantom + effects.disordered;
        ensure!(broken == 0, "a promise was broken: {report}");
        Ok(report)
    }

    /// The relay is killed and its line is cut, while orders go on. Nobody consumes: what was sent is read from the log.
    async fn by_a_line(&self, nemesis: &Nemesis<'_>) -> Result<String> {
        let (ground, kafka) = (nemesis.ground, Kafka::start().await?);
        ground.use_broker(kafka.url());
        let mut arguments = vec!["--only", "relay", "--once"];
        if self.fault {
            arguments.extend(["--plant", RETRYING]);
        }
        let mut writer = nemesis.worker(&["--only", "producer", "--pace", PACE])?;
        let mut cuts = 0;
        for _ in 0..self.kills {
            let relay = nemesis.worker(&arguments)?;
            let life = rand::rng().random_range(self.life / 5..=self.life);
            cuts += cut(&kafka, life).await;
            relay.kill().await?;
            writer.at_work()?;
        }
        writer.close().await?;
        let mut relay = [nemesis.worker(&arguments)?];
        nemesis.until_counts(&mut relay, |counts| counts.pending + counts.in_flight == 0).await?;
        let [relay] = relay;
        relay.close().await?;
        let sent = log::ids(&kafka.direct_url(), ground).await?;
        let once = sent.iter().collect::<HashSet<_>>().len();
        let (twice, committed) = (sent.len() - once, ground.shop().orders().await?.len());
        let kills = self.kills;
        let report = format!(
            "{kills} kills, {cuts} cuts: committed {committed}, sent {once}, sent twice {twice}, not sent {}",
            committed.saturating_sub(once)
        );
        ensure!(cuts > 0 && once > 0, "nothing was shown: {report}");
        ensure!(self.fault || twice == 0, "a promise was broken: {report}");
        ensure!(!self.fault || twice > 0, "nobody noticed the planted fault: {report}");
        kafka.close().await?;
        Ok(report)
    }
}

/// For this `time`, lets the line carry for a while, lose what Kafka says, and break. Answers how often.
async fn cut(kafka: &Kafka, time: Duration) -> u32 {
    let sleep = |most: Duration| tokio::time::sleep(rand::rng().random_range(most / 10..=most));
    let (until, mut cuts) = (tokio::time::Instant::now() + time, 0);
    let meddling = async {
        loop {
            sleep(CARRIES).await;
            kafka.line.deafen();
            sleep(DEAF).await;
            kafka.line.cut();
            cuts += 1;
        }
    };
    let over: Result<(), _> = tokio::time::timeout_at(until, meddling).await;
    debug_assert!(over.is_err(), "it never ends by itself");
    kafka.line.cut();
    cuts
}

/// Whether the group has forgotten all that the broker has.
fn all_seen(folder: &Path) -> Result<bool> {
    let broker = Connection::open(broker_path(folder))?;
    let stored: u64 = broker.query_row("SELECT sum(next) FROM broker_partitions", [], |row| row.get(0))?;
    let seen = "SELECT coalesce(sum(o.committed), 0) FROM broker_offsets o JOIN broker_groups g ON g.id = o.group_id \
                WHERE g.name = ?1";
    Ok(broker.query_row(seen, [GROUP], |row| row.get::<_, u64>(0))? == stored)
}
