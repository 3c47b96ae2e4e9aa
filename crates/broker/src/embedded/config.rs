//! Where the broker keeps its file and how it treats what is in it, from a URL or by hand.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::address::{BadUrl, beginning, nearest, size};

/// The settings of an embedded broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The file; made, with its folder, when it is not there.
    pub path: PathBuf,
    /// Partitions of topics that are created from now on. A topic keeps the number that it was created with,
    /// because another number would move its keys.
    pub partitions: u16,
    /// Bytes of payload at most; a larger message is rejected.
    pub max_payload: usize,
    /// How long messages are kept after every group has acknowledged them.
    pub retain: Duration,
    /// How long a member of a group may be silent before its partitions are given to others.
    pub lease: Duration,
}

/// The parameters of a URL.
const PARAMETERS: [&str; 4] = ["partitions", "max_payload", "retain", "lease"];

/// SQLite refuses a row near 1 GB; half of that leaves room for everything beside the payload.
const LARGEST_PAYLOAD: usize = 512 << 20;

/// Below this, an ordinary hiccup of the disk would already cost a member its partitions.
const SHORTEST_LEASE: Duration = Duration::from_millis(50);

impl Config {
    /// The defaults: 16 partitions, payloads up to 1 MiB, kept for a day, leases of 10 seconds.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            partitions: 16,
            max_payload: 1 << 20,
            retain: Duration::from_secs(24 * 60 * 60),
            lease: Duration::from_secs(10),
        }
    }

    /// Reads `embedded://`, which means `default_path`, or
    /// `embedded://path/to/broker.db?partitions=16&retain=1d&max_payload=1MiB&lease=10s`.
    /// A path that begins with `/` is absolute (`embedded:///var/lib/broker.db`).
    ///
    /// # Errors
    /// When it is another kind of URL, or has a parameter or value that is not known.
    pub fn from_url(url: &str, default_path: impl AsRef<Path>) -> Result<Self, BadUrl> {
        let rest = url.strip_prefix("embedded://").ok_or_else(|| BadUrl::Scheme {
            found: beginning(url),
            kind: KIND,
            example: "embedded://path/to/broker.db",
        })?;
        let (path, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let path = if path.is_empty() { default_path.as_ref().to_owned() } else { PathBuf::from(path) };
        let mut config = Self::new(path);
        for parameter in parameters.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            config.set(name, value)?;
        }
        config.check()?;
        Ok(config)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), BadUrl> {
        match name {
            "partitions" => {
                self.partitions = value.parse().map_err(|_| wrong("partitions", PARTITIONS))?;
            }
            "max_payload" => {
                self.max_payload = size(value).ok_or_else(|| wrong("max_payload", MAX_PAYLOAD))?;
            }
            "retain" => {
                self.retain = humantime::parse_duration(value).map_err(|_| wrong("retain", RETAIN))?;
            }
            "lease" => {
                self.lease = humantime::parse_duration(value).map_err(|_| wrong("lease", LEASE))?;
            }
            _ => {
                let nearest = nearest(name, &PARAMETERS);
                return Err(BadUrl::Parameter { kind: KIND, name: name.to_owned(), nearest });
            }
        }
        Ok(())
    }

    /// Whether the values make sense, however they were set.
    ///
    /// # Errors
    /// Names the value and what would be accepted.
    pub(super) fn check(&self) -> Result<(), BadUrl> {
        if !(1..=1024).contains(&self.partitions) {
            return Err(wrong("partitions", PARTITIONS));
        }
        if !(1..=LARGEST_PAYLOAD).contains(&self.max_payload) {
            return Err(wrong("max_payload", MAX_PAYLOAD));
        }
        if !(SHORTEST_LEASE..=Duration::from_secs(3600)).contains(&self.lease) {
            return Err(wrong("lease", LEASE));
        }
        if self.retain > Duration::from_secs(100 * 366 * 24 * 60 * 60) {
            return Err(wrong("retain", RETAIN));
        }
        Ok(())
    }
}

fn wrong(name: &str, expected: &str) -> BadUrl {
    BadUrl::Value { kind: KIND, name: name.to_owned(), expected: expected.to_owned() }
}

/// As people call it.
const KIND: &str = "embedded";

const PARTITIONS: &str = "use a number from 1 to 1024";
const MAX_PAYLOAD: &str = "use a size from 1B to 512MiB, such as 1MiB or 64KiB";
const RETAIN: &str = "use a duration up to 100 years, such as 1d or 12h";
const LEASE: &str = "use a duration from 50ms to 1h, such as 10s";

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> Result<Config, String> {
        Config::from_url(url, "data/broker.db").map_err(|error| error.to_string())
    }

    #[test]
    fn a_bare_url_means_the_default_file_and_settings() {
        assert_eq!(read("embedded://"), Ok(Config::new("data/broker.db")));
        assert_eq!(read("embedded://a/b.db"), Ok(Config::new("a/b.db")));
        assert_eq!(read("embedded:///a/b.db"), Ok(Config::new("/a/b.db")));
    }

    #[test]
    fn parameters_are_read() {
        let config =
            read("embedded://x.db?partitions=4&retain=12h&max_payload=64KiB&lease=2s").expect("valid");
        let expected = Config {
            path: "x.db".into(),
            partitions: 4,
            max_payload: 64 << 10,
            retain: Duration::from_secs(12 * 3600),
            lease: Duration::from_secs(2),
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn a_bad_url_is_refused_with_what_would_be_accepted() {
        let cases = [
            ("kafka://user:secret@host", "`kafka://…` is no embedded broker"),
            ("broker.db", "write `embedded://"),
            ("embedded://?partition=4", "did you mean `partitions`?"),
            ("embedded://?maxpayload=4", "did you mean `max_payload`?"),
            ("embedded://?retention=1d", "did you mean `retain`?"),
            ("embedded://?partitions=0", "from 1 to 1024"),
            ("embedded://?partitions=99999", "from 1 to 1024"),
            ("embedded://?partitions", "from 1 to 1024"),
            ("embedded://?max_payload=1GiB", "512MiB"),
            ("embedded://?max_payload=99999999999999999999MiB", "512MiB"),
            ("embedded://?max_payload=0", "512MiB"),
            ("embedded://?retain=soon", "such as 1d"),
            ("embedded://?lease=1ms", "from 50ms"),
        ];
        for (url, expected) in cases {
            let error = read(url).expect_err(url);
            assert!(error.contains(expected), "{url}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
