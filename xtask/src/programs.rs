//! The test programs of the workspace, some of them side by side.
//!
//! A test that speaks to a server waits most of its time, and `cargo test` runs one program after the other: two
//! processors would be idle for half of the run. So cargo builds the programs here, and this starts them.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::servers::Urls;

/// One executable full of tests.
struct Program {
    name: String,
    /// Of its package, where cargo would start it.
    folder: PathBuf,
    executable: PathBuf,
}

impl Program {
    /// Where it writes, also while it runs: whoever waits for it can look.
    fn log(&self) -> PathBuf {
        self.executable.with_extension("log")
    }

    fn run(&self, servers: &Urls) -> Result<()> {
        let log =
            File::create(self.log()).with_context(|| format!("cannot write {}", self.log().display()))?;
        let mut command = Command::new(&self.executable);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder).envs(servers);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let status = command.status().with_context(|| format!("cannot start {}", self.name))?;
        ensure!(status.success(), "{} failed", self.name);
        Ok(())
    }

    /// What it said at its end of how many tests passed.
    fn result(&self) -> String {
        let said = std::fs::read_to_string(self.log()).unwrap_or_default();
        let line = said.lines().rev().find_map(|line| line.strip_prefix("test result: "));
        line.and_then(|line| line.split(';').next()).unwrap_or("no result").to_owned()
    }
}

/// Builds all of them, with cargo's arguments `what`, and runs all of them, whatever becomes of one.
pub(crate) fn run(what: &[&str], servers: &Urls) -> Result<()> {
    let programs = build(what)?;
    ensure!(!programs.is_empty(), "cargo built no test program");
    // Each runs as many tests at once as there are processors: more would measure the machine instead of the program.
    let at_once = std::thread::available_parallelism()?.get();
    println!("\n── {} test programs, {at_once} at once", programs.len());
    let waiting = Mutex::new(programs.iter());
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(program) = next(&waiting) {
                    let started = Instant::now();
                    let result = program.run(servers);
                    let took = started.elapsed().as_secs_f32();
                    println!("{:<32}{took:>6.1} s  {}", program.name, program.result());
                    if let Err(error) = result {
                        show(program);
                        failed.lock().expect("nobody panics with it").push(format!("{error:#}"));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("nobody panics with it");
    ensure!(failed.is_empty(), "{}", failed.join(", "));
    Ok(())
}

fn next<'a>(waiting: &Mutex<std::slice::Iter<'a, Program>>) -> Option<&'a Program> {
    waiting.lock().expect("nobody panics with it").next()
}

fn show(program: &Program) {
    let said = std::fs::read(program.log()).unwrap_or_default();
    println!("\n── {} said\n{}── end of {}\n", program.name, String::from_utf8_lossy(&said), program.name);
}

/// A line in which cargo tells a program of what it built.
#[derive(Deserialize)]
struct Artifact {
    manifest_path: PathBuf,
    target: Target,
    profile: Profile,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

fn build(what: &[&str]) -> Result<Vec<Program>> {
    println!("\n── cargo test {} --no-run", what.join(" "));
    let mut cargo = Command::new("cargo");
    cargo.arg("test").args(what).args(["--no-run", "--message-format", "json-render-diagnostics"]);
    let mut cargo = cargo.stdout(Stdio::piped()).spawn().context("cannot start cargo")?;
    let said = cargo.stdout.take().context("cargo has no output")?;
    let mut programs = Vec::new();
    for line in BufReader::new(said).lines() {
        // Of the other kinds of lines none has all the fields.
        if let Ok(Artifact {
            manifest_path,
            target,
            profile: Profile { test: true },
            executable: Some(executable),
        }) = serde_json::from_str(&line?)
        {
            let folder = manifest_path.parent().unwrap_or(Path::new(".")).to_owned();
            programs.push(Program { name: named(&folder, &target), folder, executable });
        }
    }
    if !cargo.wait()?.success() {
        bail!("the tests do not build");
    }
    programs.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(programs)
}

/// `broker/kafka`, and `broker/src` for the tests within the sources.
fn named(folder: &Path, target: &Target) -> String {
    let package = folder.file_name().unwrap_or_default().display();
    let within = target.kind.iter().any(|kind| kind != "test");
    format!("{package}/{}", if within { "src" } else { &target.name })
}
