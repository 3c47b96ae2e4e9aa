//! The contract of brokers, rule by rule, on a real Redis.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use broker::redis_streams::{Broker, Config};
use testkit::servers::Own;

/// Long enough to be renewed in time on a busy machine.
const LEASE: Duration = Duration::from_secs(2);

/// What makes the leases of all members of all groups end.
const EXPIRE: &str = "
for _, group in ipairs(redis.call('KEYS', KEYS[1] .. ':group:*')) do
  for _, field in ipairs(redis.call('HKEYS', group)) do
    if string.find(field, '^m:') then
      local rest = string.match(redis.call('HGET', group, field), ' .*')
      redis.call('HSET', group, field, '0' .. rest)
    end
  end
end";

/// Redis under a prefix of its own.
struct Redis {
    url: String,
    prefix: String,
    own: Option<Own>,
}

impl Redis {
    fn at(url: String, own: Option<Own>) -> Self {
        Self { url, prefix: format!("test-{}", uuid::Uuid::new_v4()), own }
    }

    fn client(&self, lease: Duration, create: bool) -> Arc<dyn testkit::broker::Broker> {
        let config = Config {
            prefix: self.prefix.clone(),
            partitions: 4,
            max_payload: 4_096,
            timeout: Duration::from_secs(3),
            lease,
            create,
            ..Config::from_url(&self.url).expect("the server's URL can be read")
        };
        Arc::new(Broker::open(config).expect("the broker can be opened"))
    }

    fn own(&self) -> &Own {
        self.own.as_ref().expect("only a server of its own is stalled or restarted")
    }
}

#[async_trait]
impl testkit::broker::Fixture for Redis {
    async fn fresh() -> Self {
        Self::at(testkit::servers::url("redis"), None)
    }

    async fn alone() -> Self {
        let own = tokio::task::spawn_blocking(|| Own::start("redis")).await.expect("a server can be started");
        Self::at(own.url().to_owned(), Some(own))
    }

    async fn open(&self) -> Arc<dyn testkit::broker::Broker> {
        self.client(LEASE, true)
    }

    async fn open_strict(&self) -> Option<Arc<dyn testkit::broker::Broker>> {
        Some(self.client(LEASE, false))
    }

    async fn open_silent(&self) -> Arc<dyn testkit::broker::Broker> {
        // A lease of an hour is next renewed in twenty minutes: until then nothing is heard of its members.
        self.client(Duration::from_secs(3_600), true)
    }

    async fn expire(&self) {
        let client = redis::Client::open(self.url.as_str()).expect("the server's URL can be read");
        let mut connection = client.get_multiplexed_async_connection().await.expect("it can be reached");
        let script = redis::Script::new(EXPIRE);
        let ended = script.key(format!("{{{}}}", self.prefix)).invoke_async::<()>(&mut connection).await;
        ended.expect("leases can be ended");
    }

    async fn stall(&self) -> Box<dyn Any + Send> {
        Box::new(self.own().stall())
    }

    async fn restart(&self) {
        tokio::task::block_in_place(|| self.own().restart());
    }

    fn patience(&self) -> Duration {
        LEASE
    }

    fn time_limit(&self) -> Duration {
        Duration::from_secs(6)
    }
}

mod redis_streams {
    testkit::broker_conformance!(super::Redis);
}
