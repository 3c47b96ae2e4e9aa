//! The contract of stores, rule by rule, on PostgreSQL.

#![cfg(feature = "postgres")]

use std::sync::Arc;

use async_trait::async_trait;
use store::postgres::{Config, PostgresStore};
use store::{Store, Work};

mod postgres_server;

use postgres_server::Schema;

/// A schema of its own for each case; every handle has its own connections.
struct Postgres {
    schema: Schema,
}

#[async_trait]
impl testkit::store::Fixture for Postgres {
    async fn fresh() -> Self {
        Self { schema: Schema::fresh().await }
    }

    async fn open(&self) -> Arc<dyn Store> {
        let config = Config { pool: 4, ..Config::new(self.schema.url()) };
        Arc::new(PostgresStore::connect(config).await.expect("the store can be opened"))
    }

    fn work(&self) -> Work {
        Work::Sql(
            "INSERT INTO outbox_events (id, topic, payload) VALUES (:payload, 'effects', :id)".to_owned(),
        )
    }

    fn impossible_work(&self) -> Work {
        Work::Sql("INSERT INTO no_such_table VALUES (:id)".to_owned())
    }
}

testkit::store_conformance!(Postgres);
