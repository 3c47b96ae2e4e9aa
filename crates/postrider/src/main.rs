//! The `postrider` command.
//!
//! It parses, calls and prints: what a request means is decided in `admin`, so that the command, the HTTP API and
//! the page cannot disagree.

mod command;
mod config;

use std::process::ExitCode;

fn main() -> ExitCode {
    // Crash points are named in the variable FAILPOINTS, and exist in builds for tests only.
    #[cfg(feature = "failpoints")]
    let _crash_points = fail::FailScenario::setup();
    command::main()
}
