//! The project's own commands: `cargo xtask check` while working, `cargo xtask test` before a change lands, and
//! `cargo xtask servers` for the databases in between.
#![allow(clippy::print_stdout, reason = "a build command talks to its user")]

mod programs;
mod servers;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand};

use servers::Urls;

/// Postrider's own commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// The quick look while working: format, lints, tidiness, and tests that take no time and need no server.
    Check,
    /// Everything, and what CI runs: format, lints, tidiness, documentation, all tests and an example.
    ///
    /// Servers that do not run yet are started, and stopped at the end. POSTRIDER_TEST_POSTGRES, …_KAFKA and so on
    /// name others to use instead.
    Test,
    /// Real servers for the tests, on free ports of 127.0.0.1.
    #[command(subcommand)]
    Servers(Servers),
    /// The rules of the tree that no other tool knows.
    Tidy,
}

#[derive(Debug, Subcommand)]
enum Servers {
    /// Install what is missing, start what does not run, wait until it answers, and print the URLs.
    Up {
        /// Which; none means all.
        #[arg(value_parser = PossibleValuesParser::new(servers::names()))]
        names: Vec<String>,
        /// Print one JSON object, name to URL, and nothing else.
        #[arg(long)]
        json: bool,
        /// The folder for data, logs and ports; otherwise one for this clone under the temporary folder.
        #[arg(long)]
        home: Option<PathBuf>,
        /// Do not tell the tests of them: whoever asked wants them for itself.
        #[arg(long)]
        unlisted: bool,
    },
    /// Stop them. What they stored stays.
    Down {
        /// Which; none means all.
        #[arg(value_parser = PossibleValuesParser::new(servers::names()))]
        names: Vec<String>,
        /// Remove what they stored, too.
        #[arg(long)]
        wipe: bool,
        /// The folder that was given to `up`.
        #[arg(long)]
        home: Option<PathBuf>,
    },
    /// Say which of them run, and where.
    Status {
        /// Print one JSON object, name to URL, of those that answer.
        #[arg(long)]
        json: bool,
        /// The folder that was given to `up`.
        #[arg(long)]
        home: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let started = Instant::now();
    let result = match Arguments::parse().task {
        Task::Check => check().map(|()| Some(started)),
        Task::Test => servers::with_servers(test).map(|()| Some(started)),
        Task::Tidy => tidy::tidy().map(|()| Some(started)),
        // Programs read what these print.
        Task::Servers(servers) => run_servers(servers).map(|()| None),
    };
    match result {
        Ok(started) => {
            if let Some(started) = started {
                println!("\ndone in {:.0?}", started.elapsed());
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("\nfailed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_servers(servers: Servers) -> Result<()> {
    match servers {
        Servers::Up { names, json, home, unlisted } => {
            let urls = servers::up(&names, home.as_deref())?;
            if !unlisted {
                servers::tell(&urls)?;
            }
            if json { print_json(&urls) } else { print_lines(urls) }
        }
        Servers::Down { names, wipe, home } => servers::down(&names, home.as_deref(), wipe),
        Servers::Status { json, home } => print_status(json, home.as_deref()),
    }
}

fn print_status(json: bool, home: Option<&Path>) -> Result<()> {
    let status = servers::status(home)?;
    if json {
        let answering = status.into_iter().filter_map(|status| Some((status.name.to_owned(), status.url?)));
        return print_json(&answering.collect());
    }
    print_lines(status.into_iter().map(|status| (status.name.to_owned(), status.told)))
}

fn print_json(urls: &Urls) -> Result<()> {
    println!("{}", serde_json::to_string(urls)?);
    Ok(())
}

fn print_lines(lines: impl IntoIterator<Item = (String, String)>) -> Result<()> {
    for (name, told) in lines {
        println!("{name:<10}{told}");
    }
    Ok(())
}

/// What is built: everything, and each time the same, so that nothing is built twice.
const EVERYTHING: [&str; 2] = ["--workspace", "--all-features"];

fn check() -> Result<()> {
    lint()?;
    cargo(&[&["test"], &EVERYTHING[..], &["--lib"]].concat())
}

fn lint() -> Result<()> {
    cargo(&["fmt", "--all", "--check"])?;
    tidy::tidy()?;
    cargo(&[&["clippy"], &EVERYTHING[..], &["--all-targets", "--", "-D", "warnings"]].concat())
}

fn test(servers: &Urls) -> Result<()> {
    lint()?;
    step(
        "cargo doc",
        Command::new("cargo").args(["doc", "--no-deps"]).args(EVERYTHING).env("RUSTDOCFLAGS", "-D warnings"),
    )?;
    // Light builds must go on compiling without the parts they leave out.
    cargo(&["check", "-p", "postrider", "--no-default-features", "--features", "sqlite,embedded"])?;
    programs::run(&EVERYTHING, servers)?;
    cargo(&[&["test"], &EVERYTHING[..], &["--doc"]].concat())?;
    example("first_outbox")
}

/// Runs an example, which was built together with the tests and lies beside this program.
fn example(name: &str) -> Result<()> {
    let program = std::env::current_exe()?.with_file_name("examples").join(name);
    step(&format!("example {name}"), &mut Command::new(program))
}

fn cargo(arguments: &[&str]) -> Result<()> {
    step(&format!("cargo {}", arguments.join(" ")), Command::new("cargo").args(arguments))
}

/// Runs a command, showing what it is, and stops at the first that fails.
fn step(name: &str, command: &mut Command) -> Result<()> {
    println!("\n── {name}");
    let status = command.status().with_context(|| format!("cannot start {name}"))?;
    ensure!(status.success(), "{name} failed");
    Ok(())
}
