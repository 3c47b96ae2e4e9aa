//! Redis servers of a test's own, and places on the shared one.

#![allow(dead_code, reason = "each test file uses some of it")]

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Client, Connection, ConnectionLike};
use store::redis::{Config, RedisStore};
use store::{Store, TopicRule};
use tempfile::TempDir;
use testkit::store::Relay;
use uuid::Uuid;

/// Long enough for anything that happens at all.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// What keeps all that is acknowledged.
pub(crate) const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

/// A server in a folder of its own, gone with this value.
pub(crate) struct Server {
    process: Child,
    folder: TempDir,
    port: u16,
    settings: Vec<String>,
}

impl Server {
    pub(crate) fn start(settings: &[&str]) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let folder = TempDir::new().unwrap();
        let settings: Vec<String> = settings.iter().map(|&text| text.to_owned()).collect();
        let process = Self::run(port, &folder, &settings);
        let server = Self { process, folder, port, settings };
        server.wait_until_ready();
        server
    }

    fn run(port: u16, folder: &TempDir, settings: &[String]) -> Child {
        Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--dir"])
            .arg(folder.path())
            .args(settings)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed: run `cargo xtask servers up redis`")
    }

    fn wait_until_ready(&self) {
        let end = Instant::now() + PATIENCE;
        while !self.client().get_connection().is_ok_and(|mut connection| connection.check_connection()) {
            assert!(Instant::now() < end, "the server on port {} does not start", self.port);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it as a power cut would end the process.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub(crate) fn restart(&mut self) {
        self.process = Self::run(self.port, &self.folder, &self.settings);
        self.wait_until_ready();
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn port(&self) -> String {
        self.port.to_string()
    }

    pub(crate) fn client(&self) -> Client {
        Client::open(self.url()).unwrap()
    }

    /// For what people do by hand.
    pub(crate) fn connection(&self) -> Connection {
        self.client().get_connection().unwrap()
    }

    pub(crate) async fn store(&self) -> Arc<RedisStore> {
        Arc::new(RedisStore::connect(Config::new(self.url())).await.unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A prefix of its own on the shared server; its keys are deleted at the end.
pub(crate) struct Place {
    pub(crate) config: Config,
}

impl Place {
    pub(crate) fn new() -> Self {
        let url = testkit::servers::url("redis");
        Self {
            config: Config { prefix: format!("{{test-{}}}", Uuid::new_v4().simple()), ..Config::new(url) },
        }
    }

    pub(crate) async fn store(&self) -> Arc<RedisStore> {
        Arc::new(RedisStore::connect(self.config.clone()).await.unwrap())
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.config.prefix
    }

    /// A key of the application's, deleted with the rest.
    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}:application:{name}", self.prefix())
    }

    pub(crate) fn connection(&self) -> Connection {
        Client::open(self.config.url.as_str()).unwrap().get_connection().unwrap()
    }

    pub(crate) fn port(&self) -> String {
        self.config.url.rsplit(':').next().unwrap().trim_end_matches('/').to_owned()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A server that is gone has nothing to tidy up.
        let Ok(client) = Client::open(self.config.url.as_str()) else { return };
        let Ok(mut connection) = client.get_connection() else { return };
        let keys: Vec<Vec<u8>> = redis::Commands::scan_match(&mut connection, format!("{}:*", self.prefix()))
            .map(|keys| keys.filter_map(Result::ok).collect())
            .unwrap_or_default();
        for some in keys.chunks(1_000) {
            let _ = redis::cmd("UNLINK").arg(some).exec(&mut connection);
        }
    }
}

/// A relay that holds every lane.
pub(crate) async fn relay(store: &Arc<RedisStore>) -> Relay {
    let store: Arc<dyn Store> = store.clone();
    Relay::with_all_lanes(store).await
}

/// A relay that holds every lane and treats topics by `rule`.
pub(crate) async fn relay_by(store: &Arc<RedisStore>, rule: fn(&str) -> TopicRule) -> Relay {
    let store: Arc<dyn Store> = store.clone();
    Relay::with_all_lanes(store).await.by(rule)
}
