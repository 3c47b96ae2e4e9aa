//! The tree of settings becomes [`Config`], or a list of all that is wrong with it.

mod consumers;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use broker::Format;
use message::{OnDead, Order, RetryPolicy, Secrets, Semantics, TopicPattern, check_group, check_topic};

use super::section::{Complaints, Found, Section, nearest};
use super::tree::{Node, Origin, Table, Value};
use super::{
    AcknowledgeTo, Acknowledgements, Broker, Claims, Complaint, Config, ConsumerSide, Dedup, Log, LogFormat,
    Place, Producer, Relay, Route, Watch,
};

const SECTIONS: [&str; 8] =
    ["store", "producer", "consumer", "relay", "log", "brokers", "routes", "consumers"];
const ORDERS: [(&str, Order); 2] = [("key", Order::Key), ("none", Order::None)];
const ON_DEADS: [(&str, OnDead); 2] = [("hold", OnDead::Hold), ("skip", OnDead::Skip)];

/// Where settings stand that [`super::check`] may complain about.
pub(super) type Places = BTreeMap<String, Origin>;

/// Reads the whole tree. The config is only good when there are no complaints.
pub(super) fn read(tree: Table) -> (Config, Places, Vec<Complaint>) {
    let complaints = Complaints::default();
    let mut places = Places::new();
    let root = Node { value: Value::Table(tree), origin: Origin::BuiltIn };
    let mut root = Section::new("", Some(root), &SECTIONS, &complaints);
    let reader = &mut Reader {
        complaints: &complaints,
        places: &mut places,
        default_broker: None,
        default_dedup: Dedup::Sql,
    };

    let brokers = reader.brokers(root.take("brokers"));
    // With one broker there is nothing to choose.
    reader.default_broker = if brokers.len() == 1 { brokers.keys().next().cloned() } else { None };
    let store = reader.store(root.take("store"));
    if store.place == Place::Redis {
        reader.default_dedup = Dedup::Redis;
    }
    let config = Config {
        store,
        producer: reader.producer(root.take("producer")),
        consumer: reader.consumer_side(root.take("consumer")),
        relay: reader.relay(root.take("relay")),
        log: reader.log(root.take("log")),
        routes: reader.routes(root.take("routes")),
        consumers: reader.consumers(root.take("consumers")),
        brokers,
    };
    drop(root);
    (config, places, complaints.into_inner())
}

pub(super) struct Reader<'a> {
    complaints: &'a Complaints,
    places: &'a mut Places,
    default_broker: Option<String>,
    default_dedup: Dedup,
}

