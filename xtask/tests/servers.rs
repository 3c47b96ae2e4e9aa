//! `cargo xtask servers` with the real servers, in a home of its own: what people and CI rely on.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A clone and a home that are gone, with every server in them, when the test ends.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        // Root's servers run as other users, who must be able to enter.
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).expect("it is ours");
        Self { folder }
    }

    fn home(&self) -> PathBuf {
        self.folder.path().join("home")
    }

    fn listing(&self) -> BTreeMap<String, String> {
        let file = self.folder.path().join("clone/target/servers.json");
        serde_json::from_slice(&std::fs::read(file).expect("the listing is there")).expect("it is JSON")
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_xtask"))
            .arg("servers")
            .args(arguments)
            .arg("--home")
            .arg(self.home())
            .env("CARGO_MANIFEST_DIR", self.folder.path().join("clone/xtask"))
            .output()
            .expect("xtask runs")
    }

    /// What `up --json` printed: exactly one object.
    fn up(&self, names: &[&str]) -> BTreeMap<String, String> {
        let output = self.run(&[&["up", "--json"], names].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else")
    }

    fn down(&self, arguments: &[&str]) {
        let output = self.run(&[&["down"], arguments].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn pid(&self, name: &str) -> String {
        let note = std::fs::read(self.home().join(format!("{name}.json"))).expect("it was started");
        let note: serde_json::Value = serde_json::from_slice(&note).expect("the note is JSON");
        note["process"]["pid"].to_string()
    }
}

/// Whether it runs; one that ended and that nobody has asked about does not.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.run(&["down", "--wipe"]);
    }
}

fn address(url: &str) -> &str {
    url.split(['/', '@']).find(|part| part.starts_with("127.0.0.1:")).expect("on loopback")
}

fn answers(url: &str) -> bool {
    TcpStream::connect(address(url)).is_ok()
}

