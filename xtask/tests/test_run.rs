//! `cargo xtask test` and its servers: it brings those that are missing, and takes away those and no others.
//!
//! Only cargo, git and the tests are played by scripts here, or the tests would run themselves; the servers are real.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A clone with a temporary folder, in which cargo builds a single test program, which does what `script` says.
struct Clone {
    folder: tempfile::TempDir,
}

impl Clone {
    fn new(script: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        // Root's servers run as other users, who must be able to enter.
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("it is ours");
        let clone = Self { folder };
        clone.program("git", "");
        clone.program("tests", script);
        clone.program(
            "cargo",
            &format!("case \"$*\" in 'test '*' --no-run '*) echo '{}' ;; esac", clone.built()),
        );
        clone
    }

    /// How cargo tells of the test program.
    fn built(&self) -> serde_json::Value {
        serde_json::json!({
            "reason": "compiler-artifact",
            "manifest_path": self.path("Cargo.toml"),
            "target": { "name": "all", "kind": ["test"] },
            "profile": { "test": true },
            "executable": self.path("tests"),
        })
    }

    fn program(&self, name: &str, script: &str) {
        let file = self.path(name);
        std::fs::write(&file, format!("#!/bin/sh\nset -eu\ncd \"$TMPDIR\"\n{script}\n")).expect("written");
        std::fs::set_permissions(&file, Permissions::from_mode(0o755)).expect("it is ours");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        let file = self.path(name);
        std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
    }

    /// The command, in which all servers but Redis are somebody's own.
    fn xtask(&self, arguments: &[&str]) -> Command {
        let path = std::env::var("PATH").expect("a path");
        let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"));
        xtask
            .args(arguments)
            .env("PATH", format!("{}:{path}", self.folder.path().display()))
            .env("TMPDIR", self.folder.path())
            .env("CARGO_MANIFEST_DIR", self.path("clone/xtask"))
            .env("POSTRIDER_TEST_POSTGRES", "postgres://somewhere")
            .env("POSTRIDER_TEST_MARIADB", "mysql://somewhere")
            .env("POSTRIDER_TEST_REDIS", "");
        for broker in ["KAFKA", "RABBITMQ", "NATS", "SQS", "PUBSUB"] {
            xtask.env(format!("POSTRIDER_TEST_{broker}"), "somewhere://");
        }
        xtask
    }

    fn test(&self) -> bool {
        self.xtask(&["test"]).output().expect("xtask runs").status.success()
    }

    fn home(&self) -> PathBuf {
        let entries = std::fs::read_dir(self.folder.path()).expect("it is there").flatten();
        let mut homes =
            entries.map(|entry| entry.path()).filter(|path| named(path).starts_with("postrider-"));
        homes.next().expect("the servers have a home")
    }
}

impl Drop for Clone {
    fn drop(&mut self) {
        let down = self.xtask(&["servers", "down", "--wipe"]).output();
        assert!(down.is_ok_and(|down| down.status.success()));
    }
}

fn named(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

fn kill(signal: &str, pid: &str) {
    let status = Command::new("sh").args(["-c", "kill -s $0 $1", signal, pid.trim()]).status();
    assert!(status.expect("sh runs").success());
}

/// What the tests do: ask the server who it is and write down what they were given.
const ASK: &str = r#"
redis-cli -u "$POSTRIDER_TEST_REDIS" INFO server | sed -n 's/^process_id://p' | tr -d '\r' >pid
echo "$POSTRIDER_TEST_POSTGRES $POSTRIDER_TEST_MARIADB" >given
"#;

#[test]
fn tests_get_servers_and_nothing_of_them_is_left() {
    let clone = Clone::new(ASK);
    assert!(clone.test());
    assert!(!clone.read("pid").trim().is_empty(), "it answered");
    assert!(!runs(&clone.read("pid")), "and is stopped");
    assert!(!clone.home().join("redis").exists(), "with its data");
    assert_eq!(clone.read("given"), "postgres://somewhere mysql://somewhere\n");
    assert!(!clone.home().join("postgres").exists(), "what is given is not started");
}

#[test]
fn when_tests_fail_the_run_fails_with_what_they_said_and_the_data_can_be_looked_at() {
    let clone = Clone::new(&format!("{ASK} echo three is not four; exit 1"));
    let run = clone.xtask(&["test"]).output().expect("xtask runs");
    assert!(!run.status.success());
    assert!(String::from_utf8_lossy(&run.stdout).contains("three is not four"));
    assert!(!runs(&clone.read("pid")), "it is stopped");
    assert!(clone.home().join("redis.log").exists());
}

#[test]
fn servers_that_were_started_by_hand_are_used_and_go_on() {
    let clone = Clone::new(ASK);
    let up = clone.xtask(&["servers", "up", "redis"]).output().expect("xtask runs");
    assert!(up.status.success());
    let note = std::fs::read(clone.home().join("redis.json")).expect("it was started");
    let note: serde_json::Value = serde_json::from_slice(&note).expect("the note is JSON");
    assert!(clone.test());
    assert_eq!(clone.read("pid").trim(), note["process"]["pid"].to_string());
    assert!(runs(&clone.read("pid")), "it is not the run's to stop");
}

#[test]
fn an_interrupted_run_leaves_no_server() {
    let clone = Clone::new(&format!("{ASK} echo $$ >waits.new; mv waits.new waits; exec sleep 600"));
    let mut run =
        clone.xtask(&["test"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("xtask runs");
    wait_for(&clone.path("waits"), &mut run);
    assert!(runs(&clone.read("pid")));
    kill("TERM", &run.id().to_string());
    let status = run.wait().expect("it ends");
    kill("KILL", &clone.read("waits"));
    assert_eq!(status.code(), Some(128 + 15));
    assert!(!runs(&clone.read("pid")));
}

fn wait_for(file: &Path, run: &mut Child) {
    let started = Instant::now();
    while !file.exists() {
        assert!(run.try_wait().expect("it is ours").is_none(), "the run ended too soon");
        assert!(started.elapsed() < Duration::from_secs(60), "the tests do not start");
        std::thread::sleep(Duration::from_millis(10));
    }
}