impl<'a> Reader<'a> {
    pub(super) fn section(&self, path: &str, node: Option<Node>, known: &[&str]) -> Section<'a> {
        Section::new(path, node, known, self.complaints)
    }

    pub(super) fn mark(&mut self, section: &Section<'_>, keys: &[&str]) {
        self.places.insert(section.name("").trim_end_matches('.').to_owned(), section.origin().clone());
        for key in keys {
            self.places.insert(section.name(key), section.origin_of(key));
        }
    }

    fn producer(&mut self, node: Option<Node>) -> Producer {
        const KEYS: [&str; 4] = ["listen", "body_limit", "acknowledge_secrets", "acknowledgements"];
        let mut section = self.section("producer", node, &KEYS);
        self.mark(&section, &["listen", "acknowledgements"]);
        Producer {
            listen: listen(&mut section, 5299),
            body_limit: section.size("body_limit", 1 << 20),
            acknowledge_secrets: secrets(&mut section),
            acknowledgements: self.acknowledgements(&mut section),
        }
    }

    fn acknowledgements(&mut self, section: &mut Section<'a>) -> Option<Acknowledgements> {
        let node = section.take("acknowledgements")?;
        let path = section.name("acknowledgements");
        let mut section = self.section(&path, Some(node), &["topic", "broker", "group"]);
        let (topic, broker) = self.topic_of(&mut section);
        let group = section.parsed("group", |group| {
            check_group(group).map(|()| group.to_owned()).map_err(|invalid| invalid.to_string())
        });
        let group = group.map_or_else(|| "producer".to_owned(), |found| found.value);
        Some(Acknowledgements { topic, broker, group })
    }

    /// `{ topic = "…", broker = "…" }`
    fn topic_of(&mut self, section: &mut Section<'a>) -> (String, String) {
        let (has, origin) = (section.has("topic"), section.origin().clone());
        let topic = section.parsed("topic", topic);
        if !has {
            section.complain("", origin, "needs a `topic`, such as \"acknowledgements\"");
        }
        (topic.map(|found| found.value).unwrap_or_default(), self.broker(section))
    }

    fn consumer_side(&mut self, node: Option<Node>) -> ConsumerSide {
        let mut section = self.section("consumer", node, &["listen", "acknowledge_to", "redis"]);
        self.mark(&section, &["listen", "acknowledge_to", "redis"]);
        let listen = listen(&mut section, 5287);
        let acknowledge_to = match section.peek("acknowledge_to") {
            Some(Value::Table(_)) => {
                let (path, node) = (section.name("acknowledge_to"), section.take("acknowledge_to"));
                let (topic, broker) = self.topic_of(&mut self.section(&path, node, &["topic", "broker"]));
                Some(AcknowledgeTo::Topic { topic, broker })
            }
            _ => section
                .parsed("acknowledge_to", |url| {
                    http_url(url)?;
                    Ok(AcknowledgeTo::Http(url.trim_end_matches('/').to_owned()))
                })
                .map(|found| found.value),
        };
        let redis = section.parsed("redis", redis_url);
        ConsumerSide { listen, acknowledge_to, redis: redis.map(|found| found.value) }
    }

    fn relay(&mut self, node: Option<Node>) -> Relay {
        const KEYS: [&str; 8] =
            ["lease", "batch", "bytes", "poll", "claims", "claims_ttl", "claims_prefix", "claims_keep"];
        let mut section = self.section("relay", node, &KEYS);
        self.mark(&section, &KEYS);
        Relay {
            lease: section.duration("lease", Duration::from_secs(30)),
            batch: section.number("batch", 1, 100_000, 10_000) as usize,
            bytes: section.size("bytes", 8 << 20),
            poll: section.duration("poll", Duration::from_secs(1)),
            claims: claims(&mut section),
        }
    }

    fn log(&mut self, node: Option<Node>) -> Log {
        let mut section = self.section("log", node, &["format", "level"]);
        let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
        let format = section.word("format", &formats, LogFormat::Text);
        let level = section.parsed("level", |level| match is_filter(level) {
            true => Ok(level.to_owned()),
            false => Err(format!(
                "`{level}` is not a log level: use error, warn, info, debug or trace, or a filter such as `info,relay=debug`"
            )),
        });
        Log { format, level: level.map_or_else(|| "info".to_owned(), |found| found.value) }
    }

    /// The tables of a section whose names the user chooses.
    fn named(&mut self, path: &str, node: Option<Node>) -> Vec<(String, Node)> {
        match node {
            None => Vec::new(),
            Some(Node { value: Value::Table(table), origin }) => {
                self.places.insert(path.to_owned(), origin);
                table.into_iter().collect()
            }
            Some(node) => {
                // Complains about its kind.
                self.section(path, Some(node), &[]);
                Vec::new()
            }
        }
    }

    fn brokers(&mut self, node: Option<Node>) -> BTreeMap<String, Broker> {
        let mut brokers = BTreeMap::new();
        for (name, node) in self.named("brokers", node) {
            let mut section = self.section(&format!("brokers.{name}"), Some(node), &["url"]);
            self.mark(&section, &["url"]);
            let url = match section.parsed("url", |url| {
                broker::check(url).map(|()| url.to_owned()).map_err(|error| error.to_string())
            }) {
                Some(found) => found.value,
                None => {
                    // A wrong one has been complained about.
                    if !section.has("url") && !self.complained(&section.name("url")) {
                        let origin = section.origin().clone();
                        section.complain("", origin, "needs a `url`, such as \"embedded://\"");
                    }
                    "embedded://".to_owned()
                }
            };
            brokers.insert(name, Broker { url });
        }
        brokers
    }

    fn complained(&self, setting: &str) -> bool {
        self.complaints.borrow().iter().any(|complaint| complaint.setting.starts_with(setting))
    }

    fn routes(&mut self, node: Option<Node>) -> BTreeMap<String, Route> {
        const KEYS: [&str; 12] = [
            "topics",
            "broker",
            "semantics",
            "why",
            "idempotent",
            "order",
            "on_dead",
            "retry",
            "cloudevents",
            "source",
            "watch",
            "copy_to",
        ];
        let mut routes = BTreeMap::new();
        for (name, node) in self.named("routes", node) {
            let mut section = self.section(&format!("routes.{name}"), Some(node), &KEYS);
            self.mark(&section, &KEYS);
            let route = Route {
                topics: self.patterns(&mut section),
                broker: self.broker(&mut section),
                semantics: semantics(&mut section),
                why: section.text("why").map(|found| found.value),
                idempotent: section.flag("idempotent", false),
                order: section.word("order", &ORDERS, Order::Key),
                on_dead: section.word("on_dead", &ON_DEADS, OnDead::Hold),
                retry: self.retry(&mut section),
                format: format(&mut section, &name),
                watch: self.watch(&mut section),
                copy_to: section.parsed("copy_to", topic).map(|found| found.value),
            };
            routes.insert(name, route);
        }
        routes
    }

    fn watch(&mut self, section: &mut Section<'a>) -> Option<Watch> {
        const KEYS: [&str; 2] = ["window", "drop"];
        if !section.has("watch") {
            return None;
        }
        let mut watch = self.section(&section.name("watch"), section.take("watch"), &KEYS);
        self.mark(&watch, &KEYS);
        Some(Watch {
            window: watch.duration("window", Duration::from_secs(5 * 60)),
            drop: watch.share("drop", 0.5),
        })
    }

    fn patterns(&mut self, section: &mut Section<'a>) -> Vec<TopicPattern> {
        let (has, origin) = (section.has("topics"), section.origin_of("topics"));
        let topics = section.texts("topics");
        if topics.is_empty() && !(has && self.complained(&section.name("topics"))) {
            section.complain(
                "topics",
                origin,
                "name the topics that this route takes, such as [\"order-*\"], or [\"*\"] for all",
            );
        }
        let mut patterns: Vec<TopicPattern> = Vec::new();
        for Found { value, origin } in topics {
            // A star stands for characters that a topic may have, so what is left must be such.
            if value.is_empty() || (value != "*" && check_topic(&value.replace('*', "x")).is_err()) {
                section.complain("topics", origin, format!(
                    "`{value}` cannot be a topic pattern: use letters, digits, dots, dashes, underscores, and * for any run of them"
                ));
            } else {
                patterns.push(TopicPattern::new(value));
            }
        }
        patterns
    }

    fn broker(&mut self, section: &mut Section<'a>) -> String {
        let (has, origin) = (section.has("broker"), section.origin().clone());
        match (section.text("broker"), &self.default_broker) {
            (Some(found), _) => found.value,
            (None, Some(only)) => only.clone(),
            (None, None) => {
                if !has {
                    section.complain("", origin, "needs a `broker`, one of those in [brokers]");
                }
                String::new()
            }
        }
    }

    fn retry(&mut self, section: &mut Section<'a>) -> RetryPolicy {
        const KEYS: [&str; 5] = ["max_attempts", "first", "cap", "give_up_after", "count_outages"];
        let defaults = RetryPolicy::default();
        let mut retry = self.section(&section.name("retry"), section.take("retry"), &KEYS);
        self.mark(&retry, &KEYS);
        let capped = retry.has("cap");
        let first = retry.duration("first", defaults.first);
        let cap = retry.duration("cap", defaults.cap);
        RetryPolicy {
            first,
            // A first wait above the usual cap means that the cap was not thought of.
            cap: if capped { cap } else { cap.max(first) },
            max_attempts: retry.number("max_attempts", 1, 1_000_000, defaults.max_attempts),
            give_up_after: retry.duration("give_up_after", defaults.give_up_after),
            count_outages: retry.flag("count_outages", defaults.count_outages),
        }
    }
}

