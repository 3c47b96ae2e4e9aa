//! The contract of stores, rule by rule, on MySQL or MariaDB.

#![cfg(feature = "mysql")]

mod mysql_database;

use std::sync::Arc;

use async_trait::async_trait;
use mysql_database::Database;
use store::mysql::{Config, MysqlStore};
use store::{Store, Work};

/// A database of its own; every handle has its own connections.
struct Mysql(Database);

#[async_trait]
impl testkit::store::Fixture for Mysql {
    async fn fresh() -> Self {
        Self(Database::fresh().await)
    }

    async fn open(&self) -> Arc<dyn Store> {
        // All cases run side by side against their saboteurs: few connections each, or the server has none left.
        let config = Config { pool: 2, ..Config::new(self.0.url()) };
        Arc::new(MysqlStore::connect(config).await.expect("the store can be opened"))
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

mod mysql {
    testkit::store_conformance!(super::Mysql);
}
