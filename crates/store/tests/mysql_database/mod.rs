//! A fresh database for a test, gone when the test is over.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, OptsBuilder};

/// A database that nobody else uses.
pub(crate) struct Database {
    server: String,
    name: String,
}

impl Database {
    /// Makes one on the server that tests use.
    pub(crate) async fn fresh() -> Self {
        Self::on(&testkit::servers::url("mariadb")).await
    }

    /// Makes one on a server of the test's own.
    pub(crate) async fn on(server: &str) -> Self {
        let server = server.trim_end_matches('/').replacen("mariadb://", "mysql://", 1);
        let name = format!("postrider_test_{}", uuid::Uuid::new_v4().simple());
        let database = Self { server, name };
        let mut connection = database.administer().await;
        // Whatever the server's own character set is, the tables have theirs.
        connection
            .query_drop(format!("CREATE DATABASE {}", database.name))
            .await
            .expect("a database can be made");
        // The server may hang up before the goodbye has gone out.
        let _ = connection.disconnect().await;
        database
    }

    /// Where it is.
    pub(crate) fn url(&self) -> String {
        format!("{}/{}", self.server, self.name)
    }

    /// Where it is, for somebody else.
    #[allow(dead_code, reason = "not every test file has another user")]
    pub(crate) fn url_as(&self, user: &str, password: &str) -> String {
        let options = mysql_async::Opts::from_url(&self.url()).expect("the URL can be read");
        format!("mysql://{user}:{password}@{}:{}/{}", options.ip_or_hostname(), options.tcp_port(), self.name)
    }

    /// A connection of the application's own.
    #[allow(dead_code, reason = "not every test file has an application")]
    pub(crate) async fn application(&self) -> Conn {
        Conn::from_url(self.url()).await.expect("the application can connect")
    }

    /// Runs a script as people do: with the client's own command.
    #[allow(dead_code, reason = "not every test file has a script")]
    pub(crate) fn run_script(&self, script: &str) {
        use std::io::Write;
        let options = mysql_async::Opts::from_url(&self.url()).expect("the URL can be read");
        let mut client = std::process::Command::new("mariadb")
            .args(["--protocol=tcp", "--default-character-set=utf8mb4"])
            .arg(format!("--host={}", options.ip_or_hostname()))
            .arg(format!("--port={}", options.tcp_port()))
            .arg(format!("--user={}", options.user().unwrap_or("root")))
            .arg(format!("--password={}", options.pass().unwrap_or_default()))
            .arg(&self.name)
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("the command `mariadb` is there: it comes with the server");
        client.stdin.take().expect("it reads").write_all(script.as_bytes()).expect("it reads the script");
        assert!(client.wait().expect("it ends").success(), "the script can be run");
    }

    async fn administer(&self) -> Conn {
        let options = mysql_async::Opts::from_url(&self.server).expect("the server's URL can be read");
        Conn::new(OptsBuilder::from_opts(options).prefer_socket(false))
            .await
            .expect("the server can be reached")
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (server, name) = (self.server.clone(), self.name.clone());
        // The test's runtime may be ending: this needs one of its own.
        let dropped = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let options = mysql_async::Opts::from_url(&server).expect("the server's URL can be read");
                if let Ok(mut connection) = Conn::new(options).await {
                    // A case that ended early may still have a transaction open: it must not keep this one waiting.
                    let _ = connection.query_drop("SET SESSION lock_wait_timeout = 5").await;
                    let _ = connection.query_drop(format!("DROP DATABASE IF EXISTS {name}")).await;
                }
            });
        });
        let _ = dropped.join();
    }
}
