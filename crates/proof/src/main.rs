//! `proof`: run the proofs at any size, on any store, and see their figures.
#![allow(clippy::print_stdout, reason = "the figures are what the command is for")]

use std::fmt::Debug;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use proof::model::{Bounds, Bug, Explored, exact, explore, hunt};
use proof::scenario::{ChangeLanes, Clocks, Crash, Exact, Handle, Kill, Once, Restart, Stop, Writers, prove};
use proof::worker::Work;

/// Shows that what Postrider promises holds.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    proof: Proof,
    /// The server to prove it on: postgres://…, mysql://…, redis://…; a database of its own is made there and removed.
    #[arg(
        long,
        global = true,
        default_value = "sqlite:",
        env = "POSTRIDER_PROOF_STORE",
        hide_env_values = true
    )]
    store: String,
}

#[derive(Subcommand)]
enum Proof {
    /// The process that the others kill.
    #[command(hide = true)]
    Worker(Box<Work>),
    /// Kill the whole arrow at random moments and compare what was committed with what was done.
    Kill(Kill),
    /// Kill an arrow that promises at most once: nothing comes twice.
    Once(Once),
    /// Crash relays at every point, and stop them, where exactly once is promised: each message is in the log once.
    Exact(Exact),
    /// Crash at every named point between claim and acknowledgement.
    Crash(Crash),
    /// Crash a consumer between effect, mark and acknowledgements.
    Handle(Handle),
    /// Write with many transactions side by side, one of them stopped before its commit.
    Writers(Writers),
    /// Stop relays for longer than their leases last: what they settle afterwards is refused.
    Stop(Stop),
    /// Run relays whose clocks are wrong by an hour.
    Clocks(Clocks),
    /// Restart a real broker while messages flow through it.
    Restart(Restart),
    /// Change the number of lanes under traffic, while relays join and die.
    Lanes(ChangeLanes),
    /// Explore every state of the protocol's models, and plant every fault in them.
    Model {
        /// Only what the tests explore.
        #[arg(long)]
        small: bool,
    },
}

fn main() -> Result<()> {
    // What is lost because that was chosen, the scenarios count.
    let filter = "error,relay::once=off";
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(run(Arguments::parse()))
}

async fn run(arguments: Arguments) -> Result<()> {
    let program = std::env::current_exe()?;
    let (program, store) = (program.as_path(), arguments.store.as_str());
    let started = Instant::now();
    let figures = match arguments.proof {
        Proof::Worker(work) => return proof::worker::run(*work, arguments.store).await,
        Proof::Kill(kill) => prove(&kill, program, store).await?,
        Proof::Once(once) => prove(&once, program, store).await?,
        Proof::Exact(exact) => prove(&exact, program, store).await?,
        Proof::Crash(crash) => prove(&crash, program, store).await?,
        Proof::Handle(handle) => prove(&handle, program, store).await?,
        Proof::Writers(writers) => prove(&writers, program, store).await?,
        Proof::Stop(stop) => prove(&stop, program, store).await?,
        Proof::Clocks(clocks) => prove(&clocks, program, store).await?,
        Proof::Restart(restart) => prove(&restart, program, store).await?,
        Proof::Lanes(lanes) => prove(&lanes, program, store).await?,
        Proof::Model { small } => model(small)?,
    };
    println!("{figures}, in {:.1?}", started.elapsed());
    Ok(())
}

fn model(small: bool) -> Result<String> {
    let threads = std::thread::available_parallelism()?.get();
    let large = if small { &[][..] } else { &Bounds::LARGE[..] };
    let mut states = 0;
    for bounds in Bounds::SMALL.iter().chain(large) {
        states += sound(&explore(*bounds, threads))?;
    }
    let large = if small { &[][..] } else { &exact::Bounds::LARGE[..] };
    for bounds in exact::Bounds::SMALL.iter().chain(large) {
        states += sound(&exact::explore(*bounds, threads))?;
    }
    for bug in Bug::ALL {
        caught(bug, hunt(bug))?;
    }
    for bug in exact::Bug::ALL {
        caught(bug, exact::hunt(bug))?;
    }
    Ok(format!("{states} states without a violation"))
}

fn sound<A: Debug>(explored: &Explored<A>) -> Result<usize> {
    println!("{explored}");
    ensure!(explored.is_sound(), "the protocol does not keep its promises in `{}`", explored.name);
    Ok(explored.states)
}

fn caught<A>(bug: impl Debug, found: Option<(&str, Vec<A>)>) -> Result<()> {
    let (property, steps) = found.with_context(|| format!("nobody notices {bug:?}"))?;
    println!("{bug:?} breaks \"{property}\" in {} steps", steps.len());
    Ok(())
}
