//! Real servers for tests: where they are, or the command that starts them.
//!
//! `cargo xtask servers up` starts them and writes down their URLs; `POSTRIDER_TEST_POSTGRES` and its like name
//! others. A server that is missing fails the test: a run that skips what it cannot reach proves nothing.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// A server on the same machine or beside it answers at once, or not at all.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// The URL of a server that is there, by the name that `cargo xtask servers up` knows it by.
///
/// # Panics
/// When it is not, with the command that starts it.
pub fn url(name: &str) -> String {
    find(name).unwrap_or_else(|problem| panic!("{problem}"))
}

/// The same for programs that are no tests.
///
/// # Errors
/// When it is not there, with the command that starts it.
pub fn find(name: &str) -> Result<String, String> {
    let variable = format!("POSTRIDER_TEST_{}", name.to_uppercase());
    let given = std::env::var(&variable).ok().filter(|url| !url.is_empty());
    let remedy = format!("run `cargo xtask servers up {name}`, or set {variable} to the URL of one");
    let url = given.or_else(|| started(name));
    let url = url.ok_or_else(|| format!("no {name} server is known: {remedy}"))?;
    // Only the place is shown: what stands before it may be a password.
    let place = place(&url)
        .ok_or_else(|| format!("the URL of the {name} server names no host and port: {remedy}"))?;
    let addresses = place.to_socket_addrs().map(Vec::from_iter).unwrap_or_default();
    if !addresses.iter().any(reached) {
        return Err(format!("no {name} server answers at {place}: {remedy}"));
    }
    Ok(url)
}

/// What `cargo xtask servers up` wrote down.
fn started(name: &str) -> Option<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/servers.json");
    let urls: BTreeMap<String, String> = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    urls.get(name).cloned()
}

fn reached(address: &SocketAddr) -> bool {
    TcpStream::connect_timeout(address, ANSWERS_WITHIN).is_ok()
}

/// The host and port in a URL; without a port, the one that its scheme is known by.
fn place(url: &str) -> Option<String> {
    // Where the host of a URL is a region or a project, the server stands in a parameter.
    if let Some((_, endpoint)) = url.split_once("endpoint=") {
        return place(endpoint.split('&').next()?);
    }
    let (scheme, rest) = url.split_once("://")?;
    // A password may hold any of these signs where somebody forgot to escape it: what is left is checked.
    let place = rest.split('?').next()?.rsplit('@').next()?.split('/').next()?;
    // The colons within the brackets of an IPv6 address are no port.
    let colon = place.rfind(':').filter(|colon| !place[*colon..].contains(']'));
    let (host, port) = match colon {
        Some(colon) => (&place[..colon], place[colon + 1..].parse().ok()?),
        None => (place, usual_port(scheme)?),
    };
    (!host.is_empty()).then(|| format!("{host}:{port}"))
}

fn usual_port(scheme: &str) -> Option<u16> {
    match scheme {
        "postgres" | "postgresql" => Some(5432),
        "mysql" | "mariadb" => Some(3306),
        "redis" | "rediss" => Some(6379),
        _ => None,
    }
}

/// A server of a test's own: nobody else uses it, so it may be stalled, stopped and started again. Gone when dropped.
#[derive(Debug)]
pub struct Own {
    name: &'static str,
    home: TempDir,
    url: String,
}

