//! MariaDB, with the binary log that capture reads.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::Server;
use super::home::{Place, answer, run};
use super::install::{find, found};

pub(super) struct MariaDb;

impl Server for MariaDb {
    fn name(&self) -> &'static str {
        "mariadb"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["mariadb-server"]
    }

    fn installed(&self) -> bool {
        ["mariadbd", "mariadb-install-db", "mariadb"].iter().all(|program| find(program).is_some())
    }

    fn user(&self) -> &'static str {
        "mysql"
    }

    fn create(&self, place: &Place, data: &Path) -> Result<()> {
        let mut create = place.command(&found("mariadb-install-db")?);
        create.args(["--no-defaults", "--skip-test-db"]).arg(format!("--datadir={}", data.display()));
        // Otherwise root may come by the socket only, and not by TCP.
        create.arg("--auth-root-authentication-method=normal");
        run(create)
    }

    fn start(&self, place: &Place, port: u16) -> Result<Command> {
        let mut mariadbd = place.command(&found("mariadbd")?);
        mariadbd.arg("--no-defaults").arg(format!("--datadir={}", place.data.display()));
        // Not where others keep theirs: one that starts removes all that looks like its own.
        mariadbd.arg(format!("--tmpdir={}", place.data.display()));
        mariadbd.arg(format!("--port={port}")).args([
            "--bind-address=127.0.0.1",
            // In the data folder: a socket's whole path must be shorter than many a folder's.
            "--socket=socket",
            "--pid-file=pid",
            "--skip-name-resolve",
            // Tests run side by side, each with pools of its own.
            "--max-connections=600",
            "--server-id=1",
            "--log-bin=binlog",
            "--binlog-format=ROW",
            "--binlog-row-image=FULL",
            // With the columns' names, which capture needs.
            "--binlog-row-metadata=FULL",
        ]);
        Ok(mariadbd)
    }

    fn answers(&self, place: &Place, port: u16) -> bool {
        let Ok(client) = found("mariadb") else { return false };
        let port = format!("--port={port}");
        let ask = ["--no-defaults", "--host=127.0.0.1", &port, "--user=root", "-Ne", "SELECT @@datadir"];
        // Compared as paths: it says its folder with a slash at the end.
        answer(&client, &ask).is_some_and(|folder| Path::new(&folder) == place.data)
    }

    fn url(&self, port: u16) -> String {
        format!("mysql://root@127.0.0.1:{port}")
    }
}
