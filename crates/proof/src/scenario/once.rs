//! A route and a group that promise at most once, killed at random moments: what may be lost is, and nothing comes twice.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use broker::Surroundings;
use rand::Rng;
use rusqlite::Connection;
use store::Counts;

use super::{SHORT_LEASE, Scenario};
use crate::check::compare;
use crate::ground::{Ground, broker_path};
use crate::nemesis::Nemesis;
use crate::shop::TOPIC;
use crate::worker::GROUP;

/// See the module.
#[derive(Clone, Debug, clap::Args)]
pub struct Once {
    /// Orders to commit.
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
}

impl Scenario for Once {
    fn needs(&self, _: &str) -> Result<u64> {
        Ok(self.keys)
    }

    async fn happen(&self, program: &Path, ground: &Ground) -> Result<String> {
        let nemesis = Nemesis { program, ground, keys: self.keys, lease: SHORT_LEASE };
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
        let sent = sent(folder).await?;
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
}

/// Whether the group has forgotten all that the broker has.
fn all_seen(folder: &Path) -> Result<bool> {
    let broker = Connection::open(broker_path(folder))?;
    let stored: u64 = broker.query_row("SELECT sum(next) FROM broker_partitions", [], |row| row.get(0))?;
    let seen = "SELECT coalesce(sum(o.committed), 0) FROM broker_offsets o JOIN broker_groups g ON g.id = o.group_id \
                WHERE g.name = ?1";
    Ok(broker.query_row(seen, [GROUP], |row| row.get::<_, u64>(0))? == stored)
}

/// The ids of all messages that the broker was ever given, one for each time.
async fn sent(folder: &Path) -> Result<Vec<message::MessageId>> {
    let file = broker_path(folder);
    let stored: u64 =
        Connection::open(&file)?
            .query_row("SELECT sum(next) FROM broker_partitions", [], |row| row.get(0))?;
    let broker = broker::open("embedded://", &Surroundings { file, max_payload: 1 << 20 })?;
    let subscriber = broker.subscriber.context("it can be read")?;
    let mut reader = subscriber.subscribe("auditor", &[TOPIC.to_owned()]).await?;
    let mut ids = Vec::new();
    while (ids.len() as u64) < stored {
        ids.extend(reader.receive(10_000).await?.into_iter().map(|delivery| delivery.message.id));
    }
    reader.close().await;
    Ok(ids)
}
