//! Settings of a Kafka broker, and the URL that holds them.

use std::time::Duration;

use rdkafka::ClientConfig;

use crate::address::{Address, BadUrl, Kind, Secret};

const KIND: Kind = Kind {
    name: "Kafka",
    schemes: &["kafka", "kafkas"],
    example: "kafka://127.0.0.1:9092",
    parameters: &[
        "prefix",
        "timeout",
        "create",
        "partitions",
        "replication",
        "max_payload",
        "compression",
        "linger",
        "session",
        "sasl",
        "ca",
        "certificate",
        "key",
    ],
};

/// A URL without a port means this one.
const PORT: u16 = 9092;

/// Kafka's own limit for a batch unless somebody changed it, less what a batch adds to its only message.
const DEFAULT_MAX_PAYLOAD: usize = 1_000_000;

/// How a connection is protected and who we say we are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Security {
    /// Whether everything is encrypted.
    pub tls: bool,
    /// The file with the authorities that may vouch for the servers; the system's own if not named.
    pub ca: Option<String>,
    /// Files with a certificate and its key, for servers that want to know their clients by them.
    pub certificate: Option<(String, String)>,
    /// Name, password and how they are shown to the server.
    pub login: Option<(String, Secret, Sasl)>,
}

/// How a password is shown to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sasl {
    /// As it is.
    Plain,
    /// By a proof, with SHA-256.
    Scram256,
    /// By a proof, with SHA-512.
    Scram512,
}

impl Sasl {
    /// As Kafka calls it.
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "PLAIN",
            Self::Scram256 => "SCRAM-SHA-256",
            Self::Scram512 => "SCRAM-SHA-512",
        }
    }
}

/// Which brokers, and how they are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Host and port of brokers that are asked first; the others are learned from them.
    pub servers: Vec<String>,
    /// What the names of all topics and groups begin with.
    pub prefix: String,
    /// How long one `publish` may take.
    pub timeout: Duration,
    /// Whether a topic that is missing is made.
    pub create: bool,
    /// Partitions of a topic that is made.
    pub partitions: u16,
    /// Copies of a topic that is made; what the server has as its default if not named.
    pub replication: Option<u16>,
    /// Bytes of payload at most.
    pub max_payload: usize,
    /// What batches are packed with: `none`, `lz4`, `zstd`, `snappy` or `gzip`.
    pub compression: String,
    /// How long a batch waits for more messages.
    pub linger: Duration,
    /// How long a member of a group may be silent before the others get its partitions.
    pub session: Duration,
    /// How often a member says that it lives.
    pub heartbeat: Duration,
    /// Nothing is sent again by the client itself, not even where Kafka would recognise it.
    pub once: bool,
    /// How connections are protected.
    pub security: Security,
}

impl Config {
    /// Brokers at `server`, in the clear.
    pub fn new(server: impl Into<String>) -> Self {
        let session = Duration::from_secs(20);
        Self {
            servers: vec![server.into()],
            prefix: String::new(),
            timeout: Duration::from_secs(10),
            create: true,
            partitions: 6,
            replication: None,
            max_payload: DEFAULT_MAX_PAYLOAD,
            compression: "none".to_owned(),
            linger: Duration::from_millis(1),
            session,
            heartbeat: session / 5,
            once: false,
            security: Security { tls: false, ca: None, certificate: None, login: None },
        }
    }

    /// Reads `kafka://user:password@host:9092,host:9092?prefix=…`; with `kafkas`, everything is encrypted.
    ///
    /// # Errors
    /// Says what is wrong and what would be accepted.
    pub fn from_url(url: &str) -> Result<Self, BadUrl> {
        let address = Address::parse(url, KIND)?;
        if address.hosts.is_empty() {
            return Err(address.wrong("host", format!("name at least one, as in {}", KIND.example)));
        }
        if !address.path.is_empty() {
            return Err(address.wrong("path", "nothing follows the hosts: a prefix of topics is `prefix=`"));
        }
        let usual = Self::new("");
        let second = Duration::from_secs(1);
        let (partitions, replication) =
            (address.number("partitions", 1, 10_000)?, address.number("replication", 1, 100)?);
        let small = |number: Option<u64>| number.and_then(|number| u16::try_from(number).ok());
        let session = address.duration("session", second / 2, second * 1_800)?.unwrap_or(usual.session);
        let compression = address.text("compression").unwrap_or("none");
        if !["none", "lz4", "zstd", "snappy", "gzip"].contains(&compression) {
            return Err(address.wrong("compression", "use none, lz4, zstd, snappy or gzip"));
        }
        Ok(Self {
            servers: address.hosts.iter().map(|host| with_port(host)).collect(),
            prefix: prefix(&address)?,
            timeout: address.duration("timeout", second, second * 300)?.unwrap_or(usual.timeout),
            create: address.flag("create")?.unwrap_or(usual.create),
            partitions: small(partitions).unwrap_or(usual.partitions),
            replication: small(replication),
            max_payload: address.size("max_payload", 1, 100_000_000)?.unwrap_or(usual.max_payload),
            compression: compression.to_owned(),
            linger: address.duration("linger", Duration::ZERO, second)?.unwrap_or(usual.linger),
            session,
            heartbeat: session / 5,
            once: false,
            security: Security::read(&address)?,
        })
    }

