//! What a Redis server says of itself, and which servers are not trusted with messages.

use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value, cmd};

use super::error::Error;

/// The oldest version with all that the scripts use.
pub(super) const LEAST: (u32, u32) = (7, 0);

/// What a server says of itself. `None`: it does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Server {
    pub(super) version: (u32, u32),
    pub(super) replica: bool,
    pub(super) replicas: Option<u64>,
    pub(super) cluster: bool,
    pub(super) used_memory: Option<u64>,
    pub(super) maxmemory: Option<u64>,
    pub(super) policy: Option<String>,
    pub(super) aof: Option<bool>,
    pub(super) aof_broken: bool,
}

impl Server {
    pub(super) fn from_info(info: &str) -> Self {
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
            replicas: number("connected_slaves"),
            cluster: number("cluster_enabled") == Some(1),
            used_memory: number("used_memory"),
            maxmemory: number("maxmemory"),
            policy: field("maxmemory_policy"),
            aof: number("aof_enabled").map(|on| on == 1),
            aof_broken: field("aof_last_write_status").is_some_and(|status| status != "ok"),
        }
    }

    /// The policy by which it throws keys away when it is full.
    pub(super) fn evicts(&self) -> Option<&str> {
        let policy = self.policy.as_deref().filter(|policy| *policy != "noeviction");
        policy.filter(|_| self.maxmemory != Some(0))
    }

    /// Why messages are not safe there, with the fix.
    pub(super) fn losses(&self) -> Vec<String> {
        let mut losses = Vec::new();
        if let Some(policy) = self.evicts() {
            losses.push(format!(
                "it throws keys away when it is full (maxmemory-policy {policy}): set `maxmemory-policy noeviction`"
            ));
        }
        if self.aof == Some(false) {
            losses.push("it writes nothing down (appendonly no): set `appendonly yes`".to_owned());
        }
        losses
    }
}

/// Refuses a server that is set up to lose messages. One that does not let itself be asked is taken as it is.
pub(super) async fn check(connection: &mut MultiplexedConnection) -> Result<(), Error> {
    let info: Result<Value, RedisError> = cmd("INFO").query_async(connection).await;
    let info = match info {
        Ok(info) => info,
        Err(error) => {
            return match Error::asking(&error) {
                Error::Said { code, .. } if code == "NOPERM" => Ok(()),
                Error::Unanswered(text) => Err(Error::Away(text)),
                other => Err(other),
            };
        }
    };
    let info = super::entry::text(info).unwrap_or_default();
    let losses = Server::from_info(&info).losses();
    if losses.is_empty() {
        return Ok(());
    }
    Err(Error::Unsafe(format!(
        "{}; or accept that with `accept_loss=true` in its URL",
        losses.join("; and ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_is_read() {
        let info = "# Server\r\nredis_version:7.0.15\r\nrole:slave\r\nconnected_slaves:2\r\nused_memory:50\r\nmaxmemory:100\r\n\
                    maxmemory_policy:volatile-lru\r\naof_enabled:1\r\naof_last_write_status:err\r\ncluster_enabled:1\r\n";
        let expected = Server {
            version: (7, 0),
            replica: true,
            replicas: Some(2),
            cluster: true,
            used_memory: Some(50),
            maxmemory: Some(100),
            policy: Some("volatile-lru".to_owned()),
            aof: Some(true),
            aof_broken: true,
        };
        assert_eq!(Server::from_info(info), expected);
    }

    #[test]
    fn a_server_that_evicts_or_writes_nothing_down_is_not_trusted() {
        let good = Server {
            policy: Some("noeviction".to_owned()),
            maxmemory: Some(100),
            aof: Some(true),
            ..Server::default()
        };
        assert!(good.losses().is_empty());
        let evicting = Server { policy: Some("allkeys-lru".to_owned()), ..good.clone() };
        assert!(evicting.losses()[0].contains("noeviction"));
        assert!(
            Server { maxmemory: Some(0), ..evicting }.losses().is_empty(),
            "without a limit nothing goes"
        );
        assert!(Server { aof: Some(false), ..good }.losses()[0].contains("appendonly yes"));
    }
}
