//! A Redis that a test looks into, and is rough with.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use broker::redis_streams::{Broker, Config};
use redis::Value;
use redis::aio::MultiplexedConnection;
use redis::streams::StreamRangeReply;
use testkit::servers::Own;

/// A prefix on a server.
pub(crate) struct Redis {
    pub(crate) url: String,
    pub(crate) prefix: String,
    own: Option<Own>,
}

impl Redis {
    fn at(url: String, own: Option<Own>) -> Self {
        Self { url, prefix: format!("test-{}", uuid::Uuid::new_v4()), own }
    }

    /// On the server that others use too.
    pub(crate) fn shared() -> Self {
        Self::at(testkit::servers::url("redis"), None)
    }

    /// On one of its own.
    pub(crate) fn alone() -> Self {
        let own = tokio::task::block_in_place(|| Own::start("redis"));
        Self::at(own.url().to_owned(), Some(own))
    }

    /// The same server under another prefix.
    pub(crate) fn under(&self, prefix: &str) -> Self {
        Self { url: self.url.clone(), prefix: prefix.to_owned(), own: None }
    }

    pub(crate) fn own(&self) -> &Own {
        self.own.as_ref().expect("it is alone")
    }

    pub(crate) fn open(&self, change: impl FnOnce(&mut Config)) -> Broker {
        let mut config = Config::from_url(&self.url).expect("the server's URL can be read");
        config.prefix.clone_from(&self.prefix);
        config.partitions = 4;
        change(&mut config);
        Broker::open(config).expect("the broker can be opened")
    }

    pub(crate) fn port(&self) -> String {
        self.url.rsplit(':').next().expect("there is a port").to_owned()
    }

    pub(crate) fn stream(&self, partition: usize) -> String {
        format!("{{{}}}:stream:orders:{partition}", self.prefix)
    }

    async fn connect(&self) -> redis::RedisResult<MultiplexedConnection> {
        redis::Client::open(self.url.as_str())?.get_multiplexed_async_connection().await
    }

    async fn ask<T: redis::FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        redis::cmd(words[0]).arg(&words[1..]).query_async(&mut self.connect().await?).await
    }

    pub(crate) async fn command(&self, words: &[&str]) -> Value {
        self.ask(words).await.unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    pub(crate) async fn info(&self, field: &str) -> Option<String> {
        let info: String = self.ask(&["INFO"]).await.ok()?;
        info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).map(str::to_owned)
    }

    /// As a crash does.
    pub(crate) async fn kill(&self) {
        let pid = self.info("process_id").await.expect("it says its process");
        let killed = Command::new("kill").args(["-9", &pid]).status().expect("kill can be run");
        assert!(killed.success());
        let gone = testkit::eventually(Duration::from_secs(10), || async { self.connect().await.is_err() });
        assert!(gone.await, "it is gone");
    }

    /// Starts it again, and waits until it has read what it had written down.
    pub(crate) async fn resume(&self) {
        tokio::task::block_in_place(|| self.own().resume());
        testkit::within(Duration::from_secs(30), "it has read its file", || async {
            self.info("loading").await.filter(|loading| loading == "0").map(drop)
        })
        .await;
    }

    /// What the client that comes with Redis says.
    pub(crate) fn cli(&self, words: &[&str]) -> String {
        let output = Command::new("redis-cli").args(["-u", &self.url]).args(words).output();
        let output = output.expect("redis-cli can be run");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    async fn entries(&self) -> redis::RedisResult<Vec<Vec<(String, i64)>>> {
        let mut all = Vec::new();
        for partition in 0..4 {
            let reply: StreamRangeReply = self.ask(&["XRANGE", &self.stream(partition), "-", "+"]).await?;
            all.push(super::numbers_of(&reply));
        }
        Ok(all)
    }

    /// The numbers of all messages that are stored.
    pub(crate) async fn stored(&self) -> Vec<i64> {
        let entries = self.entries().await.expect("streams can be read");
        entries.into_iter().flatten().map(|(_, number)| number).collect()
    }

    /// Waits until that many are stored, however long the server is away.
    pub(crate) async fn until_stored(&self, count: usize) {
        let there = || async {
            let mut sum = 0;
            for partition in 0..4 {
                sum += self.ask::<usize>(&["XLEN", &self.stream(partition)]).await.unwrap_or(0);
            }
            (sum >= count).then_some(())
        };
        testkit::within(Duration::from_secs(60), "messages are stored", there).await;
    }

    pub(crate) async fn assert_each_once_and_in_order(&self, count: i64) {
        let mut all = Vec::new();
        for entries in self.entries().await.expect("streams can be read") {
            let mut last: BTreeMap<String, i64> = BTreeMap::new();
            for (key, number) in entries {
                let before = last.insert(key.clone(), number);
                assert!(before.is_none_or(|before| before < number), "{key}: {number} after {before:?}");
                all.push(number);
            }
        }
        all.sort_unstable();
        assert_eq!(all, (0..count).collect::<Vec<_>>());
    }

    /// Messages that some member has and has not finished.
    pub(crate) async fn pending(&self, group: &str) -> i64 {
        let mut sum = 0;
        for partition in 0..4 {
            let pending: Vec<Value> =
                self.ask(&["XPENDING", &self.stream(partition), group]).await.expect("a group");
            let Value::Int(count) = pending[0] else { panic!("{pending:?}") };
            sum += count;
        }
        sum
    }

    /// The names of all consumers of a group.
    pub(crate) async fn consumers(&self, group: &str) -> std::collections::BTreeSet<String> {
        let mut names = std::collections::BTreeSet::new();
        for partition in 0..4 {
            let consumers: Vec<BTreeMap<String, Value>> =
                self.ask(&["XINFO", "CONSUMERS", &self.stream(partition), group]).await.expect("a group");
            for consumer in consumers {
                names.insert(redis::from_redis_value(consumer["name"].clone()).expect("a name"));
            }
        }
        names
    }
}
