//! Where the server is and what Postrider may make there, from a URL or by hand.

use std::path::PathBuf;
use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::address::{Address, BadUrl, Kind, Secret};

/// The settings of a NATS broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Host and port of each server.
    pub servers: Vec<String>,
    /// Whether the connection must be encrypted.
    pub tls: bool,
    /// The certificate authority of a server that the machine does not know.
    pub ca: Option<PathBuf>,
    /// Who we are.
    pub login: Login,
    /// What every subject, and by default the stream, begins with.
    pub prefix: String,
    /// The stream that keeps the messages.
    pub stream: String,
    /// Partitions of every topic. All who publish to a stream, and all who read it, must agree on it.
    pub partitions: u32,
    /// Whether a stream that is missing is made.
    pub create: bool,
    /// Copies of a stream that is made.
    pub replicas: usize,
    /// How long a stream that is made keeps messages, read or not.
    pub retain: Duration,
    /// How long a stream that is made recognises a message that is sent twice.
    pub duplicates: Duration,
    /// How long one publish may take.
    pub timeout: Duration,
    /// Messages that wait for the server's word at a time.
    pub window: usize,
    /// How long a member of a group may be silent before its partitions are given to others.
    pub lease: Duration,
    /// Where a group begins that nobody has heard of.
    pub start: Start,
}

/// How the server knows us.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Login {
    /// It does not ask.
    #[default]
    Nobody,
    /// By a word that all share.
    Token(Secret),
    /// By name and password.
    Password(String, Secret),
    /// By a file of credentials, as NATS issues them.
    Credentials(PathBuf),
}

/// Where a new group begins to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// At the oldest message that is kept.
    #[default]
    Oldest,
    /// At this sequence number of the stream.
    Sequence(u64),
    /// At the first message that was stored at this time or later.
    Time(DateTime<Utc>),
}

const KIND: Kind = Kind {
    name: "NATS",
    schemes: &["nats", "natss"],
    example: "nats://127.0.0.1:4222",
    parameters: &[
        "prefix",
        "stream",
        "partitions",
        "create",
        "replicas",
        "retain",
        "duplicates",
        "timeout",
        "window",
        "lease",
        "start",
        "ca",
        "credentials",
    ],
};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Below this, an ordinary hiccup of the network would already cost a member its partitions.
const SHORTEST_LEASE: Duration = Duration::from_millis(200);

impl Default for Config {
    fn default() -> Self {
        Self {
            servers: vec!["127.0.0.1:4222".to_owned()],
            tls: false,
            ca: None,
            login: Login::Nobody,
            prefix: "postrider".to_owned(),
            stream: "postrider".to_owned(),
            partitions: 16,
            create: true,
            replicas: 1,
            retain: 7 * DAY,
            duplicates: Duration::from_secs(2 * 60),
            timeout: Duration::from_secs(10),
            window: 1024,
            lease: Duration::from_secs(10),
            start: Start::Oldest,
        }
    }
}

impl Config {
    /// For how long a stream that is made recognises a message: NATS allows no longer than it keeps one.
    pub(super) fn window(&self) -> Duration {
        self.duplicates.min(self.retain)
    }

    /// Reads `nats://user:password@host:4222,host:4222?prefix=shop&partitions=16`, or `natss://…` for TLS. A user without
    /// a password is a token, as NATS has it.
    ///
    /// # Errors
    /// When it is another kind of URL, or has a parameter or value that is not known.
    pub fn from_url(url: &str) -> Result<Self, BadUrl> {
        let address = Address::parse(url, KIND)?;
        let usual = Self::default();
        if address.hosts.is_empty() {
            return Err(address.wrong("host", format!("name a server, such as {}", KIND.example)));
        }
        if !address.path.is_empty() {
            return Err(address.wrong("path", "nothing stands after the servers but parameters"));
        }
        let prefix = address.text("prefix").unwrap_or(&usual.prefix).to_owned();
        if !is_subject(&prefix) {
            return Err(
                address.wrong("prefix", "use letters, digits, dashes and underscores, and dots between")
            );
        }
        let stream = address.text("stream").map_or_else(|| prefix.replace('.', "_"), str::to_owned);
        if !is_word(&stream) || stream.len() > 200 {
            return Err(address.wrong("stream", "use letters, digits, dashes and underscores"));
        }
        let secs = Duration::from_secs;
        let number = |name, least, most| address.number(name, least, most);
        let config = Self {
            tls: address.scheme == "natss",
            ca: address.text("ca").map(PathBuf::from),
            login: login(&address),
            partitions: number("partitions", 1, 1024)?.map_or(usual.partitions, |n| n as u32),
            create: address.flag("create")?.unwrap_or(usual.create),
            replicas: number("replicas", 1, 5)?.map_or(usual.replicas, |n| n as usize),
            retain: address.duration("retain", secs(60), 36_600 * DAY)?.unwrap_or(usual.retain),
            duplicates: address.duration("duplicates", secs(1), 366 * DAY)?.unwrap_or(usual.duplicates),
            timeout: address.duration("timeout", secs(1) / 10, secs(600))?.unwrap_or(usual.timeout),
            window: number("window", 1, 65_536)?.map_or(usual.window, |n| n as usize),
            lease: address.duration("lease", SHORTEST_LEASE, secs(3600))?.unwrap_or(usual.lease),
            start: start(&address)?,
            servers: address.hosts,
            prefix,
            stream,
        };
        Ok(config)
    }
}