    /// What every client of these brokers is told.
    pub(super) fn client(&self) -> ClientConfig {
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", self.servers.join(","));
        client.set("client.id", "postrider");
        // A topic is made on purpose or not at all.
        client.set("allow.auto.create.topics", "false");
        // A server that comes back is noticed within a second, not within ten.
        client.set("reconnect.backoff.ms", "50").set("reconnect.backoff.max.ms", "1000");
        client.set("socket.connection.setup.timeout.ms", millis(self.timeout.max(Duration::from_secs(1))));
        client.set("socket.keepalive.enable", "true");
        // A small request must not wait until the one before it is acknowledged.
        client.set("socket.nagle.disable", "true");
        self.security.set(&mut client);
        client
    }
}

impl Security {
    fn read(address: &Address) -> Result<Self, BadUrl> {
        let tls = address.scheme == "kafkas";
        let file = |name: &str| -> Result<Option<String>, BadUrl> {
            match address.text(name) {
                Some(_) if !tls => {
                    Err(address.wrong(name, "certificates need a URL that begins with kafkas://"))
                }
                file => Ok(file.map(str::to_owned)),
            }
        };
        let certificate = match (file("certificate")?, file("key")?) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(address.wrong("certificate", "name both files: certificate= and key=")),
        };
        let sasl = match address.text("sasl") {
            None | Some("PLAIN") => Sasl::Plain,
            Some("SCRAM-SHA-256") => Sasl::Scram256,
            Some("SCRAM-SHA-512") => Sasl::Scram512,
            Some(_) => return Err(address.wrong("sasl", "use PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512")),
        };
        let login = match (&address.user, &address.password) {
            (Some(user), Some(password)) => Some((user.clone(), password.clone(), sasl)),
            (None, None) if address.text("sasl").is_none() => None,
            _ => return Err(address.wrong("user", "write both, as in kafka://user:password@host:9092")),
        };
        Ok(Self { tls, ca: file("ca")?, certificate, login })
    }

    fn set(&self, client: &mut ClientConfig) {
        let protocol = match (self.tls, &self.login) {
            (false, None) => "plaintext",
            (true, None) => "ssl",
            (false, Some(_)) => "sasl_plaintext",
            (true, Some(_)) => "sasl_ssl",
        };
        client.set("security.protocol", protocol);
        if let Some(ca) = &self.ca {
            client.set("ssl.ca.location", ca);
        }
        if let Some((certificate, key)) = &self.certificate {
            client.set("ssl.certificate.location", certificate).set("ssl.key.location", key);
        }
        if let Some((user, password, sasl)) = &self.login {
            client.set("sasl.mechanism", sasl.name());
            client.set("sasl.username", user).set("sasl.password", password.reveal());
        }
    }
}

/// As librdkafka wants its times.
pub(super) fn millis(duration: Duration) -> String {
    duration.as_millis().to_string()
}

fn prefix(address: &Address) -> Result<String, BadUrl> {
    let prefix = address.text("prefix").unwrap_or_default();
    let fits = prefix.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if fits && prefix.len() <= 100 {
        return Ok(prefix.to_owned());
    }
    Err(address.wrong("prefix", "use at most 100 letters, digits, dots, dashes or underscores"))
}

fn with_port(host: &str) -> String {
    // The colons within the brackets of an IPv6 address are no port.
    match host.rfind(':').filter(|colon| !host[*colon..].contains(']')) {
        Some(_) => host.to_owned(),
        None => format!("{host}:{PORT}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_url_is_read() {
        let url = "kafkas://ann:p%40ss@one,two:9093,[::1]?prefix=shop.&timeout=3s&create=false&partitions=3\
                   &replication=2&max_payload=64KiB&compression=lz4&linger=7ms&session=6s&sasl=SCRAM-SHA-512\
                   &ca=/etc/ca.pem&certificate=/c.pem&key=/k.pem";
        let config = Config::from_url(url).expect("it is one");
        assert_eq!(config.servers, ["one:9092", "two:9093", "[::1]:9092"]);
        assert_eq!((config.prefix.as_str(), config.create), ("shop.", false));
        assert_eq!((config.partitions, config.replication), (3, Some(2)));
        assert_eq!(config.max_payload, 64 << 10);
        assert_eq!(config.heartbeat * 5, config.session);
        let client = config.client();
        let expected = [
            ("security.protocol", "sasl_ssl"),
            ("sasl.mechanism", "SCRAM-SHA-512"),
            ("sasl.username", "ann"),
            ("sasl.password", "p@ss"),
            ("ssl.ca.location", "/etc/ca.pem"),
            ("ssl.certificate.location", "/c.pem"),
            ("ssl.key.location", "/k.pem"),
        ];
        for (name, value) in expected {
            assert_eq!(client.get(name), Some(value), "{name}");
        }
        assert!(!format!("{config:?}").contains("p@ss"));
    }

    #[test]
    fn a_url_that_makes_no_sense_is_refused_with_the_way_out() {
        let cases = [
            ("kafka://", "name at least one"),
            ("kafka://host/orders", "prefix="),
            ("kafka://host?ca=/x", "kafkas://"),
            ("kafkas://host?certificate=/x", "both files"),
            ("kafka://host?sasl=PLAIN", "user:password"),
            ("kafka://ann:hush@host?sasl=OAUTH", "SCRAM-SHA-256"),
            ("kafka://host?prefix=a%20b", "letters, digits"),
            ("kafka://host?compression=rar", "lz4"),
            ("kafka://host?partition=3", "did you mean `partitions`?"),
        ];
        for (url, expected) in cases {
            let error = Config::from_url(url).expect_err(url).to_string();
            assert!(error.contains(expected) && !error.contains("hush"), "{url}: {error}");
        }
    }
}
