//! RabbitMQ with its management, as a node that shares nothing with another on the same machine.

use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::Server;
use super::home::{Place, run};
use super::install::{find, found};

pub(super) struct RabbitMq;

/// Off the path: what is on it is a wrapper that changes the user.
const PROGRAM: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";

/// How a client of AMQP 0-9-1 begins.
const HELLO: &[u8] = b"AMQP\x00\x00\x09\x01";

/// On the same machine it answers at once, or is not ready.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

impl Server for RabbitMq {
    fn name(&self) -> &'static str {
        "rabbitmq"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["rabbitmq-server"]
    }

    fn installed(&self) -> bool {
        Path::new(PROGRAM).is_file() && find("epmd").is_some()
    }

    fn user(&self) -> &'static str {
        "rabbitmq"
    }

    fn create(&self, place: &Place, data: &Path) -> Result<()> {
        // The name is in its data: a node that is called otherwise does not find its own queues.
        let name = format!("postrider-{:016x}", RandomState::new().hash_one(data));
        let mut write = place.command(&found("sh")?);
        write.args(["-c", r#"printf %s "$1" >"$0/node""#]).arg(data).arg(name);
        run(write)
    }

    fn start(&self, place: &Place, port: u16) -> Result<Command> {
        let mut rabbitmq = place.command(&found("sh")?);
        rabbitmq.args(["-c", include_str!("rabbitmq.sh"), "rabbitmq"]).arg(&place.data).arg(port.to_string());
        let (epmd, distribution) = (super::free_port(None)?, super::free_port(None)?);
        rabbitmq.args([epmd.to_string(), distribution.to_string(), place.added()]);
        Ok(rabbitmq)
    }

    fn answers(&self, place: &Place, port: u16) -> bool {
        greeted(&place.data, port).unwrap_or(false)
    }

    fn url(&self, port: u16) -> String {
        format!("amqp://guest:guest@127.0.0.1:{port}")
    }
}

/// Whether the node of this folder says who it is: its first words hold its name.
fn greeted(data: &Path, port: u16) -> Result<bool> {
    let name = std::fs::read(data.join("node")).context("it was never made")?;
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut connection = TcpStream::connect_timeout(&address, ANSWERS_WITHIN)?;
    connection.set_read_timeout(Some(ANSWERS_WITHIN))?;
    connection.write_all(HELLO)?;
    let (mut said, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let read = connection.read(&mut part)?;
        said.extend_from_slice(&part[..read]);
        if said.windows(name.len()).any(|words| words == name) {
            return Ok(true);
        }
        if read == 0 {
            return Ok(false);
        }
    }
}
