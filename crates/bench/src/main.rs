//! `bench`: how fast Postrider is, beside what a bare program reaches on the same machine in the same minute.
//!
//! Absolute figures of a shared machine mean little, so every scenario runs in interleaved pairs with its ceiling, and
//! the median of the ratios is what counts.
#![allow(clippy::print_stdout, reason = "the figures are what the command is for")]

mod append;
mod arrow;
mod bare;
#[cfg(feature = "brokers")]
mod dedup;
#[cfg(feature = "brokers")]
mod memory;
mod nobody;
#[cfg(feature = "brokers")]
mod pool;
mod postgres;
#[cfg(feature = "brokers")]
mod publish;
mod pull;
#[cfg(feature = "brokers")]
mod semantics;
#[cfg(feature = "brokers")]
mod watched;

use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// How fast Postrider is, as a share of what a bare program reaches.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    scenario: Option<Scenario>,
    /// Messages in each run.
    #[arg(long, global = true, default_value_t = 100_000)]
    messages: usize,
    /// Keys to spread them over.
    #[arg(long, global = true, default_value_t = 1_000)]
    keys: usize,
    /// Bytes of payload.
    #[arg(long, global = true, default_value_t = 350)]
    payload: usize,
    /// Pairs of runs.
    #[arg(long, global = true, default_value_t = 5)]
    pairs: usize,
}

#[derive(Clone, Debug, Subcommand)]
enum Scenario {
    /// From the write to the acknowledgement, on SQLite and the embedded broker (the default).
    Arrow,
    /// Durable appends by 64 writers at once, one message each.
    Append,
    /// Taking and settling on PostgreSQL, beside a bare client that selects and updates.
    Relay {
        /// The server: `cargo xtask servers up postgres` prints it.
        #[arg(long)]
        server: String,
        /// Delete rows when they are sent; the bare client deletes too.
        #[arg(long)]
        delete: bool,
    },
    /// Taking and settling on PostgreSQL with old Sent rows, beside the same without.
    History {
        /// The server.
        #[arg(long)]
        server: String,
        /// Old rows.
        #[arg(long, default_value_t = 5_000_000)]
        old: u64,
    },
    /// Steady traffic on PostgreSQL beside a transaction that never ends.
    Snapshot {
        /// The server.
        #[arg(long)]
        server: String,
        /// Messages a second.
        #[arg(long, default_value_t = 500)]
        rate: u64,
        /// For how many seconds.
        #[arg(long, default_value_t = 600)]
        seconds: u64,
    },
    #[cfg(feature = "brokers")]
    /// A relay that takes from memory and publishes into a broker, beside a bare client.
    Publish {
        /// The broker: `cargo xtask servers up kafka rabbitmq nats redis` prints it.
        #[arg(long)]
        broker: String,
        /// Messages that the relay claims in one turn at most.
        #[arg(long, default_value_t = relay::Settings::default().batch)]
        batch: usize,
        /// Trains of the relay.
        #[arg(long, default_value_t = relay::Settings::default().trains)]
        trains: usize,
        /// The bare client sends the payload alone, without the headers that ours have.
        #[arg(long)]
        payload_alone: bool,
    },
    #[cfg(feature = "brokers")]
    /// Throughput and latency of all six promises into a broker, as shares of at-least-once.
    Semantics {
        /// The broker; otherwise those that `cargo xtask servers up postgres kafka nats rabbitmq` has started, one after the
        /// other.
        #[arg(long)]
        broker: Option<String>,
        /// The PostgreSQL that messages are written to; otherwise the one that was started.
        #[arg(long)]
        server: Option<String>,
        /// Messages wait in memory instead: what a promise costs is all that is seen.
        #[arg(long, conflicts_with = "server")]
        memory: bool,
        /// Only these, beside at-least-once.
        #[arg(long, value_delimiter = ',')]
        only: Vec<message::Semantics>,
        /// Seconds of each measurement of latency. In ten of them one pause of a server decides what 99 of 100 are within.
        #[arg(long, default_value_t = 30)]
        seconds: u64,
    },
    #[cfg(feature = "brokers")]
    /// A consumer without a memory of ids, beside the same with one in PostgreSQL, in Redis and in both.
    Dedup {
        /// PostgreSQL: `cargo xtask servers up postgres redis` prints both.
        #[arg(long)]
        server: String,
        /// Redis.
        #[arg(long)]
        redis: String,
        /// Messages that are handled at the same time, where the handler works outside the store.
        #[arg(long, default_value_t = 16)]
        workers: usize,
        /// What the handler does with a message.
        #[arg(long, value_enum, default_value = "row")]
        work: dedup::Work,
        /// Only with this handler.
        #[arg(long, value_enum)]
        handler: Option<dedup::Beside>,
    },
    /// Commits of 32 writers on PostgreSQL with the doorbell, beside those without.
    Doorbell {
        /// The server.
        #[arg(long)]
        server: String,
        /// Seconds of each run.
        #[arg(long, default_value_t = 10)]
        seconds: u64,
    },
}

