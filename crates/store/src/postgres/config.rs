//! How to reach the database, read from one URL.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::{Error, Sent};

/// How long a connection may take to come about: longer than a busy server needs, shorter than a lease.
const CONNECT: Duration = Duration::from_secs(5);

/// Where the store is and how it behaves.
#[derive(Clone)]
pub struct Config {
    /// `postgres://user:password@host:port/database?sslmode=…`. `sslmode` is `disable`, `prefer` (the default: encrypted
    /// if the server can), `require` (encrypted, whoever answers), or `verify-full` (the server's certificate is
    /// checked too, by the system's roots or those in the file `sslrootcert`).
    pub url: String,
    /// What becomes of sent records.
    pub sent: Sent,
    /// Whether inserts by other programs wake a sleeping relay.
    pub doorbell: bool,
    /// Connections at most, besides the heartbeat's.
    pub pool: usize,
    /// Whether to bring the schema up to date; otherwise it must be.
    pub migrate: bool,
}

impl Config {
    /// The usual settings for the database at `url`.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), sent: Sent::default(), doorbell: false, pool: 8, migrate: true }
    }
}

/// Without the password: a configuration is printed in logs.
impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("url", &redacted(&self.url))
            .field("sent", &self.sent)
            .field("doorbell", &self.doorbell)
            .field("pool", &self.pool)
            .field("migrate", &self.migrate)
            .finish()
    }
}

/// A URL with neither its password nor its parameters, which may hold one too. What is no URL is not shown at all.
fn redacted(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return "…".to_owned() };
    let rest = rest.split('?').next().unwrap_or_default();
    match rest.rsplit_once('@') {
        Some((user, place)) => {
            let user = user.split(':').next().unwrap_or_default();
            format!("{scheme}://{user}:…@{place}")
        }
        None => format!("{scheme}://{rest}"),
    }
}

/// What is made of the server's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trust {
    /// Encrypted at most; nobody asks who answers.
    Anybody,
    /// The certificate must be good for the host's name, by the system's roots or those in this file.
    Verified(Option<PathBuf>),
}

/// Reads a URL.
pub(super) fn read(url: &str) -> Result<(tokio_postgres::Config, Trust), Error> {
    let refused =
        |why: String| Error::Refused(format!("the URL of the PostgreSQL store cannot be used: {why}"));
    if !(url.starts_with("postgres://") || url.starts_with("postgresql://")) {
        return Err(refused("it must start with postgres://".to_owned()));
    }
    let (place, parameters) = url.split_once('?').unwrap_or((url, ""));
    let mut trust = Trust::Anybody;
    let mut roots = None;
    let mut kept = Vec::new();
    for parameter in parameters.split('&').filter(|parameter| !parameter.is_empty()) {
        match parameter.split_once('=') {
            Some(("sslmode", "verify-full" | "verify-ca")) => {
                trust = Trust::Verified(None);
                kept.push("sslmode=require");
            }
            Some(("sslrootcert", "system")) => {}
            Some(("sslrootcert", file)) => roots = Some(PathBuf::from(file)),
            _ => kept.push(parameter),
        }
    }
    if let (Trust::Verified(file), Some(_)) = (&mut trust, &roots) {
        *file = roots;
    }
    // The driver names the option that is wrong, never its value.
    let mut config = tokio_postgres::Config::from_str(&format!("{place}?{}", kept.join("&")))
        .map_err(|error| refused(super::error::text(&error)))?;
    if config.get_application_name().is_none() {
        config.application_name("postrider");
    }
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(CONNECT);
    }
    Ok((config, trust))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_never_shows_a_password() {
        for url in [
            "postgres://ann:hunter2@db.example:5432/shop?sslmode=require",
            "postgres://ann:hunter2@db.example/shop?password=hunter2",
            "host=db user=ann password=hunter2",
            "postgres://ann:hunt@er2@db.example/shop",
        ] {
            let shown = format!("{:?}", Config::new(url));
            assert!(!shown.contains("hunter2") && !shown.contains("er2"), "{shown}");
        }
        let shown = format!("{:?}", Config::new("postgres://ann:x@db.example:5432/shop"));
        assert!(shown.contains("postgres://ann:…@db.example:5432/shop"), "{shown}");
    }

    #[test]
    fn a_url_that_cannot_be_used_says_what_is_wrong_and_not_what_is_secret() {
        for (url, expected) in [
            ("mysql://root:hunter2@db/shop", "must start with postgres://"),
            ("postgres://ann:hunter2@db:port/shop", "port"),
            ("postgres://ann:hunter2@db/shop?sslmode=perhaps", "sslmode"),
            ("postgres://ann:hunter2@db/shop?colour=red", "colour"),
        ] {
            let error = read(url).expect_err(expected).to_string();
            assert!(error.contains(expected) && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn verified_connections_name_their_roots() {
        let trust =
            |parameters: &str| read(&format!("postgres://db/shop?{parameters}")).expect("a good URL").1;
        assert_eq!(trust("sslmode=require"), Trust::Anybody);
        assert_eq!(trust("sslmode=verify-full"), Trust::Verified(None));
        assert_eq!(trust("sslmode=verify-full&sslrootcert=system"), Trust::Verified(None));
        assert_eq!(trust("sslrootcert=/ca.pem&sslmode=verify-full"), Trust::Verified(Some("/ca.pem".into())));
    }
}
