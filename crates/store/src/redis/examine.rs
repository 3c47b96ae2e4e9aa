//! What `postrider doctor` sees of a Redis server that is a store.

use message::Finding;

use super::RedisStore;
use super::promise::Server;

impl RedisStore {
    /// What the server said of itself when it was connected to.
    pub fn examine(&self) -> Vec<Finding> {
        self.server.findings()
    }
}

impl Server {
    fn findings(&self) -> Vec<Finding> {
        let (major, minor) = self.version;
        let mut findings = vec![Finding::good("server", format!("Redis {major}.{minor}, the primary"))];
        findings.push(match (self.aof, self.fsync.as_deref()) {
            (Some(false), _) => Finding::broken(
                "appendonly",
                "no: a crash loses every message that was not sent",
                "set appendonly yes",
            ),
            (None, _) | (_, None) => Finding::doubtful(
                "appendonly",
                "the server does not say whether it writes down what it is told",
                "look at its settings: appendonly yes, appendfsync always",
            ),
            (_, Some("always")) => Finding::good("appendfsync", "always: what is answered is on disk"),
            (_, Some(other)) => Finding::doubtful(
                "appendfsync",
                format!("{other}: a crash of the machine loses up to the last second of messages"),
                "set appendfsync always if that must not be",
            ),
        });
        findings.push(match self.evicts() {
            Some(policy) => Finding::broken(
                "maxmemory-policy",
                format!("{policy}: messages are thrown away when it is full"),
                "set maxmemory-policy noeviction",
            ),
            None => Finding::good("maxmemory-policy", "nothing is thrown away when it is full"),
        });
        findings
    }
}