fn login(address: &Address) -> Login {
    let file = address.text("credentials").map(|file| Login::Credentials(file.into()));
    let named = || match (address.user.clone()?, address.password.clone()) {
        (user, Some(password)) => Some(Login::Password(user, password)),
        (token, None) => Some(Login::Token(Secret::new(token))),
    };
    file.or_else(named).unwrap_or_default()
}

fn start(address: &Address) -> Result<Start, BadUrl> {
    let Some(text) = address.text("start") else { return Ok(Start::Oldest) };
    let start = match text.split_once(':') {
        Some(("seq", number)) => number.parse().ok().filter(|number| *number > 0).map(Start::Sequence),
        Some(("time", time)) => {
            DateTime::parse_from_rfc3339(time).ok().map(|time| Start::Time(time.to_utc()))
        }
        _ => None,
    };
    start.ok_or_else(|| address.wrong("start", "use seq:123 or time:2026-01-31T12:00:00Z"))
}

/// One or more words with dots between them.
fn is_subject(text: &str) -> bool {
    text.len() <= 100 && text.split('.').all(is_word)
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_url_means_the_default_settings() {
        let config = Config::from_url("nats://127.0.0.1:4222").expect("it is one");
        assert_eq!(config, Config::default());
    }

    #[test]
    fn every_parameter_is_read() {
        let url = "natss://ann:hu%40sh@one:4222,two?prefix=shop.eu&partitions=4&create=false&replicas=3&retain=1h\
                   &duplicates=10m&timeout=3s&window=10&lease=2s&start=time:2026-01-31T12:00:00%2B01:00&ca=/ca.pem";
        let config = Config::from_url(url).expect("it is one");
        let time = "2026-01-31T11:00:00Z".parse().expect("a time");
        let expected = Config {
            servers: vec!["one:4222".to_owned(), "two".to_owned()],
            tls: true,
            ca: Some("/ca.pem".into()),
            login: Login::Password("ann".to_owned(), Secret::new("hu@sh")),
            prefix: "shop.eu".to_owned(),
            stream: "shop_eu".to_owned(),
            partitions: 4,
            create: false,
            replicas: 3,
            retain: Duration::from_secs(3600),
            duplicates: Duration::from_secs(600),
            timeout: Duration::from_secs(3),
            window: 10,
            lease: Duration::from_secs(2),
            start: Start::Time(time),
        };
        assert_eq!(config, expected);
        assert!(!format!("{config:?}").contains("hu@sh"));
        let config = Config::from_url("nats://hush@one?stream=OTHER&start=seq:7").expect("it is one");
        assert_eq!((config.login, config.start), (Login::Token(Secret::new("hush")), Start::Sequence(7)));
        assert_eq!((config.prefix.as_str(), config.stream.as_str()), ("postrider", "OTHER"));
    }

    #[test]
    fn a_bad_url_is_refused_with_what_would_be_accepted() {
        let cases = [
            ("amqp://ann:hush@host", "write `nats://127.0.0.1:4222`"),
            ("nats://", "name a server"),
            ("nats://ann:hush@host/path", "nothing stands after"),
            ("nats://ann:hush@host?partition=4", "did you mean `partitions`?"),
            ("nats://ann:hush@host?prefix=a..b", "dots between"),
            ("nats://ann:hush@host?prefix=a.*", "dots between"),
            ("nats://ann:hush@host?stream=a.b", "use letters"),
            ("nats://ann:hush@host?partitions=0", "from 1 to 1024"),
            ("nats://ann:hush@host?replicas=6", "from 1 to 5"),
            ("nats://ann:hush@host?start=seq:0", "seq:123"),
            ("nats://ann:hush@host?start=yesterday", "seq:123"),
        ];
        for (url, expected) in cases {
            let error = Config::from_url(url).expect_err(url).to_string();
            assert!(error.contains(expected), "{url}: {error}");
            assert!(!error.contains("hush"), "{error}");
        }
    }
}