/// The size of a run.
#[derive(Clone, Copy, Debug)]
struct Size {
    messages: usize,
    keys: usize,
    payload: usize,
}

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<()> {
    let Arguments { scenario, messages, keys, payload, pairs } = Arguments::parse();
    let size = Size { messages, keys, payload };
    match scenario.unwrap_or(Scenario::Arrow) {
        Scenario::Arrow => {
            compare(size, pairs, async || Ok((arrow::run(size).await?, bare::arrow(size)?))).await
        }
        Scenario::Append => {
            compare(size, pairs, async || Ok((append::run(size).await?, bare::append(size)?))).await
        }
        Scenario::Relay { server, delete } => {
            compare(size, pairs, async || postgres::relay_and_bare(&server, size, delete).await).await
        }
        Scenario::History { server, old } => postgres::history(&server, size, pairs, old).await,
        Scenario::Snapshot { server, rate, seconds } => {
            postgres::snapshot(&server, rate, Duration::from_secs(seconds)).await
        }
        #[cfg(feature = "brokers")]
        Scenario::Publish { broker, batch, trains, payload_alone } => {
            let settings = relay::Settings { batch, trains, ..relay::Settings::default() };
            let headers = !payload_alone;
            compare(size, pairs, async || publish::run(&broker, size, &settings, headers).await).await
        }
        #[cfg(feature = "brokers")]
        Scenario::Semantics { broker, server, memory, only, seconds } => {
            let started = |name| testkit::servers::find(name).map_err(anyhow::Error::msg);
            let brokers: Vec<String> = match broker {
                Some(broker) => vec![broker],
                None => ["kafka", "nats", "rabbitmq"].into_iter().map(started).collect::<Result<_>>()?,
            };
            let server = match server {
                None if !memory => Some(started("postgres")?),
                server => server,
            };
            for broker in brokers {
                let measured = Duration::from_secs(seconds);
                semantics::run(&broker, server.as_deref(), &only, size, pairs, measured).await?;
            }
            Ok(())
        }
        #[cfg(feature = "brokers")]
        Scenario::Dedup { server, redis, workers, work, handler } => {
            let servers = dedup::Servers { postgres: &server, redis: &redis };
            dedup::run(servers, size, pairs, workers, work, handler).await
        }
        Scenario::Doorbell { server, seconds } => {
            postgres::doorbell(&server, pairs, Duration::from_secs(seconds)).await
        }
    }
}

/// Runs pairs of ours and the ceiling, and prints their rates.
async fn compare(
    size: Size,
    pairs: usize,
    run: impl AsyncFn() -> Result<(Duration, Duration)>,
) -> Result<()> {
    let mut ratios = Vec::new();
    println!("{:>10}  {:>14}  {:>14}  {:>7}", "pair", "postrider", "bare", "share");
    for pair in 1..=pairs {
        let (ours, bare) = run().await?;
        let rate = |time: Duration| size.messages as f64 / time.as_secs_f64();
        let ratio = rate(ours) / rate(bare);
        println!("{pair:>10}  {:>10.0} /s  {:>10.0} /s  {ratio:>7.2}", rate(ours), rate(bare));
        ratios.push(ratio);
    }
    median(ratios);
    Ok(())
}

fn median(mut ratios: Vec<f64>) {
    ratios.sort_by(f64::total_cmp);
    println!("{:>10}  {:>14}  {:>14}  {:>7.2}", "median", "", "", ratios[ratios.len() / 2]);
}
