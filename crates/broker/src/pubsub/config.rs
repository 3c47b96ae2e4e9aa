//! Which project to speak to, how what we make there is named, and how it is made, from a URL or by hand.

use std::time::Duration;

use crate::address::{Address, BadUrl, Kind};

/// The settings of Google Pub/Sub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The project that the topics belong to.
    pub project: String,
    /// Host and port of an emulator in place of the service: spoken to without encryption and without credentials.
    pub emulator: Option<String>,
    /// The region whose endpoint is used. The order of a key is kept among publishers of one region only.
    pub region: Option<String>,
    /// What the names of topics and subscriptions begin with.
    pub prefix: String,
    /// Groups whose subscriptions are made together with a topic, before its first message: what was published
    /// earlier is not there for a group that comes later, unless the topic [retains](Self::retain) it.
    pub groups: Vec<String>,
    /// Whether topics and subscriptions that are missing are made.
    pub create: bool,
    /// How long one `publish` may take.
    pub timeout: Duration,
    /// How long a member of a group may be silent before its messages go to others.
    pub ack_deadline: Duration,
    /// How long a topic that is made from now on keeps its messages for groups that come later.
    pub retain: Option<Duration>,
    /// Whether subscriptions that are made from now on refuse late acknowledgements, and confirm those in time.
    pub exactly_once: bool,
    /// Messages at most that are sent to a member ahead of its acknowledgements, for each topic.
    pub window: u32,
    /// Bytes of payload at most; a larger message is rejected.
    pub max_payload: usize,
    /// No message is sent again by the client itself.
    pub once: bool,
}

const KIND: Kind = Kind {
    name: "Pub/Sub",
    schemes: &["pubsub"],
    example: "pubsub://my-project",
    parameters: &[
        "emulator",
        "region",
        "prefix",
        "groups",
        "create",
        "timeout",
        "ack_deadline",
        "retain",
        "exactly_once",
        "window",
        "max_payload",
    ],
};

/// The service takes 10 MB for a request; this leaves room for the attributes of the message and for the request itself.
const LARGEST_PAYLOAD: usize = 9_500_000;

impl Config {
    /// The defaults: everything is made where it is missing, calls of 10 seconds, leases of 60 seconds.
    pub fn new(project: impl Into<String>) -> Self {
        Self {
            project: project.into(),
            emulator: None,
            region: None,
            prefix: String::new(),
            groups: Vec::new(),
            create: true,
            timeout: Duration::from_secs(10),
            ack_deadline: Duration::from_secs(60),
            retain: None,
            exactly_once: false,
            window: 1_000,
            max_payload: LARGEST_PAYLOAD,
            once: false,
        }
    }

    /// Reads `pubsub://my-project?groups=billing,shipping&retain=7d&…`. An emulator is named by
    /// `pubsub://my-project?emulator=127.0.0.1:8085`, by `pubsub://127.0.0.1:8085/my-project`, or, where the URL names
    /// none, by the variable `PUBSUB_EMULATOR_HOST` when the broker is opened.
    ///
    /// # Errors
    /// When it is another kind of URL, or has a parameter or value that is not known.
    pub fn from_url(url: &str) -> Result<Self, BadUrl> {
        let address = Address::parse(url, KIND)?;
        let (project, place) = match (&address.hosts[..], address.path.as_str()) {
            ([project], "") if !project.contains(':') => (project.clone(), None),
            ([place], project) if place.contains(':') && !project.is_empty() => {
                (project.to_owned(), Some(place.clone()))
            }
            _ => return Err(address.wrong("project", "write pubsub://my-project")),
        };
        // The service would blame the messages.
        if !project.chars().all(|c| c.is_ascii_alphanumeric() || "-.:".contains(c)) {
            return Err(
                address.wrong("project", "use letters, digits and dashes, such as pubsub://my-project")
            );
        }
        if address.user.is_some() || address.password.is_some() {
            let expected = "the service takes no password: it is told by GOOGLE_APPLICATION_CREDENTIALS";
            return Err(address.wrong("login", expected));
        }
        let mut config = Self::new(project);
        config.emulator = address.text("emulator").map(str::to_owned).or(place);
        if config.emulator.as_deref().is_some_and(|place| !place.contains(':') || place.contains('/')) {
            return Err(address.wrong("emulator", "use a host and port, such as 127.0.0.1:8085"));
        }
        config.region = address.text("region").map(str::to_owned);
        config.prefix = address.text("prefix").unwrap_or_default().to_owned();
        let groups = address.text("groups").unwrap_or_default().split(',').map(str::trim);
        config.groups = groups.filter(|group| !group.is_empty()).map(str::to_owned).collect();
        let seconds = Duration::from_secs;
        config.create = address.flag("create")?.unwrap_or(config.create);
        config.timeout =
            address.duration("timeout", Duration::from_millis(100), seconds(600))?.unwrap_or(config.timeout);
        config.ack_deadline =
            address.duration("ack_deadline", seconds(10), seconds(600))?.unwrap_or(config.ack_deadline);
        config.retain = address.duration("retain", seconds(600), seconds(31 * 24 * 60 * 60))?;
        config.exactly_once = address.flag("exactly_once")?.unwrap_or(config.exactly_once);
        let window = address.number("window", 1, 100_000)?.and_then(|window| u32::try_from(window).ok());
        config.window = window.unwrap_or(config.window);
        config.max_payload = address.size("max_payload", 1, LARGEST_PAYLOAD)?.unwrap_or(config.max_payload);
        Ok(config)
    }

