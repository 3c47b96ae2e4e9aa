//! A server that speaks Pub/Sub: Google's emulator where the machine has it, and one of our own where not.
//!
//! Google publishes its emulator with its command line tools and nowhere else. The other is a small program around
//! Google's test server for Go. Both keep everything in memory.

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

/// Below the folder of Google's tools.
const EMULATOR: &str = "platform/pubsub-emulator/lib";

/// Where Debian packages of Google's tools have them.
const TOOLS: &str = "/usr/lib/google-cloud-sdk";

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
        emulator().is_some() || downloads::has(BUILT) || find("go").is_some()
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
        let Some((java, jar)) = emulator() else {
            let mut server = place.command(&built()?.join("pubsub"));
            server.arg(format!("-port={port}"));
            return Ok(server);
        };
        let mut server = place.command(&java);
        server.args(["-Xmx512m", "-XX:+UseSerialGC", "-jar"]).arg(jar);
        server.args(["--host=127.0.0.1", &format!("--port={port}")]);
        Ok(server)
    }

    fn answers(&self, _place: &Place, port: u16) -> bool {
        ask(port).is_some()
    }

    fn url(&self, port: u16) -> String {
        format!("pubsub://127.0.0.1:{port}/{PROJECT}")
    }
}

/// Java and Google's emulator, if both are here.
fn emulator() -> Option<(PathBuf, PathBuf)> {
    let java = find("java")?;
    // Beside the command line tools, wherever those were unpacked.
    let gcloud = find("gcloud").and_then(|program| program.canonicalize().ok());
    let unpacked = gcloud.as_deref().and_then(|program| program.parent()?.parent()).map(Path::to_owned);
    let roots = [Some(PathBuf::from(TOOLS)), unpacked].into_iter().flatten();
    let jars = roots.filter_map(|root| std::fs::read_dir(root.join(EMULATOR)).ok()).flatten().flatten();
    let jar = jars.map(|file| file.path()).find(|file| file.extension().is_some_and(|kind| kind == "jar"))?;
    Some((java, jar))
}

/// The folder of the other server, built by the first who asks.
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

/// Asks for a topic that is not there, until it is missed in the words of Pub/Sub. The emulator leaves connections open, so
/// nobody may wait for the end of an answer.
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