fn redis(url: &str, command: &[&str]) -> String {
    let output =
        Command::new("redis-cli").args(["-u", url]).args(command).output().expect("redis-cli is there");
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

fn kill(signal: &str, pid: &str) {
    let status = Command::new("sh").args(["-c", "kill -s $0 $1", signal, pid]).status().expect("sh runs");
    assert!(status.success());
}

#[test]
fn servers_start_are_found_again_stop_and_come_back_with_their_data() {
    let machine = Machine::new();
    let stores = ["postgres", "mariadb", "redis"];
    let urls = machine.up(&stores);
    assert_eq!(urls.keys().collect::<Vec<_>>(), ["mariadb", "postgres", "redis"]);
    assert!(urls.values().all(|url| answers(url)), "{urls:?}");
    assert_eq!(machine.listing(), urls, "the tests are told the same");
    assert_eq!(redis(&urls["redis"], &["SET", "kept", "yes"]), "OK");

    let pids = ["mariadb", "postgres", "redis"].map(|name| machine.pid(name));
    assert_eq!(machine.up(&stores), urls, "found, not started again");
    assert_eq!(["mariadb", "postgres", "redis"].map(|name| machine.pid(name)), pids);

    assert!(pids.iter().all(|pid| runs(pid)));
    machine.down(&[]);
    assert!(!pids.iter().any(|pid| runs(pid)), "all have stopped");
    assert!(machine.listing().is_empty());

    let urls = machine.up(&stores);
    assert_eq!(redis(&urls["redis"], &["GET", "kept"]), "yes");
}

#[test]
fn one_server_can_be_named_and_the_others_are_left_alone() {
    let machine = Machine::new();
    let redis = machine.up(&["redis"]);
    assert_eq!(redis.keys().collect::<Vec<_>>(), ["redis"]);
    let postgres = machine.up(&["postgres"]);
    assert_eq!(postgres.keys().collect::<Vec<_>>(), ["postgres"]);
    let (stopped, left) = (machine.pid("redis"), machine.pid("postgres"));
    machine.down(&["redis"]);
    assert!(!runs(&stopped) && runs(&left));
    assert!(answers(&postgres["postgres"]));
    assert_eq!(machine.listing(), postgres);
}

#[test]
fn a_server_that_was_killed_is_started_again_with_what_it_had_confirmed() {
    let machine = Machine::new();
    let urls = machine.up(&["redis"]);
    redis(&urls["redis"], &["CONFIG", "SET", "appendfsync", "always"]);
    redis(&urls["redis"], &["SET", "kept", "yes"]);
    let killed = machine.pid("redis");
    kill("KILL", &killed);
    let urls = machine.up(&["redis"]);
    assert_ne!(machine.pid("redis"), killed);
    assert_eq!(redis(&urls["redis"], &["GET", "kept"]), "yes");
}

#[test]
fn a_port_that_somebody_took_is_left_to_them() {
    let machine = Machine::new();
    let before = machine.up(&["redis"]);
    machine.down(&[]);
    // If it cannot be had, somebody has taken it even sooner.
    let _somebody = std::net::TcpListener::bind(address(&before["redis"]));
    let after = machine.up(&["redis"]);
    assert_ne!(after, before);
    assert_eq!(redis(&after["redis"], &["PING"]), "PONG");
}

#[test]
fn a_number_that_another_process_has_by_now_is_not_signalled() {
    let machine = Machine::new();
    machine.up(&["redis"]);
    let note = machine.home().join("redis.json");
    let text = std::fs::read_to_string(&note).expect("the note is there");
    machine.down(&[]);
    let mut other = Command::new("sleep").arg("600").spawn().expect("sleep starts");
    // As it is after a restart of the machine: the note is old and its number is somebody else's.
    let mut old: serde_json::Value = serde_json::from_str(&text).expect("the note is JSON");
    old["process"]["pid"] = other.id().into();
    std::fs::write(&note, old.to_string()).expect("it is written");
    machine.down(&[]);
    assert!(other.try_wait().expect("it is ours").is_none(), "it goes on");
    other.kill().expect("it is ours");
    other.wait().expect("it has ended");
}

#[test]
fn wiping_removes_what_was_stored_and_only_that() {
    let machine = Machine::new();
    machine.up(&["redis"]);
    let foreign = machine.home().join("postgres");
    std::fs::create_dir(&foreign).expect("a folder that no server made");
    machine.down(&["--wipe"]);
    assert!(!machine.home().join("redis").exists());
    assert!(foreign.exists(), "no note says that it is ours");
}

#[test]
fn what_cannot_start_says_why() {
    let machine = Machine::new();
    machine.up(&["redis"]);
    machine.down(&[]);
    let files = machine.home().join("redis/appendonlydir");
    let manifest = files.join("appendonly.aof.manifest");
    std::fs::write(manifest, "nonsense\n").expect("it is written");
    let output = machine.run(&["up", "--json", "redis"]);
    assert!(!output.status.success());
    assert!(output.stdout.is_empty(), "no half answer");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("redis ended before it was ready") && said.contains("manifest"), "{said}");
}

#[test]
fn status_tells_what_runs_what_hangs_and_what_does_not() {
    let machine = Machine::new();
    let status = || String::from_utf8(machine.run(&["status"]).stdout).expect("text");
    assert!(status().contains("redis     never started"), "{}", status());
    let urls = machine.up(&["redis"]);
    assert!(status().contains(&urls["redis"]), "{}", status());
    let json = machine.run(&["status", "--json"]).stdout;
    assert_eq!(serde_json::from_slice::<BTreeMap<String, String>>(&json).expect("one object"), urls);
    let pid = machine.pid("redis");
    kill("STOP", &pid);
    let hangs = status();
    kill("CONT", &pid);
    assert!(hangs.contains("redis     alive, but it does not answer"), "{hangs}");
    machine.down(&[]);
    assert!(status().contains("redis     stopped"), "{}", status());
    assert!(machine.home().join("redis").exists(), "its data stays");
}

#[test]
fn an_unknown_name_is_answered_with_those_that_are_known() {
    let output = Machine::new().run(&["up", "oracle"]);
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("oracle") && said.contains("postgres, mariadb, redis"), "{said}");
}