impl Own {
    /// Starts one, in a folder and on a port of its own.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(name: &'static str) -> Self {
        Self::start_with(name, |_| String::new())
    }

    /// Starts one with settings of a test's own, which may name files that it puts into the server's folder: of Kafka and
    /// RabbitMQ as in their files, of the others arguments, one in a line.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start_with(name: &'static str, settings: impl FnOnce(&Path) -> String) -> Self {
        let home = tempfile::tempdir().expect("a folder can be made");
        // Root's servers run as other users, who must be able to enter.
        std::fs::set_permissions(home.path(), PermissionsExt::from_mode(0o755)).expect("it is ours");
        let added = settings(home.path());
        std::fs::write(home.path().join(format!("{name}.added")), added).expect("a file can be written");
        let mut own = Self { name, home, url: String::new() };
        own.url = own.up();
        own
    }

    /// How a client with every right on it connects.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Stops it as its operator would, and starts it again on the same port with what it had stored.
    ///
    /// # Panics
    /// When it does not stop or start.
    pub fn restart(&self) {
        self.stop();
        assert_eq!(self.up(), self.url, "somebody took its port meanwhile");
    }

    /// Stops it as its operator would.
    ///
    /// # Panics
    /// When it does not stop.
    pub fn stop(&self) {
        self.xtask(&["down", self.name]);
    }

    /// Starts it again after [`stop`](Self::stop).
    ///
    /// # Panics
    /// When it does not start.
    pub fn resume(&self) {
        assert_eq!(self.up(), self.url, "somebody took its port meanwhile");
    }

    /// Makes it do nothing at all, as a machine does whose disk hangs, until the guard is dropped: connections are
    /// accepted by the kernel, and nobody answers.
    ///
    /// # Panics
    /// When its process cannot be found.
    pub fn stall(&self) -> Stalled {
        let group = self.group();
        signal("STOP", group);
        let stalled = Stalled { group };
        // On a busy machine a thread may run on for a while, and answer.
        let asked = Instant::now();
        while !is_stopped(group) {
            assert!(asked.elapsed() < Duration::from_secs(10), "{} does not stop", self.name);
            std::thread::sleep(Duration::from_millis(1));
        }
        stalled
    }

    /// The group of its processes.
    fn group(&self) -> u64 {
        let state = self.home.path().join(format!("{}.json", self.name));
        let state = std::fs::read(state).expect("a server that was started has a note");
        let state: serde_json::Value = serde_json::from_slice(&state).expect("the note is JSON");
        state["process"]["pid"].as_u64().expect("it runs")
    }

    fn up(&self) -> String {
        let said = self.xtask(&["up", self.name, "--json", "--unlisted"]);
        let urls: BTreeMap<String, String> = serde_json::from_slice(&said).expect("an object of URLs");
        urls[self.name].clone()
    }

    fn xtask(&self, arguments: &[&str]) -> Vec<u8> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
            .args(["xtask", "servers"])
            .args(arguments)
            .arg("--home")
            .arg(self.home.path())
            .output()
            .expect("cargo can be run");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "`cargo xtask servers {}` failed: {said}", arguments.join(" "));
        output.stdout
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // A second panic would hide the first; the folder goes, and with it the data, but not the process.
            let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.stop()));
            drop(stopped);
        } else {
            self.stop();
        }
    }
}

/// A server that does nothing until this is dropped.
#[derive(Debug)]
pub struct Stalled {
    group: u64,
}

impl Drop for Stalled {
    fn drop(&mut self) {
        signal("CONT", self.group);
    }
}

/// Whether every thread of every process of the group has stopped.
fn is_stopped(group: u64) -> bool {
    let all =
        |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let stat = |folder: &Path| std::fs::read_to_string(folder.join("stat")).unwrap_or_default();
    let of_group = |process: &PathBuf| {
        // State, parent and group follow the name, which may hold anything.
        let stat = stat(process);
        stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(2)) == Some(&group.to_string())
    };
    let stopped = |thread: PathBuf| {
        stat(&thread).rsplit(") ").next().is_none_or(|rest| !rest.starts_with(['R', 'S', 'D']))
    };
    all(Path::new("/proc")).filter(of_group).all(|process| all(&process.join("task")).all(stopped))
}

/// To the whole group: some servers are a shell that waits for the real one.
fn signal(name: &str, group: u64) {
    let script = format!("kill -s {name} -- -{group}");
    let status = Command::new("sh").args(["-c", &script]).status().expect("sh can be run");
    assert!(status.success(), "SIG{name} cannot be sent to the group {group}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_is_read_from_every_kind_of_url_and_never_with_the_password() {
        let cases = [
            ("postgres://postgres@127.0.0.1:45488/postgres", "127.0.0.1:45488"),
            ("postgresql://me:p@ss:w@db.example/shop?sslmode=require", "db.example:5432"),
            ("mysql://root:secret@localhost", "localhost:3306"),
            ("mysql://root:sec/ret@localhost:1/shop", "localhost:1"),
            ("redis://127.0.0.1:6380", "127.0.0.1:6380"),
            ("rediss://:secret@[::1]/0", "[::1]:6379"),
            ("redis://[::1]:7000", "[::1]:7000"),
            ("sqs://key:secret@eu-central-1?endpoint=http://127.0.0.1:9324&fifo=true", "127.0.0.1:9324"),
        ];
        for (url, expected) in cases {
            assert_eq!(place(url).as_deref(), Some(expected), "{url}");
        }
    }

    #[test]
    fn what_is_no_url_of_a_server_has_no_place() {
        for url in [
            "127.0.0.1:5432",
            "postgres:///shop",
            "gopher://there",
            "redis://:sec?ret@there",
            "redis://me:sec?ret@there",
        ] {
            assert_eq!(place(url), None, "{url}");
        }
    }
}
