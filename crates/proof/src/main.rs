//! `proof`: run the proofs at any size and see their figures.
#![allow(clippy::print_stdout, reason = "the figures are what the command is for")]

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use proof::model::{Bounds, Bug, explore, hunt};
use proof::nemesis::{CRASH_POINTS, Nemesis};
use proof::worker::Work;

/// Short, because every kill waits for the dead worker's leases to end.
const LEASE: Duration = Duration::from_millis(500);

/// Shows that what Postrider promises holds.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    proof: Proof,
}

#[derive(Debug, Subcommand)]
enum Proof {
    /// The process that the others kill.
    #[command(hide = true)]
    Worker(Work),
    /// Kill the whole arrow at random moments and compare what was committed with what was done.
    Kill {
        /// Orders to commit.
        #[arg(long, default_value_t = 100_000)]
        messages: u64,
        /// Keys to spread them over.
        #[arg(long, default_value_t = 1_000)]
        keys: u64,
        /// Kills.
        #[arg(long, default_value_t = 30)]
        kills: u32,
        /// The longest life of a worker.
        #[arg(long, default_value = "2500ms", value_parser = humantime::parse_duration)]
        life: Duration,
    },
    /// Explore every state of the protocol's models, and plant every fault in them.
    Model {
        /// Only what the tests explore.
        #[arg(long)]
        small: bool,
    },
    /// Crash at every named point between claim and acknowledgement.
    Crash {
        /// Orders to commit.
        #[arg(long, default_value_t = 5_000)]
        messages: u64,
        /// Crashes at each point.
        #[arg(long, default_value_t = 3)]
        times: u32,
    },
}

fn main() -> Result<()> {
    let program = std::env::current_exe()?;
    let folder = tempfile::tempdir()?;
    let started = Instant::now();
    match Arguments::parse().proof {
        Proof::Worker(work) => {
            tracing_subscriber::fmt().with_env_filter("error").with_writer(std::io::stderr).init();
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()?
                .block_on(proof::worker::run(work))
        }
        Proof::Kill { messages, keys, kills, life } => {
            let nemesis = Nemesis { program: &program, data: folder.path(), messages, keys, lease: LEASE };
            let (report, killed) = nemesis.kill(kills, Duration::from_millis(100), life)?;
            println!("{killed} kills in {:.1?}: {report}", started.elapsed());
            report.verdict()
        }
        Proof::Model { small } => {
            model(small)?;
            println!("in {:.1?}", started.elapsed());
            Ok(())
        }
        Proof::Crash { messages, times } => {
            for point in CRASH_POINTS {
                let data = folder.path().join(point.replace(':', "-"));
                let nemesis = Nemesis { program: &program, data: &data, messages, keys: 100, lease: LEASE };
                let report = nemesis.crash_at(point, times)?;
                println!("{point}: {times} crashes: {report}");
                report.verdict()?;
            }
            println!("{} points in {:.1?}", CRASH_POINTS.len(), started.elapsed());
            Ok(())
        }
    }
}

fn model(small: bool) -> Result<()> {
    let threads = std::thread::available_parallelism()?.get();
    let large = if small { &[][..] } else { &Bounds::LARGE[..] };
    let mut states = 0;
    for bounds in Bounds::SMALL.iter().chain(large) {
        let explored = explore(*bounds, threads);
        println!("{explored}");
        ensure!(explored.is_sound(), "the protocol does not keep its promises in `{}`", explored.name);
        states += explored.states;
    }
    println!("{states} states without a violation");
    for bug in Bug::ALL {
        let (property, steps) = hunt(bug).with_context(|| format!("nobody notices {bug:?}"))?;
        println!("{bug:?} breaks \"{property}\" in {} steps", steps.len());
    }
    Ok(())
}
