//! What a Redis server can promise, and which servers are refused.
//!
//! Redis keeps its data in memory. Whether a message survives a crash is a matter of settings, so they are looked at
//! before the first message is taken, and what they mean is said in plain words.

use ::redis::aio::ConnectionManager;
use ::redis::{RedisError, cmd};

use super::Config;
use crate::Error;

/// What an owner must write to start on a server that may lose messages.
pub(super) const ACCEPTED: &str = "I accept that messages may be lost";

/// The oldest version with all the commands that scripts use.
const LEAST: (u32, u32) = (6, 2);

/// What a server says of itself. `None`: it does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Server {
    pub(super) version: (u32, u32),
    replica: bool,
    cluster: bool,
    maxmemory: Option<u64>,
    policy: Option<String>,
    pub(super) aof: Option<bool>,
    pub(super) fsync: Option<String>,
}

impl Server {
    pub(super) async fn look(connection: &mut ConnectionManager) -> Result<Self, Error> {
        let info: String = cmd("INFO").query_async(connection).await?;
        // Managed servers often forbid this; then it is said that it could not be looked at.
        let fsync: Result<Vec<String>, RedisError> =
            cmd("CONFIG").arg("GET").arg("appendfsync").query_async(connection).await;
        let fsync = fsync.ok().and_then(|pair| pair.into_iter().nth(1));
        Ok(Self { fsync, ..Self::from_info(&info) })
    }

    fn from_info(info: &str) -> Self {
        let field = |name: &str| {
            info.lines()
                .find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
                .map(str::to_owned)
        };
        let number = |name: &str| field(name).and_then(|text| text.parse::<u64>().ok());
        let version = field("redis_version").unwrap_or_default();
        let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
        Self {
            version: (parts.next().unwrap_or(0), parts.next().unwrap_or(0)),
            replica: field("role").as_deref() == Some("slave"),
            cluster: number("cluster_enabled") == Some(1),
            maxmemory: number("maxmemory"),
            policy: field("maxmemory_policy"),
            aof: number("aof_enabled").map(|on| on == 1),
            fsync: None,
        }
    }

    /// Whether `FUNCTION` is known.
    pub(super) fn has_functions(&self) -> bool {
        self.version >= (7, 0)
    }

    pub(super) fn evicts(&self) -> Option<&str> {
        let policy = self.policy.as_deref().filter(|policy| *policy != "noeviction");
        policy.filter(|_| self.maxmemory != Some(0))
    }

    /// # Errors
    /// When no message should be trusted to this server; says why and what to do.
    pub(super) fn check(&self, config: &Config) -> Result<(), Error> {
        let refused = |text: String| Err(Error::Refused(text));
        if self.replica {
            return refused(
                "this Redis server is a replica and takes no writes: name its primary".to_owned(),
            );
        }
        let (major, minor) = self.version;
        if self.version < LEAST {
            return refused(format!(
                "this Redis server is version {major}.{minor}: a store needs {}.{} or newer",
                LEAST.0, LEAST.1
            ));
        }
        if config.accept_loss.is_some() && !config.accepts_loss() {
            return refused(format!("`accept_loss` must be exactly \"{ACCEPTED}\", or be left out"));
        }
        let mut losses = Vec::new();
        if let Some(policy) = self.evicts() {
            losses.push(format!(
                "it throws keys away when it is full (maxmemory-policy {policy}): set `maxmemory-policy noeviction`"
            ));
        }
        if self.aof == Some(false) {
            losses.push(
                "it does not write down what it is told (appendonly no), so that a crash loses messages: set \
                 `appendonly yes`"
                    .to_owned(),
            );
        }
        if losses.is_empty() || config.accepts_loss() {
            return Ok(());
        }
        refused(format!(
            "this Redis server may lose messages: {}. To use it as it is, set `accept_loss = \"{ACCEPTED}\"`",
            losses.join("; and ")
        ))
    }

    pub(super) fn promises(&self, prefix: &str, replicas: u32) -> Vec<String> {
        let mut said = vec![
            "A message is written together with the application's own keys when both are in one MULTI or one script \
             on this server; data in another database is not covered."
                .to_owned(),
            self.on_crash(),
            on_failover(replicas),
            self.when_full(),
            "Redis does not undo a script that fails halfway: a handler's script must look before it writes.".to_owned(),
        ];
        if self.cluster {
            said.push(format!(
                "On this cluster the whole store is in the slot of {prefix}: one store is one node's work."
            ));
        }
        said
    }

