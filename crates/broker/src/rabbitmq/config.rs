//! Where RabbitMQ is and how messages are laid out in it, from a URL or by hand.

use std::path::PathBuf;
use std::time::Duration;

use message::{TopicPattern, check_group};

use crate::address::{Address, BadUrl, Kind, Secret};

/// The settings of a RabbitMQ broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Host and port of each node of the cluster; they are tried in turn.
    pub hosts: Vec<String>,
    /// Whether the connection is encrypted.
    pub tls: bool,
    /// A file of certificates that are trusted beside those of the machine.
    pub ca: Option<PathBuf>,
    /// Who connects.
    pub user: String,
    /// With what password.
    pub password: Secret,
    /// The virtual host.
    pub vhost: String,
    /// What the names of all queues begin with.
    pub prefix: String,
    /// The exchange that everything is published to; otherwise it is called like the prefix.
    pub exchange: Option<String>,
    /// Groups whose queues are made with a topic, before their first member comes: what is published earlier than a
    /// group's queues are there is not for it.
    pub groups: Vec<Ahead>,
    /// Queues of each group and topic. All who publish or receive must say the same number: it decides where a key is.
    pub partitions: u16,
    /// Messages of one call that may wait for their confirmations at a time.
    pub window: usize,
    /// Messages of each queue that a member holds unacknowledged at most. The members of a group must say the same
    /// number: one with less would get returned messages in pieces, and lose their order.
    pub prefetch: u16,
    /// How long one `publish` takes at most.
    pub timeout: Duration,
    /// Whether a missing exchange, queue or binding is made.
    pub create: bool,
    /// Bytes of payload at most. RabbitMQ's own limit is 16 MiB from version 4 on, and 128 MiB before.
    pub max_payload: usize,
    /// Where a message goes that 100 members have died with.
    pub dead_letter: Option<String>,
}

/// A group whose queues are made before it comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// The group.
    pub group: String,
    /// The topics that it listens to.
    pub topics: TopicPattern,
}

const KIND: Kind = Kind {
    name: "RabbitMQ",
    schemes: &["amqp", "amqps"],
    example: "amqp://user:password@127.0.0.1:5672/vhost",
    parameters: &[
        "prefix",
        "exchange",
        "groups",
        "partitions",
        "window",
        "prefetch",
        "timeout",
        "create",
        "max_payload",
        "dead_letter",
        "ca",
    ],
};

impl Config {
    /// The defaults, for a server at `host`, which has its port with it.
    pub fn new(host: impl Into<String>) -> Self {
        Self {
            hosts: vec![host.into()],
            tls: false,
            ca: None,
            user: "guest".to_owned(),
            password: Secret::new("guest"),
            vhost: "/".to_owned(),
            prefix: "postrider".to_owned(),
            exchange: None,
            groups: Vec::new(),
            partitions: 8,
            window: 200,
            prefetch: 256,
            timeout: Duration::from_secs(10),
            create: true,
            max_payload: 16 << 20,
            dead_letter: None,
        }
    }

    /// Reads `amqp://user:password@one:5672,two:5672/vhost?groups=billing,shipping:orders&partitions=8`; `amqps://`
    /// means TLS. Parameters: `prefix`, `exchange`, `groups`, `partitions`, `window`, `prefetch`, `timeout`, `create`,
    /// `max_payload`, `dead_letter`, `ca`.
    ///
    /// # Errors
    /// When it is another kind of URL, or has a parameter or value that is not known.
    pub fn from_url(url: &str) -> Result<Self, BadUrl> {
        let address = Address::parse(url, KIND)?;
        let tls = address.scheme == "amqps";
        let mut config = Self { tls, ..Self::new("") };
        let usual = if tls { 5671 } else { 5672 };
        config.hosts = address.hosts.iter().map(|host| with_port(host, usual)).collect();
        if let Some(user) = &address.user {
            config.user = user.clone();
            config.password = address.password.clone().unwrap_or_else(|| Secret::new(""));
        }
        if !address.path.is_empty() {
            config.vhost = address.path.clone();
        }
        let text = |name: &str| address.text(name).map(str::to_owned);
        config.prefix = text("prefix").unwrap_or(config.prefix);
        config.exchange = text("exchange");
        config.dead_letter = text("dead_letter");
        config.ca = text("ca").map(PathBuf::from);
        config.groups = ahead(&text("groups").unwrap_or_default());
        if let Some(partitions) = address.number("partitions", 1, MOST_PARTITIONS)? {
            config.partitions = partitions as u16;
        }
        if let Some(window) = address.number("window", 1, 10_000)? {
            config.window = window as usize;
        }
        if let Some(prefetch) = address.number("prefetch", 1, u64::from(u16::MAX))? {
            config.prefetch = prefetch as u16;
        }
        let (least, most) = (Duration::from_millis(100), Duration::from_secs(600));
        config.timeout = address.duration("timeout", least, most)?.unwrap_or(config.timeout);
        config.create = address.flag("create")?.unwrap_or(config.create);
        config.max_payload = address.size("max_payload", 1, LARGEST)?.unwrap_or(config.max_payload);
        config.check()?;
        Ok(config)
    }

