//! The project's own commands: `cargo xtask check` while working, `cargo xtask test` before a change lands.
#![allow(clippy::print_stdout, reason = "a build command talks to its user")]

mod tidy;

use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};

/// Postrider's own commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// The quick look while working: format, lints, tidiness, and tests that take no time.
    Check,
    /// Everything, and what CI runs: `check`, documentation, all tests and the examples.
    Test,
    /// The rules of the tree that no other tool knows.
    Tidy,
}

fn main() -> ExitCode {
    let started = Instant::now();
    let result = match Arguments::parse().task {
        Task::Check => check(),
        Task::Test => test(),
        Task::Tidy => tidy::tidy(),
    };
    match result {
        Ok(()) => {
            println!("\ndone in {:.0?}", started.elapsed());
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("\nfailed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn check() -> Result<()> {
    cargo(&["fmt", "--all", "--check"])?;
    tidy::tidy()?;
    cargo(&["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"])?;
    cargo(&["test", "--workspace", "--all-features", "--lib"])
}

fn test() -> Result<()> {
    check()?;
    step(
        "cargo doc",
        Command::new("cargo")
            .args(["doc", "--workspace", "--no-deps", "--all-features"])
            .env("RUSTDOCFLAGS", "-D warnings"),
    )?;
    // Light builds must go on compiling without the parts they leave out.
    cargo(&["check", "-p", "postrider", "--no-default-features", "--features", "sqlite,embedded"])?;
    cargo(&["test", "--workspace", "--all-features"])?;
    cargo(&["run", "-p", "postrider", "--example", "first_outbox", "--features", "sqlx"])
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
