//! The contract of stores, rule by rule, on a real Redis.

#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod redis_place;

use std::sync::Arc;

use async_trait::async_trait;
use redis_place::Place;
use store::{Store, Work};

/// A store under a prefix of its own.
struct Redis(Place);

#[async_trait]
impl testkit::store::Fixture for Redis {
    async fn fresh() -> Self {
        Self(Place::new())
    }

    async fn open(&self) -> Arc<dyn Store> {
        self.0.store().await
    }

    fn work(&self) -> Work {
        Work::Script("postrider.send('effects', nil, message.id, message.payload)".to_owned())
    }

    fn impossible_work(&self) -> Work {
        Work::Script("this is not = Lua".to_owned())
    }
}

testkit::store_conformance!(Redis);
