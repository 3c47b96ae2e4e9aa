//! A database for one test: made fresh, dropped at its end.

#![allow(dead_code, reason = "each test file uses what it needs")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use store::postgres::{Config, PostgresStore};
use tokio_postgres::{Client, NoTls};

/// A database that is this test's own.
pub(crate) struct Database {
    name: String,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl Database {
    pub(crate) async fn fresh() -> Self {
        let name = format!("postrider_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let client = connect(&server()).await;
        client
            .batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
            .await
            .expect("no old one");
        client.batch_execute(&format!("CREATE DATABASE {name}")).await.expect("a database can be made");
        Self { name }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn url(&self) -> String {
        format!("{}/{}", server().rsplit_once('/').expect("the URL names a database").0, self.name)
    }

    /// A store in it, as a process opens it.
    pub(crate) async fn open(&self) -> Arc<PostgresStore> {
        Arc::new(PostgresStore::connect(Config::new(self.url())).await.expect("a store"))
    }

    /// The application's own connection, which knows nothing of Postrider but the tables.
    pub(crate) async fn application(&self) -> Client {
        connect(&self.url()).await
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        drop_at_server(format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name));
    }
}

/// A schema of the server's own database: made and dropped much faster than a database.
pub(crate) struct Schema {
    name: String,
}

impl Schema {
    pub(crate) async fn fresh() -> Self {
        let name = format!("postrider_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let client = connect(&server()).await;
        client.batch_execute(&format!("CREATE SCHEMA {name}")).await.expect("a schema can be made");
        Self { name }
    }

    pub(crate) fn url(&self) -> String {
        format!("{}?options=-c%20search_path%3D{}", server(), self.name)
    }
}

impl Drop for Schema {
    fn drop(&mut self) {
        drop_at_server(format!("SET client_min_messages = warning; DROP SCHEMA {} CASCADE", self.name));
    }
}

fn drop_at_server(sql: String) {
    let drop = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime of one thread");
        runtime.block_on(async { connect(&server()).await.batch_execute(&sql).await })
    };
    // On a thread of its own: this one may be inside a runtime.
    let dropped = std::thread::spawn(drop).join();
    if !std::thread::panicking() {
        dropped.expect("no panic").expect("it can be dropped");
    }
}

/// The URL of the server's own database.
pub(crate) fn server() -> String {
    testkit::servers::url("postgres")
}

pub(crate) async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("the server answers");
    tokio::spawn(connection);
    client
}

/// The one number that `sql` answers.
pub(crate) async fn number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.expect("an answer").get(0)
}
