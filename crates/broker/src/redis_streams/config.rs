//! Where the Redis is, what keys begin with, and how careful everybody must be, from a URL or by hand.

use std::path::PathBuf;
use std::time::Duration;

use redis::{
    Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo, TlsCertificates,
};

use crate::Secret;
use crate::address::{Address, BadUrl, Kind};

/// The settings of Redis Streams as a broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The server's name or address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Whether to speak TLS.
    pub tls: bool,
    /// Whose certificates are trusted, in PEM form; without it, those that the system trusts.
    pub ca: Option<PathBuf>,
    /// Whom to log in as; nothing is Redis's own `default`.
    pub user: Option<String>,
    /// That user's password.
    pub password: Option<Secret>,
    /// The number of the database.
    pub database: u16,
    /// What all keys begin with, in braces: `postrider` makes `{postrider}:stream:orders:0`.
    pub prefix: String,
    /// How long one publish, or one look for messages, may take.
    pub timeout: Duration,
    /// Whether topics that are missing are made.
    pub create: bool,
    /// Streams of topics that are made from now on. A topic keeps the number that it was made with, because another
    /// number would move its keys.
    pub partitions: u16,
    /// Bytes of payload at most; a larger message is rejected.
    pub max_payload: usize,
    /// Replicas that must have a message before it is confirmed.
    pub replicas: u32,
    /// How long a message that is sent twice is recognised.
    pub deduplication: Duration,
    /// How long messages are kept at least. Those that a group has not acknowledged are kept in any case.
    pub retain: Duration,
    /// How long a member of a group may be silent before its partitions are given to others.
    pub lease: Duration,
    /// Whether to publish to a server that is set up to lose messages: that evicts keys or writes nothing to disk.
    pub accept_loss: bool,
}

const KIND: Kind = Kind {
    name: "Redis Streams",
    schemes: &["redis", "rediss"],
    example: "redis://127.0.0.1:6379",
    parameters: &[
        "prefix",
        "timeout",
        "create",
        "partitions",
        "max_payload",
        "replicas",
        "deduplication",
        "retain",
        "lease",
        "accept_loss",
        "ca",
    ],
};

/// Redis refuses a longer text, unless `proto-max-bulk-len` says otherwise.
const LARGEST_PAYLOAD: usize = 512 << 20;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);

impl Config {
    /// The defaults: 16 partitions, payloads up to 1 MiB, duplicates known for 10 minutes, messages kept for an hour,
    /// leases of 10 seconds, no replicas.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
            tls: false,
            ca: None,
            user: None,
            password: None,
            database: 0,
            prefix: "postrider".to_owned(),
            timeout: Duration::from_secs(10),
            create: true,
            partitions: 16,
            max_payload: 1 << 20,
            replicas: 0,
            deduplication: 10 * MINUTE,
            retain: HOUR,
            lease: Duration::from_secs(10),
            accept_loss: false,
        }
    }

    /// Reads `redis://user:password@host:6379/0?prefix=shop&partitions=16&replicas=1`, or `rediss://` for TLS.
    ///
    /// # Errors
    /// When it is another kind of URL, or has a parameter or value that is not known.
    pub fn from_url(url: &str) -> Result<Self, BadUrl> {
        let address = Address::parse(url, KIND)?;
        let [place] = &address.hosts[..] else {
            return Err(address.wrong("host", format!("name one server, as in {}", KIND.example)));
        };
        let (host, port) = host_and_port(place).ok_or_else(|| {
            address.wrong("host", format!("write a host and a port, as in {}", KIND.example))
        })?;
        let database = match address.path.as_str() {
            "" => 0,
            path => path.parse().map_err(|_| address.wrong("database", "use its number, such as /0"))?,
        };
        let mut config = Self::new(host, port);
        config.tls = address.scheme == "rediss";
        config.ca = address.text("ca").map(PathBuf::from);
        if config.ca.is_some() && !config.tls {
            return Err(address.wrong("ca", "certificates need a URL that begins with rediss://"));
        }
        config.database = database;
        if let Some(prefix) = address.text("prefix") {
            config.prefix = prefix_of(prefix).ok_or_else(|| address.wrong("prefix", PREFIX))?;
        }
        config.read_limits(&address)?;
        config.user = address.user;
        config.password = address.password;
        Ok(config)
    }

    fn read_limits(&mut self, address: &Address) -> Result<(), BadUrl> {
        let second = Duration::from_secs(1);
        set(&mut self.timeout, address.duration("timeout", Duration::from_millis(100), 10 * MINUTE)?);
        set(&mut self.create, address.flag("create")?);
        set(&mut self.partitions, address.number("partitions", 1, 1_024)?.map(|number| number as u16));
        set(&mut self.max_payload, address.size("max_payload", 1, LARGEST_PAYLOAD)?);
        set(&mut self.replicas, address.number("replicas", 0, 100)?.map(|number| number as u32));
        set(&mut self.deduplication, address.duration("deduplication", second, 7 * DAY)?);
        set(&mut self.retain, address.duration("retain", Duration::ZERO, 36_600 * DAY)?);
        set(&mut self.lease, address.duration("lease", Duration::from_millis(100), HOUR)?);
        set(&mut self.accept_loss, address.flag("accept_loss")?);
        Ok(())
    }

    /// The prefix as keys begin with it: its braces put all of them into one slot, where scripts reach them.
    pub(super) fn tag(&self) -> String {
        format!("{{{}}}", self.prefix)
    }

    /// Host and port, for people. Never the password.
    pub(super) fn place(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    pub(super) fn client(&self) -> Result<Client, BadUrl> {
        let (host, port) = (self.host.clone(), self.port);
        let address = match self.tls {
            false => ConnectionAddr::Tcp(host, port),
            true => {
                // Another library of this process may have chosen one already: then that one serves.
                let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
                ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
            }
        };
        let mut login = RedisConnectionInfo::default().set_db(i64::from(self.database));
        if let Some(user) = &self.user {
            login = login.set_username(user);
        }
        if let Some(password) = &self.password {
            login = login.set_password(password.reveal());
        }
        let wrong = |error: redis::RedisError| BadUrl::Value {
            kind: KIND.name,
            name: "host".to_owned(),
            expected: format!("write {} ({})", KIND.example, error.category()),
        };
        let info: ConnectionInfo = address.into_connection_info().map_err(wrong)?;
        let info = info.set_redis_settings(login);
        let Some(ca) = &self.ca else { return Client::open(info).map_err(wrong) };
        let unusable = |why: String| BadUrl::Value {
            kind: KIND.name,
            name: "ca".to_owned(),
            expected: format!("name a file of certificates in PEM form ({}: {why})", ca.display()),
        };
        let root = std::fs::read(ca).map_err(|error| unusable(error.to_string()))?;
        let trusted = TlsCertificates { client_tls: None, root_cert: Some(root) };
        Client::build_with_tls(info, trusted).map_err(|error| unusable(error.to_string()))
    }
}

