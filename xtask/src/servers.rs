//! Real servers for the tests: installed, started on free loopback ports, found again, stopped.
//!
//! A test against an imitation proves the imitation. So every server that Postrider speaks to can be had by one
//! command, with its own data folder and port, beside whatever else the machine runs. What is the same for all is
//! here; what only one of them knows is in its file, behind [`Server`].

mod downloads;
mod home;
mod install;
mod kafka;
mod listing;
mod mariadb;
mod nats;
mod postgres;
mod process;
mod pubsub;
mod rabbitmq;
mod redis;
mod session;
mod sqs;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use home::{Home, Place, State};
use process::Process;
pub(crate) use session::with_servers;

/// Names and URLs, in the order of the names.
pub(crate) type Urls = BTreeMap<String, String>;

/// All that can be started. A new one is a file, and a line here.
const ALL: [&dyn Server; 8] = [
    &postgres::Postgres,
    &mariadb::MariaDb,
    &redis::Redis,
    &nats::Nats,
    &rabbitmq::RabbitMq,
    &kafka::Kafka,
    &sqs::Sqs,
    &pubsub::PubSub,
];

/// Below those that the kernel gives to clients: while a server is down, a client that tries again and again would
/// sooner or later be given the server's own port, be connected to itself, and keep the server from coming back.
const PORTS: Range<u16> = 20_000..32_000;

/// The recovery of a data folder after a crash takes a while on a busy machine; more than this is a fault.
const READY_WITHIN: Duration = Duration::from_secs(90);

/// A server that has not stopped by then is killed: its log recovers what it had confirmed.
const STOPPED_WITHIN: Duration = Duration::from_secs(60);

/// What only this server knows of itself.
trait Server: Sync {
    /// As people name it; in capitals, the end of `POSTRIDER_TEST_…`.
    fn name(&self) -> &'static str;

    /// The Debian packages that bring it.
    fn packages(&self) -> &'static [&'static str];

    /// Whether every program that the other functions use is on this machine.
    fn installed(&self) -> bool;

    /// The user that its package makes: where root starts it, it runs as that user.
    fn user(&self) -> &'static str;

    /// Fills the new, empty data folder.
    fn create(&self, place: &Place, data: &Path) -> Result<()>;

    /// The server in the foreground, on 127.0.0.1 alone.
    fn start(&self, place: &Place, port: u16) -> Result<Command>;

    /// Whether this server, and not another that took its port, answers in its own protocol.
    fn answers(&self, place: &Place, port: u16) -> bool;

    /// The signal that ends it in good order.
    fn stop_signal(&self) -> &'static str {
        "TERM"
    }

    /// How a client with every right on it connects.
    fn url(&self, port: u16) -> String;
}

/// The names that the command line knows.
pub(crate) fn names() -> [&'static str; ALL.len()] {
    ALL.map(Server::name)
}

/// Starts the named servers, or all, and says where they are. Those that run already are found.
pub(crate) fn up(names: &[String], home: Option<&Path>) -> Result<Urls> {
    let servers = named(names);
    let home = Home::open(home)?;
    install::install(&servers)?;
    let urls = at_once(&servers, |server| {
        let place = home.place(server)?;
        let url = server.url(bring_up(server, &place)?);
        Ok((server.name().to_owned(), url))
    })?;
    Ok(urls.into_iter().collect())
}

/// Tells the tests of them.
pub(crate) fn tell(urls: &Urls) -> Result<()> {
    listing::add(urls)
}

/// Stops the named servers, or all; what they stored stays unless it is to be wiped.
pub(crate) fn down(names: &[String], home: Option<&Path>, wipe: bool) -> Result<()> {
    let Some(home) = Home::find(home)? else { return Ok(()) };
    at_once(&named(names), |server| {
        let place = home.place_of_past(server);
        let Some(state) = State::read(&place)? else { return Ok(()) };
        if let Some(process) = state.process.filter(Process::alive) {
            process.end(server.name(), server.stop_signal(), STOPPED_WITHIN)?;
            eprintln!("{}: stopped", server.name());
        }
        listing::remove(&server.url(state.port))?;
        if wipe {
            place.wipe()?;
            eprintln!("{}: its data is gone", server.name());
            return Ok(());
        }
        State { process: None, ..state }.write(&place)
    })?;
    Ok(())
}

/// What is known of a server that was started once.
pub(crate) struct Status {
    pub(crate) name: &'static str,
    /// Where it answers, if it does.
    pub(crate) url: Option<String>,
    /// A sentence for people.
    pub(crate) told: String,
}

/// Looks at every server, and changes nothing.
pub(crate) fn status(home: Option<&Path>) -> Result<Vec<Status>> {
    let home = Home::find(home)?;
    let look = |server: &'static dyn Server| {
        let place = home.as_ref().map(|home| home.place_of_past(server));
        let state = place.as_ref().map(State::read).transpose()?.flatten();
        let (Some(place), Some(state)) = (place, state) else {
            return Ok(Status { name: server.name(), url: None, told: "never started".to_owned() });
        };
        let Some(process) = state.process.filter(Process::alive) else {
            let told = format!("stopped (data {}, log {})", place.data.display(), place.log.display());
            return Ok(Status { name: server.name(), url: None, told });
        };
        let url = server.answers(&place, state.port).then(|| server.url(state.port));
        let answer = url.as_deref().unwrap_or("alive, but it does not answer");
        let told = format!(
            "{answer} (pid {}, data {}, log {})",
            process.pid,
            place.data.display(),
            place.log.display()
        );
        Ok(Status { name: server.name(), url, told })
    };
    ALL.into_iter().map(look).collect()
}

