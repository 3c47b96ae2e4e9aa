//! PostgreSQL, the newest that is installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::Server;
use super::home::{Place, answer, run};
use super::install::find;

pub(super) struct Postgres;

impl Server for Postgres {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["postgresql"]
    }

    fn installed(&self) -> bool {
        folder().is_some()
    }

    fn user(&self) -> &'static str {
        "postgres"
    }

    fn create(&self, place: &Place, data: &Path) -> Result<()> {
        let mut initdb = place.command(&program("initdb")?);
        initdb.arg("-D").arg(data).args(["-U", "postgres", "--auth=trust", "-E", "UTF8", "--locale=C.UTF-8"]);
        run(initdb)
    }

    fn start(&self, place: &Place, port: u16) -> Result<Command> {
        let mut postgres = place.command(&program("postgres")?);
        postgres.arg("-D").arg(&place.data).args(["-c", &format!("port={port}")]);
        for setting in [
            "listen_addresses=127.0.0.1",
            // A socket's path must be shorter than many a folder's.
            "unix_socket_directories=",
            // Tests run side by side, each with pools of its own.
            "max_connections=400",
            // Capture reads the log; a restart for another level would lose the other tests' connections.
            "wal_level=logical",
            "max_replication_slots=10",
            "max_wal_senders=10",
            "max_prepared_transactions=10",
        ] {
            postgres.args(["-c", setting]);
        }
        Ok(postgres)
    }

    fn answers(&self, place: &Place, port: u16) -> bool {
        let Ok(psql) = program("psql") else { return false };
        let (port, ask) = (port.to_string(), "SHOW data_directory");
        let served = answer(&psql, &["-XAtq", "-h", "127.0.0.1", "-p", &port, "-U", "postgres", "-c", ask]);
        served.is_some_and(|folder| Path::new(&folder) == place.data)
    }

    fn stop_signal(&self) -> &'static str {
        // SIGTERM would wait for every client to go.
        "INT"
    }

    fn url(&self, port: u16) -> String {
        format!("postgres://postgres@127.0.0.1:{port}/postgres")
    }
}

fn program(name: &str) -> Result<PathBuf> {
    Ok(folder().context("PostgreSQL is not installed any more")?.join(name))
}

/// Debian keeps each version in a folder of its own, off the path; others have it on the path.
fn folder() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let versions: Vec<_> = versions.map(|version| version.path()).collect();
    let newest =
        newest(versions.into_iter().filter(|version| version.join("bin/postgres").is_file()).collect());
    let debian = newest.map(|version| version.join("bin"));
    debian.or_else(|| Some(find("postgres")?.canonicalize().ok()?.parent()?.to_owned()))
}

fn newest(versions: Vec<PathBuf>) -> Option<PathBuf> {
    let number = |folder: &PathBuf| folder.file_name()?.to_str()?.parse::<f32>().ok();
    let numbered = versions.into_iter().filter_map(|folder| Some((number(&folder)?, folder)));
    numbered.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, folder)| folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_16_is_newer_than_9_6_and_than_what_is_no_version() {
        let folders = ["/p/9.6", "/p/16", "/p/15", "/p/old"].map(PathBuf::from);
        assert_eq!(newest(folders.to_vec()), Some(PathBuf::from("/p/16")));
    }
}
