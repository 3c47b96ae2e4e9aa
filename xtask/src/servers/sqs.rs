//! A server that speaks SQS: ElasticMQ, with its messages in a file so that they outlive a restart.

use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use super::home::{Place, run};
use super::install::{find, found};
use super::{Server, downloads};

const POM: &str = include_str!("sqs/pom.xml");

/// The folder of the jars; its name changes with them.
const JARS: &str = "elasticmq-1.7.1";

/// Where the server keeps which account it is.
const ACCOUNT: &str = "account";

/// A queue that is always there, to ask for.
const HERE: &str = "here";

pub(super) struct Sqs;

impl Server for Sqs {
    fn name(&self) -> &'static str {
        "sqs"
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

    fn create(&self, _place: &Place, data: &Path) -> Result<()> {
        let account = RandomState::new().hash_one(1) % 1_000_000_000_000;
        Ok(std::fs::write(data.join(ACCOUNT), format!("{account:012}"))?)
    }

    fn start(&self, place: &Place, port: u16) -> Result<Command> {
        let settings = place.data.join("server.conf");
        let account = std::fs::read_to_string(place.data.join(ACCOUNT))?;
        std::fs::write(&settings, config(&place.data, &account, port))?;
        let mut java = place.command(&found("java")?);
        java.args(["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]);
        java.arg(format!("-Dconfig.file={}", settings.display()));
        java.arg("-cp").arg(jars()?.join("*")).arg("org.elasticmq.server.Main");
        Ok(java)
    }

    fn answers(&self, place: &Place, port: u16) -> bool {
        let account = std::fs::read_to_string(place.data.join(ACCOUNT)).unwrap_or_default();
        let ours = format!("/{account}/{HERE}<");
        !account.is_empty() && ask(port).is_some_and(|answer| answer.contains(&ours))
    }

    fn url(&self, port: u16) -> String {
        // It asks for a key and a secret, and takes any.
        format!("sqs://key:secret@eu-central-1?endpoint=http://127.0.0.1:{port}")
    }
}

/// Its web server would give up on a poll of twenty seconds in the moment in which that is answered.
fn config(data: &Path, account: &str, port: u16) -> String {
    let messages = data.join("messages");
    let messages = messages.display();
    format!(
        "node-address {{ protocol = http, host = \"127.0.0.1\", port = {port}, context-path = \"\" }}\n\
         rest-sqs {{ enabled = true, bind-hostname = \"127.0.0.1\", bind-port = {port}, sqs-limits = strict }}\n\
         rest-stats {{ enabled = false }}\n\
         aws {{ region = eu-central-1, accountId = \"{account}\" }}\n\
         pekko.http.server {{ request-timeout = 60s, idle-timeout = 90s }}\n\
         messages-storage {{ enabled = true, uri = \"jdbc:h2:{messages}\" }}\n\
         queues {{ {HERE} {{}} }}\n"
    )
}

/// The jars of the server, fetched by the first who asks.
fn jars() -> Result<PathBuf> {
    downloads::folder(JARS, |folder| {
        eprintln!("sqs: fetching its jars");
        let work = folder.with_extension("work");
        std::fs::create_dir_all(&work)?;
        std::fs::write(work.join("pom.xml"), POM)?;
        // In the environment of whoever asks: there it says where packages come from.
        let mut maven = Command::new(found("mvn")?);
        maven.args(["--batch-mode", "--quiet", "dependency:copy-dependencies", "-DincludeScope=runtime"]);
        maven.arg(format!("-DoutputDirectory={}", folder.display()));
        maven.current_dir(&work).stdin(Stdio::null());
        run(maven).context("the jars of ElasticMQ cannot be fetched")?;
        Ok(std::fs::remove_dir_all(work)?)
    })
}

/// What the server at this port says of the queue that is always there: its account is in it.
fn ask(port: u16) -> Option<String> {
    let patience = Duration::from_secs(5);
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut stream = TcpStream::connect_timeout(&address, patience).ok()?;
    stream.set_read_timeout(Some(patience)).ok()?;
    let question =
        format!("GET /?Action=GetQueueUrl&QueueName={HERE} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n");
    stream.write_all(question.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.take(65_536).read_to_string(&mut answer).ok()?;
    Some(answer)
}