    /// Whether the values make sense, however they were set.
    ///
    /// # Errors
    /// Names the value and what would be accepted.
    pub(super) fn check(&self) -> Result<(), BadUrl> {
        if self.hosts.is_empty() || !self.hosts.iter().all(|host| split(host).is_some()) {
            return Err(wrong("host", "name a host, or host:port, several with commas"));
        }
        let names = [Some(&self.prefix), self.exchange.as_ref(), self.dead_letter.as_ref()];
        let labels = ["prefix", "exchange", "dead_letter"];
        for (name, label) in names.into_iter().zip(labels) {
            if name.is_some_and(|name| !is_name(name)) {
                return Err(wrong(label, "use 1 to 100 letters, digits, dots, dashes or underscores"));
            }
        }
        if self.groups.iter().any(|ahead| check_group(&ahead.group).is_err()) {
            return Err(wrong("groups", "use names with commas, such as billing,shipping:orders"));
        }
        if !(1..=MOST_PARTITIONS).contains(&u64::from(self.partitions)) {
            return Err(wrong("partitions", "use a number from 1 to 256"));
        }
        if self.window == 0 || self.prefetch == 0 {
            return Err(wrong("window and prefetch", "use a number of at least 1"));
        }
        Ok(())
    }

    /// The exchange's name.
    pub(super) fn exchange(&self) -> &str {
        self.exchange.as_deref().unwrap_or(&self.prefix)
    }

    /// The groups whose queues are made with this topic.
    pub(super) fn groups_of<'a>(&'a self, topic: &'a str) -> impl Iterator<Item = &'a str> {
        let of_topic = self.groups.iter().filter(move |ahead| ahead.topics.matches(topic));
        of_topic.map(|ahead| ahead.group.as_str())
    }
}

/// Each is a queue in each group, with a Raft log of its own.
const MOST_PARTITIONS: u64 = 256;

/// RabbitMQ takes no more than this, whatever it is told.
const LARGEST: usize = 512 << 20;

fn wrong(name: &str, expected: &str) -> BadUrl {
    BadUrl::Value { kind: KIND.name, name: name.to_owned(), expected: expected.to_owned() }
}

fn is_name(text: &str) -> bool {
    (1..=100).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// `billing,shipping:orders`: a group alone is for every topic.
fn ahead(text: &str) -> Vec<Ahead> {
    let parts = text.split(',').filter(|part| !part.is_empty());
    let read = |part: &str| {
        let (group, topics) = part.split_once(':').unwrap_or((part, "*"));
        Ahead { group: group.to_owned(), topics: TopicPattern::new(topics) }
    };
    parts.map(read).collect()
}

fn with_port(host: &str, usual: u16) -> String {
    // The colons within the brackets of an IPv6 address are no port.
    match host.rfind(':').filter(|colon| !host[*colon..].contains(']')) {
        Some(_) => host.to_owned(),
        None => format!("{host}:{usual}"),
    }
}

/// Host and port.
pub(super) fn split(host: &str) -> Option<(&str, u16)> {
    let (name, port) = host.rsplit_once(':')?;
    let name = name.trim_start_matches('[').trim_end_matches(']');
    (!name.is_empty()).then_some((name, port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> Result<Config, String> {
        Config::from_url(url).map_err(|error| error.to_string())
    }

    #[test]
    fn a_short_url_means_the_defaults() {
        assert_eq!(read("amqp://127.0.0.1"), Ok(Config::new("127.0.0.1:5672")));
        assert_eq!(read("amqp://127.0.0.1/"), Ok(Config::new("127.0.0.1:5672")));
        assert_eq!(read("amqp://[::1]:7"), Ok(Config::new("[::1]:7")));
        let secure = read("amqps://mq").expect("valid");
        assert!(secure.tls && secure.hosts == ["mq:5671"]);
        assert_eq!(split("[::1]:7"), Some(("::1", 7)));
    }

    #[test]
    fn every_part_is_read() {
        let config = read(
            "amqps://ann:p%40ss@one:1,two/%2fshop?prefix=a&exchange=b&groups=billing,shipping:order*&partitions=3\
             &window=7&prefetch=9&timeout=2s&create=false&max_payload=64KiB&dead_letter=graves&ca=/etc/ca.pem",
        );
        let ahead =
            |group: &str, topics| Ahead { group: group.to_owned(), topics: TopicPattern::new(topics) };
        let expected = Config {
            hosts: vec!["one:1".to_owned(), "two:5671".to_owned()],
            tls: true,
            ca: Some("/etc/ca.pem".into()),
            user: "ann".to_owned(),
            password: Secret::new("p@ss"),
            vhost: "/shop".to_owned(),
            prefix: "a".to_owned(),
            exchange: Some("b".to_owned()),
            groups: vec![ahead("billing", "*"), ahead("shipping", "order*")],
            partitions: 3,
            window: 7,
            prefetch: 9,
            timeout: Duration::from_secs(2),
            create: false,
            max_payload: 64 << 10,
            dead_letter: Some("graves".to_owned()),
        };
        assert_eq!(config, Ok(expected.clone()));
        assert_eq!(expected.groups_of("refunds").collect::<Vec<_>>(), ["billing"]);
        assert!(!format!("{expected:?}").contains("p@ss"));
    }

    #[test]
    fn a_bad_url_is_refused_with_what_would_be_accepted() {
        let cases = [
            ("kafka://ann:hush@host", "is no RabbitMQ broker"),
            ("amqp://ann:hush@host?partition=4", "did you mean `partitions`?"),
            ("amqp://ann:hush@host?partitions=0", "from 1 to 256"),
            ("amqp://ann:hush@", "name a host"),
            ("amqp://ann:hush@host:port", "name a host"),
            ("amqp://ann:hush@host?prefix=", "letters, digits"),
            ("amqp://ann:hush@host?exchange=a%20b", "letters, digits"),
            ("amqp://ann:hush@host?groups=a%20b", "billing,shipping:orders"),
            ("amqp://ann:hush@host?timeout=1ms", "from 100ms"),
            ("amqp://ann:hush@host?create=perhaps", "true or false"),
        ];
        for (url, expected) in cases {
            let error = read(url).expect_err(url);
            assert!(error.contains(expected), "{url}: {error}");
            assert!(!error.contains("hush"), "{error}");
        }
    }
}