const PREFIX: &str = "use 1 to 100 letters, digits, dots, dashes, colons or underscores, such as shop";

/// A prefix without its braces, if it can be one.
fn prefix_of(text: &str) -> Option<String> {
    let name = text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).unwrap_or(text);
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:".contains(&byte);
    ((1..=100).contains(&name.len()) && name.bytes().all(plain)).then(|| name.to_owned())
}

/// `host`, `host:port`, `[::1]` or `[::1]:port`.
fn host_and_port(place: &str) -> Option<(String, u16)> {
    let (host, port) = match place.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            (host, rest.strip_prefix(':'))
        }
        None => match place.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    let port = port.map_or(Ok(6_379), str::parse).ok()?;
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_url_means_the_defaults() {
        assert_eq!(Config::from_url("redis://there"), Ok(Config::new("there", 6_379)));
        assert_eq!(Config::from_url("redis://[::1]:7000/"), Ok(Config::new("::1", 7_000)));
    }

    #[test]
    fn every_part_is_read() {
        let url = "rediss://ann:p%40ss@there:1/3?prefix={shop}&timeout=2s&create=false&partitions=4&max_payload=64KiB\
                   &replicas=2&deduplication=1m&retain=12h&lease=2s&accept_loss=true";
        let expected = Config {
            tls: true,
            user: Some("ann".to_owned()),
            password: Some(Secret::new("p@ss")),
            database: 3,
            prefix: "shop".to_owned(),
            timeout: Duration::from_secs(2),
            create: false,
            partitions: 4,
            max_payload: 64 << 10,
            replicas: 2,
            deduplication: MINUTE,
            retain: 12 * HOUR,
            lease: Duration::from_secs(2),
            accept_loss: true,
            ..Config::new("there", 1)
        };
        let config = Config::from_url(url).expect("a URL");
        assert_eq!(config, expected);
        assert_eq!(config.tag(), "{shop}");
        assert!(!format!("{config:?}").contains("p@ss"));
        assert!(!format!("{:?}", config.client().expect("a client").get_connection_info()).contains("p@ss"));
    }

    #[test]
    fn a_bad_url_is_refused_with_what_would_be_accepted() {
        let cases = [
            ("kafka://ann:hush@host", "write `redis://"),
            ("redis://ann:hush@a,b", "name one server"),
            ("redis://ann:hush@host:port", "a host and a port"),
            ("redis://ann:hush@host/shop", "its number"),
            ("redis://host?prefix=a%20b", "letters, digits"),
            ("redis://host?prefix=", "letters, digits"),
            ("redis://host?partition=4", "did you mean `partitions`?"),
            ("redis://host?partitions=0", "from 1 to 1024"),
            ("redis://host?lease=1ms", "from 100ms"),
            ("redis://host?dedup=1s", "did you mean `deduplication`?"),
        ];
        for (url, expected) in cases {
            let error = Config::from_url(url).expect_err(url).to_string();
            assert!(error.contains(expected), "{url}: {error}");
            assert!(!error.contains("hush"), "{error}");
        }
    }
}
