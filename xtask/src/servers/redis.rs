//! Redis, with the append-only file that a store needs.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::Server;
use super::home::{Place, answer};
use super::install::{find, found};

pub(super) struct Redis;

impl Server for Redis {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["redis-server"]
    }

    fn installed(&self) -> bool {
        ["redis-server", "redis-cli"].iter().all(|program| find(program).is_some())
    }

    fn user(&self) -> &'static str {
        "redis"
    }

    fn create(&self, _place: &Place, _data: &Path) -> Result<()> {
        // It starts from an empty folder.
        Ok(())
    }

    fn start(&self, place: &Place, port: u16) -> Result<Command> {
        let mut redis = place.command(&found("redis-server")?);
        redis.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--daemonize", "no"]);
        redis.args(["--appendonly", "yes", "--save", ""]).arg("--dir").arg(&place.data);
        redis.args(place.added().lines());
        Ok(redis)
    }

    fn answers(&self, place: &Place, port: u16) -> bool {
        let Ok(client) = found("redis-cli") else { return false };
        let port = port.to_string();
        let served = answer(&client, &["-h", "127.0.0.1", "-p", &port, "CONFIG", "GET", "dir"]);
        served.is_some_and(|folder| Path::new(&folder) == place.data)
    }

    fn url(&self, port: u16) -> String {
        format!("redis://127.0.0.1:{port}")
    }
}
