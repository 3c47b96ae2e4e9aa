//! `bench`: how fast Postrider is, beside what a bare program reaches on the same machine in the same minute.
//!
//! Absolute figures of a shared machine mean little, so every scenario runs in interleaved pairs with its ceiling, and
//! the median of the ratios is what counts.
#![allow(clippy::print_stdout, reason = "the figures are what the command is for")]

mod append;
mod arrow;
mod bare;

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

#[derive(Clone, Copy, Debug, Subcommand)]
enum Scenario {
    /// From the write to the acknowledgement, on SQLite and the embedded broker (the default).
    Arrow,
    /// Durable appends by 64 writers at once, one message each.
    Append,
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
    let mut ratios = Vec::new();
    println!("{:>10}  {:>14}  {:>14}  {:>7}", "pair", "postrider", "bare", "share");
    for pair in 1..=pairs {
        let (ours, bare) = match scenario.unwrap_or(Scenario::Arrow) {
            Scenario::Arrow => (arrow::run(size).await?, bare::arrow(size)?),
            Scenario::Append => (append::run(size).await?, bare::append(size)?),
        };
        let rate = |time: Duration| messages as f64 / time.as_secs_f64();
        let ratio = rate(ours) / rate(bare);
        println!("{pair:>10}  {:>10.0} /s  {:>10.0} /s  {ratio:>7.2}", rate(ours), rate(bare));
        ratios.push(ratio);
    }
    ratios.sort_by(f64::total_cmp);
    println!("{:>10}  {:>14}  {:>14}  {:>7.2}", "median", "", "", ratios[ratios.len() / 2]);
    Ok(())
}