/// What a route or a group promises.
fn semantics(section: &mut Section<'_>) -> Semantics {
    let found = section.parsed("semantics", |word| {
        word.parse().map_err(|_| {
            let words = Semantics::ALL.map(Semantics::as_str);
            format!("`{word}` is not a delivery semantics; {}", nearest(word, &words))
        })
    });
    found.map_or_else(Semantics::default, |found| found.value)
}

fn not_empty(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("it is empty".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

/// What capabilities to acknowledge are made of.
fn secrets(section: &mut Section<'_>) -> Option<Secrets> {
    let (has, origin) = (section.has("acknowledge_secrets"), section.origin_of("acknowledge_secrets"));
    let texts: Vec<String> =
        section.texts("acknowledge_secrets").into_iter().map(|found| found.value).collect();
    match Secrets::new(&texts) {
        Ok(None) if has => {
            section.complain("acknowledge_secrets", origin, "name a secret, or leave it out");
            None
        }
        Ok(secrets) => secrets,
        Err(short) => {
            section.complain("acknowledge_secrets", origin, short.to_string());
            None
        }
    }
}

/// Locks and counters in Redis, when the relay is told to have them.
fn claims(section: &mut Section<'_>) -> Option<Claims> {
    const DETAILS: [&str; 3] = ["claims_ttl", "claims_prefix", "claims_keep"];
    if !section.has("claims") {
        for key in DETAILS.iter().filter(|key| section.has(key)) {
            section.complain(key, section.origin_of(key), "belongs to `claims`, which is not set");
        }
    }
    let url = section.parsed("claims", redis_url);
    let ttl = section.duration("claims_ttl", Duration::from_secs(15 * 60));
    let keep = section.duration("claims_keep", Duration::from_secs(7 * 24 * 60 * 60));
    let prefix = section.text("claims_prefix").map(|found| found.value);
    Some(Claims {
        url: url?.value,
        ttl,
        keep,
        prefix: prefix.unwrap_or_else(|| "postrider:claim:".to_owned()),
    })
}

fn redis_url(url: &str) -> Result<String, String> {
    match url.split_once("://") {
        Some(("redis" | "rediss", rest)) if !rest.is_empty() => match cfg!(feature = "redis") {
            true => Ok(url.to_owned()),
            false => Err("Redis is not in this build: build with `--features redis`".to_owned()),
        },
        _ => Err("expected the URL of a Redis server, such as redis://127.0.0.1:6379".to_owned()),
    }
}

/// The filter's own parser takes any single word for the name of a module and would log nothing of ours.
fn is_filter(text: &str) -> bool {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let known = |part: &str| match part.rsplit_once('=') {
        Some((target, level)) => !target.trim().is_empty() && LEVELS.contains(&level.trim()),
        None => LEVELS.contains(&part.trim()),
    };
    text.split(',').all(known) && tracing_subscriber::EnvFilter::try_new(text).is_ok()
}

fn listen(section: &mut Section<'_>, port: u16) -> SocketAddr {
    section
        .parsed("listen", parse_listen)
        .map_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, port)), |found| found.value)
}