    /// Where the service is, or the emulator that stands for it; `variable` is what `PUBSUB_EMULATOR_HOST` says.
    pub(super) fn endpoint(&self, variable: Option<String>) -> Endpoint {
        let variable = variable.filter(|place| !place.is_empty());
        match (self.emulator.clone().or(variable), &self.region) {
            (Some(place), _) => Endpoint::Emulator(format!("http://{place}")),
            (None, Some(region)) => {
                Endpoint::Service(Some(format!("https://{region}-pubsub.googleapis.com")))
            }
            (None, None) => Endpoint::Service(None),
        }
    }
}

/// Whom to speak to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// The service, perhaps at the address of a region.
    Service(Option<String>),
    /// Something on a developer's machine that asks for no credentials.
    Emulator(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_read() {
        assert_eq!(Config::from_url("pubsub://shop"), Ok(Config::new("shop")));
        let url = "pubsub://shop?prefix=dev.&groups=billing,%20shipping&create=false&timeout=2s&ack_deadline=10s\
                   &retain=7d&exactly_once=true&window=10&max_payload=64KiB&region=europe-west1";
        let expected = Config {
            region: Some("europe-west1".to_owned()),
            prefix: "dev.".to_owned(),
            groups: vec!["billing".to_owned(), "shipping".to_owned()],
            create: false,
            timeout: Duration::from_secs(2),
            ack_deadline: Duration::from_secs(10),
            retain: Some(Duration::from_secs(7 * 24 * 60 * 60)),
            exactly_once: true,
            window: 10,
            max_payload: 64 << 10,
            once: false,
            ..Config::new("shop")
        };
        assert_eq!(Config::from_url(url), Ok(expected));
    }

    #[test]
    fn an_emulator_is_named_by_the_url_or_by_the_variable() {
        let endpoint = |url: &str, variable: Option<&str>| {
            Config::from_url(url).expect("it is one").endpoint(variable.map(str::to_owned))
        };
        let emulator = |place: &str| Endpoint::Emulator(format!("http://{place}"));
        assert_eq!(endpoint("pubsub://shop?emulator=here:1", None), emulator("here:1"));
        assert_eq!(endpoint("pubsub://here:1/shop", Some("there:2")), emulator("here:1"));
        assert_eq!(endpoint("pubsub://shop?region=europe-west1", Some("there:2")), emulator("there:2"));
        assert_eq!(endpoint("pubsub://shop", Some("")), Endpoint::Service(None));
        let regional = Endpoint::Service(Some("https://europe-west1-pubsub.googleapis.com".to_owned()));
        assert_eq!(endpoint("pubsub://shop?region=europe-west1", None), regional);
    }

    #[test]
    fn a_bad_url_is_refused_with_what_would_be_accepted() {
        let cases = [
            ("kafka://ann:hush@host", "write `pubsub://my-project`"),
            ("pubsub://", "write pubsub://my-project"),
            ("pubsub://one,two", "write pubsub://my-project"),
            ("pubsub://here:1", "write pubsub://my-project"),
            ("pubsub://my_shop", "letters, digits and dashes"),
            ("pubsub://shop/more", "write pubsub://my-project"),
            ("pubsub://ann:hush@shop", "GOOGLE_APPLICATION_CREDENTIALS"),
            ("pubsub://shop?emulator=here", "such as 127.0.0.1:8085"),
            ("pubsub://shop?emulator=http://here:1", "such as 127.0.0.1:8085"),
            ("pubsub://shop?group=billing", "did you mean `groups`?"),
            ("pubsub://shop?ack_deadline=5s", "from 10s to 10m"),
            ("pubsub://shop?retain=1m", "from 10m to 1month"),
            ("pubsub://shop?max_payload=10MB", "9500000B"),
        ];
        for (url, expected) in cases {
            let error = Config::from_url(url).expect_err(url).to_string();
            assert!(error.contains(expected), "{url}: {error}");
            assert!(!error.contains("hush"), "{error}");
        }
    }
}
