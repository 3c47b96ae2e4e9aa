//! The contract of stores, rule by rule, on a real Redis.

#![cfg(feature = "redis")]

use std::sync::Arc;

use async_trait::async_trait;
use store::redis::{Config, RedisStore};
use store::{Store, Work};
use uuid::Uuid;

/// A store under a prefix of its own; its keys are deleted at the end.
struct Redis {
    config: Config,
}

#[async_trait]
impl testkit::store::Fixture for Redis {
    async fn fresh() -> Self {
        let url = testkit::servers::url("redis");
        let prefix = format!("{{conformance-{}}}", Uuid::new_v4().simple());
        Self { config: Config { prefix, ..Config::new(url) } }
    }

    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(RedisStore::connect(self.config.clone()).await.expect("the store can be opened"))
    }

    fn work(&self) -> Work {
        Work::Script("postrider.send('effects', nil, message.id, message.payload)".to_owned())
    }

    fn impossible_work(&self) -> Work {
        Work::Script("this is not = Lua".to_owned())
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // A server that is gone has nothing to tidy up.
        let Ok(client) = redis::Client::open(self.config.url.as_str()) else { return };
        let Ok(mut connection) = client.get_connection() else { return };
        let keys: Vec<Vec<u8>> =
            redis::Commands::scan_match(&mut connection, format!("{}:*", self.config.prefix))
                .map(|keys| keys.filter_map(Result::ok).collect())
                .unwrap_or_default();
        for some in keys.chunks(1_000) {
            let _ = redis::cmd("UNLINK").arg(some).exec(&mut connection);
        }
    }
}

testkit::store_conformance!(Redis);
