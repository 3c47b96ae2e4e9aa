//! A server that speaks Pub/Sub: a small program around Google's test server for Go, built here.
//!
//! Google's emulator would be nearer to the service, but it comes with Google's command line tools and nowhere else, and
//! after a stream of several has ended, keys that were that stream's share reach nobody any more. Test server and
//! emulator alike keep everything in memory.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use super::home::{Place, run};
use super::install::{find, found};
use super::{Server, downloads};

const SOURCES: [(&str, &str); 3] = [
    ("go.mod", include_str!("pubsub/go.mod")),
    ("go.sum", include_str!("pubsub/go.sum")),
    ("main.go", include_str!("pubsub/main.go")),
];

/// The folder of the program that is built from them; its name changes with them.
const BUILT: &str = "pubsub-1";

/// The project of the tests: no server asks whether it exists.
const PROJECT: &str = "postrider";

pub(super) struct PubSub;

impl Server for PubSub {
    fn name(&self) -> &'static str {
        "pubsub"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["golang-go"]
    }

    fn installed(&self) -> bool {
        downloads::has(BUILT) || find("go").is_some()
    }

    fn user(&self) -> &'static str {
        // No package makes one for it.
        "nobody"
    }

    fn create(&self, _place: &Place, _data: &Path) -> Result<()> {
        // Nothing is stored.
        Ok(())
    }

    fn start(&self, place: &Place, port: u16) -> Result<Command> {
        let mut server = place.command(&built()?.join("pubsub"));
        server.arg(format!("-port={port}"));
        Ok(server)
    }

    fn answers(&self, _place: &Place, port: u16) -> bool {
        ask(port).is_some()
    }

    fn url(&self, port: u16) -> String {
        format!("pubsub://127.0.0.1:{port}/{PROJECT}")
    }
}

/// The folder of the program, built by the first who asks.
fn built() -> Result<PathBuf> {
    downloads::folder(BUILT, |folder| {
        eprintln!("pubsub: building a server");
        for (name, text) in SOURCES {
            std::fs::write(folder.join(name), text)?;
        }
        // In the environment of whoever asks: there it says where modules come from.
        let mut go = Command::new(found("go")?);
        go.args(["build", "-o", "pubsub", "."]).env("CGO_ENABLED", "0");
        go.current_dir(folder).stdin(Stdio::null());
        run(go).context("the Pub/Sub server cannot be built")
    })
}

/// Asks for a topic that is not there, until it is missed in the words of Pub/Sub. The connection stays open, so nobody may
/// wait for the end of an answer.
fn ask(port: u16) -> Option<()> {
    let patience = Duration::from_secs(5);
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut stream = TcpStream::connect_timeout(&address, patience).ok()?;
    stream.set_read_timeout(Some(patience)).ok()?;
    let head = format!("Host: 127.0.0.1:{port}");
    let question = format!("GET /v1/projects/{PROJECT}/topics/nowhere HTTP/1.1\r\n{head}\r\n\r\n");
    stream.write_all(question.as_bytes()).ok()?;
    let mut answer = Vec::new();
    let mut part = [0; 4_096];
    while !String::from_utf8_lossy(&answer).contains("NOT_FOUND") {
        let count = stream.read(&mut part).ok().filter(|count| *count > 0)?;
        answer.extend_from_slice(&part[..count]);
    }
    Some(())
}
