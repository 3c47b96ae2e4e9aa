//! The contract of brokers, rule by rule, on every backend of this crate.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use broker::embedded::{Broker, Config};
use tempfile::TempDir;

/// Long enough to be renewed in time on a busy machine.
const LEASE: Duration = Duration::from_secs(2);

/// The embedded broker in a folder of its own; every client has its own writer and connections.
struct Embedded {
    folder: TempDir,
}

impl Embedded {
    fn path(&self) -> PathBuf {
        self.folder.path().join("broker.db")
    }

    fn client(&self, lease: Duration) -> Arc<dyn testkit::broker::Broker> {
        let config = Config { partitions: 4, max_payload: 4_096, lease, ..Config::new(self.path()) };
        Arc::new(Broker::open(config).expect("the broker can be opened"))
    }

    fn connect(&self) -> rusqlite::Connection {
        let connection = rusqlite::Connection::open(self.path()).expect("the file can be opened");
        connection.busy_timeout(Duration::from_secs(10)).expect("a timeout can be set");
        connection
    }
}

#[async_trait]
impl testkit::broker::Fixture for Embedded {
    async fn fresh() -> Self {
        Self { folder: TempDir::new().expect("a folder can be made") }
    }

    async fn alone() -> Self {
        Self::fresh().await
    }

    async fn open(&self) -> Arc<dyn testkit::broker::Broker> {
        self.client(LEASE)
    }

    async fn open_strict(&self) -> Option<Arc<dyn testkit::broker::Broker>> {
        // A topic is made by its first message.
        None
    }

    async fn open_silent(&self) -> Arc<dyn testkit::broker::Broker> {
        // A lease of an hour is next renewed in twenty minutes: until then nothing is heard of its members.
        self.client(Duration::from_secs(3_600))
    }

    async fn expire(&self) {
        let ended = self.connect().execute("UPDATE broker_members SET locked_until = 0", []);
        ended.expect("leases can be ended");
    }

    async fn stall(&self) -> Box<dyn Any + Send> {
        let connection = self.connect();
        connection.execute_batch("BEGIN IMMEDIATE").expect("the file can be locked");
        Box::new(connection)
    }

    async fn restart(&self) {
        // There is nothing that runs: a file is as it was.
    }

    fn patience(&self) -> Duration {
        LEASE
    }

    fn time_limit(&self) -> Duration {
        // SQLite waits for a lock for 15 seconds and the publisher for 30 at most; the former comes first.
        Duration::from_secs(25)
    }
}

mod embedded {
    testkit::broker_conformance!(super::Embedded);
}
