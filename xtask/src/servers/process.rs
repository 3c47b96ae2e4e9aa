//! A process that was started earlier, perhaps by another run: is it still that one, and how is it ended.
//!
//! A number alone is not a process: numbers are used again. With the time of its start it is, so nothing that
//! merely inherited the number is ever signalled.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// A process, told apart from others that had or will have its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    pub(super) pid: u32,
    /// In the kernel's ticks since the machine started.
    started: u64,
}

impl Process {
    /// The one that has this number now, if any.
    pub(super) fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (state, started) = read_stat(&stat)?;
        // One that has ended but that nobody has asked about keeps its number and does nothing.
        (!matches!(state, "Z" | "X")).then_some(Self { pid, started })
    }

    pub(super) fn alive(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }

    /// Ends it in good order, or by force when that takes longer than `limit`.
    pub(super) fn end(&self, name: &str, signal: &str, limit: Duration) -> Result<()> {
        self.signal(signal)?;
        if self.ended_within(limit) {
            return Ok(());
        }
        eprintln!("{name}: has not stopped for {limit:?} and is killed");
        self.signal("KILL")?;
        let ended = self.ended_within(limit);
        ensure!(ended, "{name} (pid {}) goes on even after SIGKILL: the machine has a fault", self.pid);
        Ok(())
    }

    fn signal(&self, signal: &str) -> Result<()> {
        // The shell's own `kill` is on every machine; the program of that name is not.
        let script = r#"kill -s "$0" "$1""#;
        let pid = self.pid.to_string();
        let output =
            Command::new("sh").args(["-c", script, signal, &pid]).output().context("cannot run sh")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success() || !self.alive(), "cannot send SIG{signal} to pid {pid}: {said}");
        Ok(())
    }

    fn ended_within(&self, limit: Duration) -> bool {
        let started = Instant::now();
        while self.alive() {
            if started.elapsed() > limit {
                return false;
            }
            // It is nobody's child by now, so the kernel tells nobody of its end.
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }
}

/// State and time of start, from the line that `proc(5)` describes.
fn read_stat(stat: &str) -> Option<(&str, u64)> {
    // The second field is a name that may itself hold blanks and brackets; all others do not.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_a_blank_and_a_bracket_in_its_name_is_read() {
        let stat = "77 (a) b) S 1 77 77 0 -1 4194304 95 0 0 0 0 0 0 0 20 0 1 0 4242 2703360 227";
        assert_eq!(read_stat(stat), Some(("S", 4242)));
    }

    #[test]
    fn a_process_that_inherited_the_number_is_another() {
        let this = Process::of(std::process::id()).expect("this test runs");
        assert!(this.alive());
        assert!(!Process { started: this.started + 1, ..this }.alive());
    }

    #[test]
    fn a_process_is_ended_once_and_then_is_gone() {
        let mut child = Command::new("sleep").arg("600").spawn().expect("sleep starts");
        let process = Process::of(child.id()).expect("it runs");
        process.end("sleep", "TERM", Duration::from_secs(10)).expect("it ends");
        assert!(!process.alive(), "though nobody has asked for its status");
        process.end("sleep", "TERM", Duration::from_secs(10)).expect("twice is no fault");
        child.wait().expect("its status is there");
    }
}
