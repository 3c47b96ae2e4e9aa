//! A database of a test's own on a real server, dropped with it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test file uses its part of it")]

use mysql_async::prelude::Queryable;
use tokio_postgres::NoTls;
use uuid::Uuid;

pub(crate) struct Database {
    server: String,
    name: String,
}

impl Database {
    pub(crate) async fn postgres() -> Self {
        let database = Self::new(testkit::servers::url("postgres"));
        let create = format!("CREATE DATABASE {}", database.name);
        connect(&database.server).await.batch_execute(&create).await.unwrap();
        database
    }

    pub(crate) async fn mariadb() -> Self {
        let server = testkit::servers::url("mariadb");
        let server = server.trim_end_matches('/').replacen("mariadb://", "mysql://", 1);
        let database = Self::new(format!("{server}/mysql"));
        let mut connection = mysql_async::Conn::from_url(&database.server).await.unwrap();
        connection.query_drop(format!("CREATE DATABASE {}", database.name)).await.unwrap();
        database
    }

    fn new(server: String) -> Self {
        Self { server, name: format!("postrider_inbox_{}", Uuid::new_v4().simple()) }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn url(&self) -> String {
        format!("{}/{}", self.server.rsplit_once('/').unwrap().0, self.name)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (server, name) = (self.server.clone(), self.name.clone());
        let dropped = async move {
            if server.starts_with("mysql:") {
                let mut connection = mysql_async::Conn::from_url(server).await.unwrap();
                connection.query_drop(format!("DROP DATABASE {name}")).await.unwrap();
            } else {
                let drop = format!("DROP DATABASE {name} WITH (FORCE)");
                connect(&server).await.batch_execute(&drop).await.unwrap();
            }
        };
        // On a thread of its own: this one may be inside a runtime.
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _ = std::thread::spawn(move || runtime().block_on(dropped)).join();
    }
}

pub(crate) async fn connect(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}
