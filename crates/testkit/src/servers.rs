//! Real servers for tests: where they are, or the command that starts them.
//!
//! `cargo xtask servers up` starts them and writes down their URLs; `POSTRIDER_TEST_POSTGRES` and its like name
//! others. A server that is missing fails the test: a run that skips what it cannot reach proves nothing.

use std::collections::BTreeMap;
use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;

/// The URL of a server that is there: `postgres`, `mariadb` or `redis`.
///
/// # Panics
/// When it is not, with the command that starts it.
pub fn url(name: &str) -> String {
    let variable = format!("POSTRIDER_TEST_{}", name.to_uppercase());
    let url = std::env::var(&variable).ok().or_else(|| started(name));
    let url = url.unwrap_or_else(|| panic!("no {name} server is known: {}", remedy(name, &variable)));
    let reached = address(&url).is_some_and(|address| TcpStream::connect(address).is_ok());
    assert!(reached, "no {name} server answers at {url}: {}", remedy(name, &variable));
    url
}

/// What `cargo xtask servers up` wrote down.
fn started(name: &str) -> Option<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/servers.json");
    let urls: BTreeMap<String, String> = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    urls.get(name).cloned()
}

fn remedy(name: &str, variable: &str) -> String {
    format!("run `cargo xtask servers up {name}`, or set {variable} to the URL of one")
}

/// The host and port in a URL.
fn address(url: &str) -> Option<std::net::SocketAddr> {
    let rest = url.split_once("://")?.1;
    let authority = rest.split(['/', '?']).next()?;
    authority.rsplit('@').next()?.to_socket_addrs().ok()?.next()
}
