//! The contract of stores, rule by rule, on every backend of this crate.

use std::sync::Arc;

use async_trait::async_trait;
use store::sqlite::SqliteStore;
use store::{Store, Work};
use tempfile::TempDir;

/// SQLite in a folder of its own; every handle has its own writer and connections.
struct Sqlite {
    folder: TempDir,
}

#[async_trait]
impl testkit::store::Fixture for Sqlite {
    async fn fresh() -> Self {
        Self { folder: TempDir::new().expect("a folder can be made") }
    }

    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(SqliteStore::open(self.folder.path().join("store.db")).expect("the store can be opened"))
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

mod sqlite {
    testkit::store_conformance!(super::Sqlite);
}
