//! Stores that nobody has used, and the clients that people have for them: `psql`, `mariadb` and `redis-cli`.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A database, or a prefix, that nobody has used; gone when it is dropped.
pub(crate) struct Place {
    /// The URL of the database; on Redis, the prefix.
    pub(crate) url: String,
    /// What stands under `[store]`.
    pub(crate) settings: String,
    forget: Box<dyn Fn()>,
}

impl Place {
    pub(crate) fn is_redis(&self) -> bool {
        !self.url.contains("://")
    }

    /// Runs a statement, or a command of Redis, with the client that people have, and answers what it says.
    pub(crate) fn ask(&self, statement: &str) -> String {
        let said = match self.url.split_once("://") {
            Some(("postgres", _)) => psql(&self.url, statement),
            Some(("mysql", _)) => {
                let (host, database) = self.url.rsplit_once('/').expect("it names a database");
                mariadb_client(host, database, statement)
            }
            Some((_, file)) => sqlite_file(file, statement),
            None => redis_cli(statement),
        };
        said.trim().to_owned()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        (self.forget)();
    }
}

pub(crate) fn fresh_name() -> String {
    static MADE: AtomicU32 = AtomicU32::new(0);
    format!("command_{}_{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed))
}

pub(crate) fn postgres() -> Place {
    let server = testkit::servers::url("postgres");
    let name = fresh_name();
    psql(&server, &format!("CREATE DATABASE {name}"));
    let url = format!("{}/{name}", server.rsplit_once('/').expect("the URL names a database").0);
    let forget = move || drop(psql(&server, &format!("DROP DATABASE {name} WITH (FORCE)")));
    Place { settings: format!("url = \"{url}\""), url, forget: Box::new(forget) }
}

pub(crate) fn mariadb() -> Place {
    let server = testkit::servers::url("mariadb");
    let name = fresh_name();
    mariadb_client(&server, "", &format!("CREATE DATABASE {name}"));
    let url = format!("{}/{name}", server.trim_end_matches('/'));
    let forget = move || drop(mariadb_client(&server, "", &format!("DROP DATABASE {name}")));
    Place { settings: format!("url = \"{url}\""), url, forget: Box::new(forget) }
}

/// A file that goes with the folder it is in.
pub(crate) fn sqlite() -> Place {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let url = format!("sqlite://{}", folder.path().join("shop.db").display());
    // Nothing to do: the folder goes with the closure that has it.
    let forget = move || {
        let _ = &folder;
    };
    Place { settings: format!("url = \"{url}\""), url, forget: Box::new(forget) }
}

fn sqlite_file(file: &str, statement: &str) -> String {
    let file = rusqlite::Connection::open(file).expect("it can be opened");
    file.busy_timeout(crate::harness::PATIENCE).expect("a setting");
    if !statement.starts_with("SELECT") {
        file.execute_batch(statement).expect("a statement");
        return String::new();
    }
    file.query_row(statement, [], |row| row.get::<_, i64>(0)).expect("a number").to_string()
}

/// A prefix of its own; its name is the place's URL.
pub(crate) fn redis() -> Place {
    let server = testkit::servers::url("redis");
    let prefix = format!("{{{}}}", fresh_name());
    let settings = format!("url = \"{server}\"\nprefix = \"{prefix}\"");
    let keys = format!("{prefix}*");
    let forget = move || {
        let found = redis_cli(&format!("KEYS {keys}"));
        for key in found.lines().filter(|key| !key.is_empty()) {
            redis_cli(&format!("DEL \"{key}\""));
        }
    };
    Place { url: prefix, settings, forget: Box::new(forget) }
}

/// Runs commands, a line each.
pub(crate) fn redis_cli(commands: &str) -> String {
    run("redis-cli", &["-u", &testkit::servers::url("redis")], commands)
}

/// Runs a program with `input` on its standard input; it must succeed.
pub(crate) fn run(program: &str, arguments: &[&str], input: &str) -> String {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| {
            panic!("cannot run {program}: {error}; `cargo xtask servers up` installs it with its server")
        });
    std::io::Write::write_all(&mut child.stdin.take().expect("it is piped"), input.as_bytes())
        .expect("it reads its input");
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {input}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn psql(url: &str, sql: &str) -> String {
    run("psql", &["-v", "ON_ERROR_STOP=1", "-qtA", url], sql)
}

/// `url` is that of the server; the client does not read URLs.
pub(crate) fn mariadb_client(url: &str, database: &str, sql: &str) -> String {
    let authority = url.split("://").nth(1).and_then(|rest| rest.split('/').next()).expect("a URL");
    let (user, address) = authority.split_once('@').expect("the URL names a user");
    let (host, port) = address.split_once(':').expect("the URL names a port");
    run("mariadb", &["-h", host, "-P", port, "-u", user, "-N", "-B", database], sql)
}