    fn on_crash(&self) -> String {
        match (self.aof, self.fsync.as_deref()) {
            (Some(false), _) => "A crash of Redis loses everything since its last snapshot (appendonly no).",
            (None, _) => "Whether a crash of Redis loses messages could not be looked at: INFO does not say it.",
            (_, Some("always")) => "What was acknowledged is on disk and survives a crash (appendfsync always).",
            (_, Some("no")) => "A crash of the machine loses what the system had not yet written (appendfsync no).",
            (_, Some(_)) => {
                "A crash of the machine loses up to the last second; a crash of Redis alone loses nothing that was \
                 acknowledged a second before (appendfsync everysec; `always` is stronger)."
            }
            (_, None) => {
                "The append-only file is on; how often it is put on disk could not be looked at (CONFIG is forbidden)."
            }
        }
        .to_owned()
    }

    fn when_full(&self) -> String {
        match (self.evicts(), self.maxmemory) {
            (Some(policy), _) => {
                format!(
                    "When memory runs out Redis throws messages away without a word (maxmemory-policy {policy})."
                )
            }
            (None, Some(0)) => {
                "Memory has no limit (maxmemory 0): watch that the machine has enough.".to_owned()
            }
            (None, None) => "What happens when memory runs out could not be looked at.".to_owned(),
            (None, Some(_)) => {
                "When memory runs out writers are refused; relays and retention go on and make room."
                    .to_owned()
            }
        }
    }
}

fn on_failover(replicas: u32) -> String {
    match replicas {
        0 => "A failover to a replica loses what that replica had not yet received: replication is asynchronous, and \
              `replicas = 0` does not wait for it."
            .to_owned(),
        some => format!(
            "A write is answered when {some} replica(s) have received it; with fewer the caller hears that it is \
             written but not replicated. A failover to a replica that is behind can still lose it."
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Server {
        Server {
            version: (7, 0),
            maxmemory: Some(0),
            policy: Some("noeviction".to_owned()),
            aof: Some(true),
            fsync: Some("always".to_owned()),
            ..Server::default()
        }
    }

    fn refusal(server: &Server, accept: Option<&str>) -> Option<String> {
        let config = Config { accept_loss: accept.map(str::to_owned), ..Config::new("redis://localhost") };
        server.check(&config).err().map(|error| error.to_string())
    }

    #[test]
    fn a_server_that_may_lose_messages_is_refused_unless_that_is_accepted_in_words() {
        let evicting = Server { maxmemory: Some(1 << 20), policy: Some("allkeys-lru".to_owned()), ..good() };
        let forgetful = Server { aof: Some(false), ..good() };
        let both = Server { aof: Some(false), ..evicting.clone() };
        assert_eq!(refusal(&good(), None), None);
        for (server, words) in [(&evicting, "noeviction"), (&forgetful, "appendonly yes"), (&both, "; and ")]
        {
            let told = refusal(server, None).expect("it is refused");
            assert!(told.contains(words) && told.contains(ACCEPTED), "{told}");
            assert_eq!(refusal(server, Some(ACCEPTED)), None);
            assert!(refusal(server, Some("yes")).expect("not the words").contains("exactly"));
        }
        let harmless = Server { policy: Some("allkeys-lru".to_owned()), ..good() };
        assert_eq!(refusal(&harmless, None), None, "without a limit nothing is thrown away");
    }

    #[test]
    fn a_replica_and_an_old_server_are_refused_whatever_is_accepted() {
        for server in [Server { replica: true, ..good() }, Server { version: (5, 0), ..good() }] {
            assert!(refusal(&server, Some(ACCEPTED)).is_some());
        }
    }

    #[test]
    fn info_is_read() {
        let info = "# Server\r\nredis_version:7.0.15\r\nrole:slave\r\nmaxmemory:100\r\nmaxmemory_policy:volatile-lru\r\n\
                    aof_enabled:1\r\ncluster_enabled:1\r\n";
        let expected = Server {
            version: (7, 0),
            replica: true,
            cluster: true,
            maxmemory: Some(100),
            policy: Some("volatile-lru".to_owned()),
            aof: Some(true),
            fsync: None,
        };
        assert_eq!(Server::from_info(info), expected);
    }
}