/// An address to listen on that nobody outside this machine can reach.
pub(crate) fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    let local = text.strip_prefix("localhost:").map(|port| format!("127.0.0.1:{port}"));
    let address: SocketAddr =
        local.as_deref().unwrap_or(text).parse().map_err(|_| {
            format!("`{text}` is not an address to listen on: write one such as 127.0.0.1:5299")
        })?;
    if !address.ip().is_loopback() {
        return Err(format!(
            "`{text}` can be reached from other machines, and without tokens anybody there could read and send \
             messages: listen on 127.0.0.1 or [::1], behind a proxy that checks who asks"
        ));
    }
    Ok(address)
}

/// The name of one topic.
fn topic(topic: &str) -> Result<String, String> {
    check_topic(topic).map(|()| topic.to_owned()).map_err(|invalid| invalid.to_string())
}

/// How messages of a route are written down.
fn format(section: &mut Section<'_>, route: &str) -> Format {
    const MODES: [(&str, Option<Mode>); 3] =
        [("off", None), ("binary", Some(Mode::Binary)), ("structured", Some(Mode::Structured))];
    let mode = section.word("cloudevents", &MODES, None);
    let origin = section.origin_of("source");
    let source = section.text("source").map(|found| found.value);
    if source.is_some() && mode.is_none() {
        section.complain("source", origin, "only CloudEvents have a source: add cloudevents = \"binary\"");
    }
    let source = source.unwrap_or_else(|| format!("/postrider/{route}")).into();
    match mode {
        None => Format::Native,
        Some(Mode::Binary) => Format::CloudEvents { source },
        Some(Mode::Structured) => Format::CloudEventsStructured { source },
    }
}

#[derive(Clone, Copy)]
enum Mode {
    Binary,
    Structured,
}

fn http_url(url: &str) -> Result<(), String> {
    // Read by the inbox itself, so that what is good here can also be started.
    inbox::Acknowledge::http(url)
        .map(drop)
        .map_err(|error| format!("expected a URL such as http://127.0.0.1:8080/orders: {error}"))
}
