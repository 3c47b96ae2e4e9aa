//! RabbitMQ from its operator's side: its HTTP API, which `cargo xtask servers` puts at the same port of 127.0.0.2, and
//! rabbitmqctl.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The user and password of every new server, as HTTP has them.
const GUEST: &str = "Z3Vlc3Q6Z3Vlc3Q=";

/// Long enough for a server that has just started.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// The management of the server at `url`.
pub(crate) struct Management {
    port: u16,
}

impl Management {
    /// Of a server that `cargo xtask servers` started.
    pub(crate) fn of(url: &str) -> Self {
        let port = url.rsplit(':').next().and_then(|port| port.parse().ok());
        Self { port: port.expect("the URL ends with the port") }
    }

    fn get(&self, path: &str) -> Vec<u8> {
        let mut connection = TcpStream::connect(("127.0.0.2", self.port)).expect("the management answers");
        let request =
            format!("GET {path} HTTP/1.0\r\nHost: localhost\r\nAuthorization: Basic {GUEST}\r\n\r\n");
        connection.write_all(request.as_bytes()).expect("it listens");
        let mut answer = Vec::new();
        connection.read_to_end(&mut answer).expect("it answers");
        let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("an answer of HTTP");
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{path}: {}", String::from_utf8_lossy(&answer));
        answer.split_off(end + 4)
    }

    /// Runs rabbitmqctl for this server.
    pub(crate) fn ctl(&self, arguments: &[&str]) {
        let output = Command::new("sh").arg(self.folder().join("ctl")).args(arguments).output();
        let output = output.expect("sh can be run");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rabbitmqctl {}: {said}", arguments.join(" "));
    }

    /// Ends it as a crash does, with nothing put in order.
    pub(crate) fn crash(&self) {
        let script = self.folder().join("ctl");
        // Whether it still answers before it is gone is nobody's concern.
        let asked =
            Command::new("sh").arg(script).args(["eval", "erlang:halt(1, [{flush, false}])."]).output();
        asked.expect("sh can be run");
    }

    /// Where the server keeps its data, by its own account, which it gives some seconds after its start.
    fn folder(&self) -> PathBuf {
        let begun = Instant::now();
        loop {
            let nodes: serde_json::Value = serde_json::from_slice(&self.get("/api/nodes")).expect("JSON");
            if let Some(database) = nodes[0]["db_dir"].as_str() {
                return Path::new(database).ancestors().nth(2).expect("folder/mnesia/node").to_owned();
            }
            assert!(begun.elapsed() < PATIENCE, "a node that says nothing of itself: {nodes}");
            std::thread::sleep(PAUSE);
        }
    }

    /// The program that the management offers, ready to be run.
    pub(crate) fn admin(&self) -> Admin {
        let folder = tempfile::tempdir().expect("a folder can be made");
        std::fs::write(folder.path().join("rabbitmqadmin"), self.get("/cli/rabbitmqadmin")).expect("it fits");
        Admin { port: self.port, folder }
    }
}

/// rabbitmqadmin.
pub(crate) struct Admin {
    port: u16,
    folder: TempDir,
}

impl Admin {
    /// What it says.
    pub(crate) fn run(&self, arguments: &[&str]) -> String {
        let output = Command::new("python3")
            .arg(self.folder.path().join("rabbitmqadmin"))
            .args(["--host", "127.0.0.2", "--port", &self.port.to_string(), "--format", "raw_json"])
            .args(arguments)
            .output()
            .expect("python3 can be run");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rabbitmqadmin {}: {said}", arguments.join(" "));
        String::from_utf8(output.stdout).expect("text")
    }
}
