//! Apache Kafka in KRaft mode: one node, from the jars that the project publishes.

use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use super::home::{Place, run};
use super::install::{find, found};
use super::{PORTS, Server, downloads};

const POM: &str = include_str!("kafka/pom.xml");
const PROPERTIES: &str = include_str!("kafka/server.properties");

/// The folder of the jars; its name changes with them.
const JARS: &str = "kafka-4.1.1";

/// How far below the broker's port the controller's is: Kafka refuses to have the same on two addresses.
const CONTROLLER: u16 = 10_000;

/// Somebody who may come in by SCRAM, where a listener asks for it: such a login is part of the storage.
const LOGIN: &str = "SCRAM-SHA-512=[name=postrider,password=of-the-tests]";

/// Where the node keeps who it is.
const META: &str = "meta.properties";

pub(super) struct Kafka;

impl Server for Kafka {
    fn name(&self) -> &'static str {
        "kafka"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["openjdk-17-jre-headless", "maven"]
    }

    fn installed(&self) -> bool {
        find("java").is_some() && (downloads::has(JARS) || find("mvn").is_some())
    }

    fn user(&self) -> &'static str {
        // No package makes one for it.
        "nobody"
    }

    fn create(&self, place: &Place, data: &Path) -> Result<()> {
        // The storage is marked before the port is known: these settings serve that step alone.
        let settings = data.join("format.properties");
        std::fs::write(&settings, properties(data, PORTS.start, ""))?;
        let chance = RandomState::new();
        let cluster = format!("{:016x}{:06x}", chance.hash_one(1), chance.hash_one(2) >> 40);
        let mut format = java(place, "kafka.tools.StorageTool")?;
        format.args(["format", "--cluster-id", &cluster, "--add-scram", LOGIN, "--config"]).arg(&settings);
        run(format)?;
        std::fs::remove_file(settings)?;
        Ok(())
    }

    fn start(&self, place: &Place, port: u16) -> Result<Command> {
        let settings = place.data.join("server.properties");
        std::fs::write(&settings, properties(&place.data, port, &place.added()))?;
        let mut kafka = java(place, "kafka.Kafka")?;
        kafka.arg(settings);
        Ok(kafka)
    }

    fn answers(&self, place: &Place, port: u16) -> bool {
        let meta = std::fs::read_to_string(place.data.join(META)).unwrap_or_default();
        let ours = meta.lines().find_map(|line| line.strip_prefix("cluster.id="));
        ours.is_some() && cluster(port).as_deref() == ours
    }

    fn url(&self, port: u16) -> String {
        format!("kafka://127.0.0.1:{port}")
    }
}

/// The controller listens on another address of this machine and on a port that belongs to ours: nobody else is there,
/// and one number is free or taken for both. Of two settings of a name the later counts; `{listeners}` and `{advertised}`
/// in what was added are the usual ones.
fn properties(data: &Path, port: u16, added: &str) -> String {
    let (data, controller) = (data.display(), format!("127.0.0.2:{}", port - CONTROLLER));
    let advertised = format!("PLAINTEXT://127.0.0.1:{port}");
    let listeners = format!("{advertised},CONTROLLER://{controller}");
    let added = added.replace("{listeners}", &listeners).replace("{advertised}", &advertised);
    format!(
        "{PROPERTIES}\nlog.dirs={data}\n\
         listeners={listeners}\n\
         advertised.listeners={advertised}\n\
         controller.quorum.voters=1@{controller}\n{added}\n"
    )
}

/// One of Kafka's programs.
fn java(place: &Place, class: &str) -> Result<Command> {
    let mut java = place.command(&found("java")?);
    java.args(["-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-Dlog4j2.level=INFO"]);
    java.arg("-cp").arg(jars()?.join("*")).arg(class);
    Ok(java)
}

/// The jars of the server and of its tools, fetched by the first who asks.
fn jars() -> Result<PathBuf> {
    downloads::folder(JARS, |folder| {
        eprintln!("kafka: fetching its jars");
        let work = folder.with_extension("work");
        std::fs::create_dir_all(&work)?;
        std::fs::write(work.join("pom.xml"), POM)?;
        // In the environment of whoever asks: there it says where packages come from.
        let mut maven = Command::new(found("mvn")?);
        maven.args(["--batch-mode", "--quiet", "dependency:copy-dependencies", "-DincludeScope=runtime"]);
        maven.arg(format!("-DoutputDirectory={}", folder.display()));
        maven.current_dir(&work).stdin(Stdio::null());
        run(maven).context("the jars of Kafka cannot be fetched")?;
        Ok(std::fs::remove_dir_all(work)?)
    })
}

/// The cluster that answers at this port, once its broker has joined it.
fn cluster(port: u16) -> Option<String> {
    let patience = Duration::from_secs(5);
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut stream = TcpStream::connect_timeout(&address, patience).ok()?;
    stream.set_read_timeout(Some(patience)).ok()?;
    // Metadata, version 2, of no topic, from a client without a name.
    let request = [0, 3, 0, 2, 0, 0, 0, 1, 255, 255, 0, 0, 0, 0];
    stream.write_all(&[&[0, 0, 0, request.len() as u8][..], &request].concat()).ok()?;
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut answer = vec![0; usize::try_from(u32::from_be_bytes(length)).ok().filter(|size| *size < 65_536)?];
    stream.read_exact(&mut answer).ok()?;
    read_cluster(&answer)
}

/// The name of the cluster in an answer that names at least one broker.
fn read_cluster(answer: &[u8]) -> Option<String> {
    let mut rest = Fields(answer);
    let (_correlation, brokers) = (rest.number()?, rest.number()?);
    for _ in 0..brokers {
        let (_node, _host, _port, _rack) = (rest.number()?, rest.text()?, rest.number()?, rest.text()?);
    }
    rest.text()?.filter(|_| brokers > 0)
}

/// Numbers and texts, one after another.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn number(&mut self) -> Option<i32> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(i32::from_be_bytes(*number))
    }

    /// Some texts are no text at all.
    fn text(&mut self) -> Option<Option<String>> {
        let (length, rest) = self.0.split_first_chunk()?;
        let Ok(length) = usize::try_from(i16::from_be_bytes(*length)) else {
            self.0 = rest;
            return Some(None);
        };
        let (text, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some(Some(String::from_utf8_lossy(text).into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_has_a_name_once_a_broker_is_in_it() {
        let broker = [&[0, 0, 0, 1, 0, 1][..], b"h", &[0, 0, 35, 132, 255, 255]].concat();
        let answer = |brokers: u8, broker: &[u8]| {
            [&[0, 0, 0, 1, 0, 0, 0, brokers][..], broker, &[0, 3], b"abc", &[0, 0, 0, 1]].concat()
        };
        assert_eq!(read_cluster(&answer(1, &broker)).as_deref(), Some("abc"));
        assert_eq!(read_cluster(&answer(0, &[])), None);
        assert_eq!(read_cluster(&broker), None, "something else took the port");
    }
}