fn named(names: &[String]) -> Vec<&'static dyn Server> {
    let wanted = |server: &&dyn Server| names.is_empty() || names.iter().any(|name| name == server.name());
    ALL.into_iter().filter(wanted).collect()
}

/// Servers start and stop slowly and alone: side by side it takes as long as the slowest.
fn at_once<T: Send>(
    servers: &[&'static dyn Server],
    work: impl Fn(&'static dyn Server) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let work = &work;
    std::thread::scope(|scope| {
        let running: Vec<_> = servers.iter().map(|&server| scope.spawn(move || work(server))).collect();
        // All are waited for before the first failure is told, so that none is left half started.
        let ended: Vec<_> = running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect();
        ended.into_iter().collect()
    })
}

/// The port at which the server answers when this returns.
fn bring_up(server: &dyn Server, place: &Place) -> Result<u16> {
    let name = server.name();
    let past = State::read(place)?;
    if let Some(State { port, process: Some(process) }) = past
        && process.alive()
    {
        ready(server, place, port, process)?;
        eprintln!("{name}: was running");
        return Ok(port);
    }
    if !place.data.exists() {
        eprintln!("{name}: making its data folder");
        place.create(|data| server.create(place, data))?;
    }
    let mut port = free_port(past.map(|state| state.port))?;
    loop {
        let process = place.spawn(server.start(place, port)?)?;
        State { port, process: Some(process) }.write(place)?;
        match ready(server, place, port, process) {
            Ok(()) => break,
            // Between our look and its start somebody else took the port: the one failure that another try mends.
            Err(_) if !process.alive() && !is_free(port) => port = free_port(None)?,
            Err(error) => return Err(error),
        }
    }
    eprintln!("{name}: started");
    Ok(port)
}

/// Waits for the first real answer.
fn ready(server: &dyn Server, place: &Place, port: u16, process: Process) -> Result<()> {
    let name = server.name();
    let log = place.log.display();
    let started = Instant::now();
    while !server.answers(place, port) {
        if !process.alive() {
            bail!("{name} ended before it was ready; the end of its log ({log}):\n{}", place.log_end());
        }
        ensure!(
            started.elapsed() < READY_WITHIN,
            "{name} (pid {}) is alive but has not answered for {READY_WITHIN:?}: see {log}; \
             `cargo xtask servers down {name}` stops it",
            process.pid
        );
        // There is nothing to wait on: a server does not tell strangers that it is ready.
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The port of last time if nobody has it, so that URLs somebody wrote down go on working.
fn free_port(last: Option<u16>) -> Result<u16> {
    let chance = |attempt: u16| RandomState::new().hash_one(attempt) as usize % PORTS.len();
    let others = (0..1000).filter_map(|attempt| PORTS.clone().nth(chance(attempt)));
    let free = last.into_iter().chain(others).find(|port| is_free(*port));
    free.with_context(|| format!("no port of 127.0.0.1 between {} and {} is free", PORTS.start, PORTS.end))
}

/// Asked by connecting. To bind it, even for a moment, would hold it for as long as a process that another thread is
/// just starting has a copy of the socket.
fn is_free(port: u16) -> bool {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let refused = TcpStream::connect_timeout(&address, Duration::from_secs(1)).err();
    refused.is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::OnceLock;

    use super::redis::Redis;
    use super::*;

    #[test]
    fn the_port_of_last_time_is_taken_again_unless_somebody_has_it() {
        let port = free_port(None).expect("a port");
        assert_eq!(free_port(Some(port)).expect("a port"), port);
        let _somebody = TcpListener::bind(("127.0.0.1", port)).expect("it is free");
        assert_ne!(free_port(Some(port)).expect("a port"), port);
    }

    /// Redis, and somebody who takes its port in the moment before its first start.
    #[derive(Default)]
    struct Robbed(OnceLock<TcpListener>);

    impl Robbed {
        fn stolen(&self) -> Option<u16> {
            Some(self.0.get()?.local_addr().expect("it listens").port())
        }
    }

    impl Server for Robbed {
        fn name(&self) -> &'static str {
            Redis.name()
        }
        fn packages(&self) -> &'static [&'static str] {
            Redis.packages()
        }
        fn installed(&self) -> bool {
            Redis.installed()
        }
        fn user(&self) -> &'static str {
            Redis.user()
        }
        fn create(&self, place: &Place, data: &Path) -> Result<()> {
            Redis.create(place, data)
        }
        fn start(&self, place: &Place, port: u16) -> Result<Command> {
            self.0.get_or_init(|| TcpListener::bind(("127.0.0.1", port)).expect("it is free"));
            Redis.start(place, port)
        }
        fn answers(&self, place: &Place, port: u16) -> bool {
            // The thief accepts and is silent, which would only make the test slow.
            self.stolen() != Some(port) && Redis.answers(place, port)
        }
        fn url(&self, port: u16) -> String {
            Redis.url(port)
        }
    }

    #[test]
    fn a_port_that_is_lost_at_the_last_moment_is_replaced_by_another() {
        let folder = tempfile::tempdir().expect("a folder");
        // Root's servers run as other users, who must be able to enter.
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).expect("it is ours");
        install::install(&[&Redis]).expect("it can be had");
        let home = Home::open(Some(folder.path())).expect("a home");
        let robbed = Robbed::default();
        let place = home.place(&robbed).expect("a place");
        let port = bring_up(&robbed, &place).expect("it starts");
        assert!(robbed.stolen().is_some_and(|stolen| stolen != port));
        let state = State::read(&place).expect("it can be read").expect("it was started");
        assert_eq!(state.port, port);
        let process = state.process.filter(Process::alive).expect("it runs");
        process.end("redis", "TERM", STOPPED_WITHIN).expect("it stops");
    }
}
