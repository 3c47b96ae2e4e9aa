//! Real servers for tests: where they are, or the command that starts them.
//!
//! `cargo xtask servers up` starts them and writes down their URLs; `POSTRIDER_TEST_POSTGRES` and its like name
//! others. A server that is missing fails the test: a run that skips what it cannot reach proves nothing.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

/// A server on the same machine or beside it answers at once, or not at all.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// The URL of a server that is there: `postgres`, `mariadb` or `redis`.
///
/// # Panics
/// When it is not, with the command that starts it.
pub fn url(name: &str) -> String {
    let variable = format!("POSTRIDER_TEST_{}", name.to_uppercase());
    let given = std::env::var(&variable).ok().filter(|url| !url.is_empty());
    let remedy = format!("run `cargo xtask servers up {name}`, or set {variable} to the URL of one");
    let url = given.or_else(|| started(name));
    let url = url.unwrap_or_else(|| panic!("no {name} server is known: {remedy}"));
    // Only the place is shown: what stands before it may be a password.
    let place = place(&url)
        .unwrap_or_else(|| panic!("the URL of the {name} server names no host and port: {remedy}"));
    let addresses = place.to_socket_addrs().map(Vec::from_iter).unwrap_or_default();
    assert!(addresses.iter().any(reached), "no {name} server answers at {place}: {remedy}");
    url
}

/// What `cargo xtask servers up` wrote down.
fn started(name: &str) -> Option<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/servers.json");
    let urls: BTreeMap<String, String> = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    urls.get(name).cloned()
}

fn reached(address: &SocketAddr) -> bool {
    TcpStream::connect_timeout(address, ANSWERS_WITHIN).is_ok()
}

/// The host and port in a URL; without a port, the one that its scheme is known by.
fn place(url: &str) -> Option<String> {
    let (scheme, rest) = url.split_once("://")?;
    // A password may hold any of these signs where somebody forgot to escape it: what is left is checked.
    let place = rest.split('?').next()?.rsplit('@').next()?.split('/').next()?;
    // The colons within the brackets of an IPv6 address are no port.
    let colon = place.rfind(':').filter(|colon| !place[*colon..].contains(']'));
    let (host, port) = match colon {
        Some(colon) => (&place[..colon], place[colon + 1..].parse().ok()?),
        None => (place, usual_port(scheme)?),
    };
    (!host.is_empty()).then(|| format!("{host}:{port}"))
}

fn usual_port(scheme: &str) -> Option<u16> {
    match scheme {
        "postgres" | "postgresql" => Some(5432),
        "mysql" | "mariadb" => Some(3306),
        "redis" | "rediss" => Some(6379),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_is_read_from_every_kind_of_url_and_never_with_the_password() {
        let cases = [
            ("postgres://postgres@127.0.0.1:45488/postgres", "127.0.0.1:45488"),
            ("postgresql://me:p@ss:w@db.example/shop?sslmode=require", "db.example:5432"),
            ("mysql://root:secret@localhost", "localhost:3306"),
            ("mysql://root:sec/ret@localhost:1/shop", "localhost:1"),
            ("redis://127.0.0.1:6380", "127.0.0.1:6380"),
            ("rediss://:secret@[::1]/0", "[::1]:6379"),
            ("redis://[::1]:7000", "[::1]:7000"),
        ];
        for (url, expected) in cases {
            assert_eq!(place(url).as_deref(), Some(expected), "{url}");
        }
    }

    #[test]
    fn what_is_no_url_of_a_server_has_no_place() {
        for url in [
            "127.0.0.1:5432",
            "postgres:///shop",
            "gopher://there",
            "redis://:sec?ret@there",
            "redis://me:sec?ret@there",
        ] {
            assert_eq!(place(url), None, "{url}");
        }
    }
}
