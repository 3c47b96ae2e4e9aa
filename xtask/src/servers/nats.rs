//! NATS with JetStream, which keeps messages in files.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::Server;
use super::home::Place;
use super::install::{find, found};

/// A server greets whoever connects, at once.
const GREETS_WITHIN: Duration = Duration::from_secs(5);

pub(super) struct Nats;

impl Server for Nats {
    fn name(&self) -> &'static str {
        "nats"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["nats-server"]
    }

    fn installed(&self) -> bool {
        find("nats-server").is_some()
    }

    fn user(&self) -> &'static str {
        "nats"
    }

    fn create(&self, _place: &Place, _data: &Path) -> Result<()> {
        // It starts from an empty folder.
        Ok(())
    }

    fn start(&self, place: &Place, port: u16) -> Result<Command> {
        let mut nats = place.command(&found("nats-server")?);
        nats.args(["--addr", "127.0.0.1", "--port", &port.to_string()]);
        // Its name is how it is told from another server that took its port.
        nats.arg("--name").arg(&place.data).arg("--jetstream").arg("--store_dir").arg(&place.data);
        // Its statistics are on a free port too, which it writes into a file of that folder.
        nats.args(["--http_port", "-1"]).arg("--ports_file_dir").arg(&place.data);
        nats.args(place.added().lines());
        Ok(nats)
    }

    fn answers(&self, place: &Place, port: u16) -> bool {
        greeting(port).is_some_and(|greeting| {
            greeting["jetstream"] == true
                && greeting["server_name"].as_str().map(Path::new) == Some(&place.data)
        })
    }

    fn url(&self, port: u16) -> String {
        format!("nats://127.0.0.1:{port}")
    }
}

/// What the server says of itself before anything is asked: `INFO {…}`.
fn greeting(port: u16) -> Option<serde_json::Value> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let stream = TcpStream::connect_timeout(&address, GREETS_WITHIN).ok()?;
    stream.set_read_timeout(Some(GREETS_WITHIN)).ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    serde_json::from_str(line.strip_prefix("INFO ")?).ok()
}
