//! Which SQS, and how it is used, from a URL or by hand.

use std::time::Duration;

use crate::address::{Address, Kind};
use crate::{BadUrl, Secret};

/// The settings of SQS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The region of AWS: `eu-central-1`.
    pub region: String,
    /// Another server that speaks SQS: `http://127.0.0.1:9324`.
    pub endpoint: Option<String>,
    /// Who we are. Without it, whatever AWS finds: environment, profile, role of the container or of the machine.
    pub login: Option<Login>,
    /// What the names of all queues begin with.
    pub prefix: String,
    /// Queues that keep the order of keys.
    pub fifo: bool,
    /// Whether a queue that is missing is made.
    pub create: bool,
    /// How long one publish may take.
    pub timeout: Duration,
    /// For how long a message is hidden that a member works on, before it is hidden again.
    pub visibility: Duration,
    /// Bytes of a message at most, with everything that travels beside its payload.
    pub max_message: usize,
}

/// An access key of AWS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Login {
    /// Its public half.
    pub key: String,
    /// Its secret half.
    pub secret: Secret,
}

const KIND: Kind = Kind {
    name: "SQS",
    schemes: &["sqs"],
    example: "sqs://eu-central-1",
    parameters: &["endpoint", "prefix", "fifo", "create", "timeout", "visibility", "max_message"],
};

/// What SQS takes since August 2025; it was 256 KiB before.
const LARGEST_MESSAGE: usize = 1 << 20;

/// SQS hides messages for whole seconds, and no longer than this.
const LONGEST: Duration = Duration::from_secs(12 * 60 * 60);

/// Queue names have 80 characters at most; something must be left for the topic.
const LONGEST_PREFIX: usize = 60;

impl Config {
    /// The defaults: standard queues without prefix, made when missing, hidden for 30 seconds at a time.
    pub fn new(region: impl Into<String>) -> Self {
        Self {
            region: region.into(),
            endpoint: None,
            login: None,
            prefix: String::new(),
            fifo: false,
            create: true,
            timeout: Duration::from_secs(10),
            visibility: Duration::from_secs(30),
            max_message: LARGEST_MESSAGE,
        }
    }

    /// Reads `sqs://eu-central-1?fifo=true`, or with another server
    /// `sqs://KEY:SECRET@eu-central-1?endpoint=http://127.0.0.1:9324`. The other parameters are `prefix`, `create`,
    /// `timeout`, `visibility` and `max_message`.
    ///
    /// # Errors
    /// When it is another kind of URL, or has a parameter or value that is not known.
    pub fn from_url(url: &str) -> Result<Self, BadUrl> {
        let address = Address::parse(url, KIND)?;
        let second = Duration::from_secs(1);
        let [region] = &address.hosts[..] else {
            return Err(address.wrong("region", "name one region after `sqs://`, such as eu-central-1"));
        };
        if !address.path.is_empty() {
            return Err(address.wrong("path", "nothing follows the region but parameters"));
        }
        let login = match (&address.user, &address.password) {
            (Some(key), Some(secret)) => Some(Login { key: key.clone(), secret: secret.clone() }),
            (None, None) => None,
            _ => return Err(address.wrong("login", "write both halves of the access key, KEY:SECRET@")),
        };
        let defaults = Self::new(region);
        let config = Self {
            endpoint: address.text("endpoint").map(str::to_owned),
            login,
            prefix: address.text("prefix").unwrap_or_default().to_owned(),
            fifo: address.flag("fifo")?.unwrap_or(defaults.fifo),
            create: address.flag("create")?.unwrap_or(defaults.create),
            timeout: address.duration("timeout", second, second * 600)?.unwrap_or(defaults.timeout),
            visibility: address.duration("visibility", second, LONGEST)?.unwrap_or(defaults.visibility),
            max_message: address
                .size("max_message", 1 << 10, LARGEST_MESSAGE)?
                .unwrap_or(defaults.max_message),
            ..defaults
        };
        config.check()?;
        Ok(config)
    }

    /// Whether the values make sense, however they were set.
    ///
    /// # Errors
    /// Names the value and what would be accepted.
    pub(super) fn check(&self) -> Result<(), BadUrl> {
        let plain =
            |text: &str, more: &[u8]| text.bytes().all(|b| b.is_ascii_alphanumeric() || more.contains(&b));
        if self.region.is_empty() || !plain(&self.region, b"-") {
            return Err(wrong("region", "use the name of a region, such as eu-central-1"));
        }
        // A password in there would be shown.
        let url =
            |url: &String| (url.starts_with("http://") || url.starts_with("https://")) && !url.contains('@');
        if !self.endpoint.as_ref().is_none_or(url) {
            return Err(wrong("endpoint", "use a URL without login, such as http://127.0.0.1:9324"));
        }
        if self.prefix.len() > LONGEST_PREFIX || !plain(&self.prefix, b"-_") {
            return Err(wrong("prefix", "use up to 60 letters, digits, dashes or underscores"));
        }
        if !(Duration::from_secs(1)..=LONGEST).contains(&self.visibility)
            || self.visibility.subsec_nanos() != 0
        {
            return Err(wrong("visibility", "use whole seconds, from 1s to 12h"));
        }
        if !(1 << 10..=LARGEST_MESSAGE).contains(&self.max_message) {
            return Err(wrong("max_message", "use a size from 1KiB to 1MiB"));
        }
        if self.timeout.is_zero() {
            return Err(wrong("timeout", "use a duration, such as 10s"));
        }
        Ok(())
    }
}

fn wrong(name: &str, expected: &str) -> BadUrl {
    BadUrl::Value { kind: KIND.name, name: name.to_owned(), expected: expected.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_url_means_the_defaults_and_the_login_that_aws_finds() {
        assert_eq!(Config::from_url("sqs://eu-central-1"), Ok(Config::new("eu-central-1")));
    }

    #[test]
    fn parameters_are_read() {
        let url = "sqs://AKID:s%2Fh@us-east-1?endpoint=http://127.0.0.1:9324&prefix=shop-&fifo=true&create=false\
                   &timeout=3s&visibility=2m&max_message=256KiB";
        let expected = Config {
            endpoint: Some("http://127.0.0.1:9324".to_owned()),
            login: Some(Login { key: "AKID".to_owned(), secret: Secret::new("s/h") }),
            prefix: "shop-".to_owned(),
            fifo: true,
            create: false,
            timeout: Duration::from_secs(3),
            visibility: Duration::from_secs(120),
            max_message: 256 << 10,
            ..Config::new("us-east-1")
        };
        let config = Config::from_url(url).expect("it is one");
        assert_eq!(config, expected);
        assert!(!format!("{config:?}").contains("s/h"));
    }

    #[test]
    fn a_bad_url_is_refused_with_what_would_be_accepted_and_without_the_secret() {
        let cases = [
            ("sns://k:hush@eu-central-1", "write `sqs://eu-central-1`"),
            ("sqs://k:hush@", "name one region"),
            ("sqs://k:hush@a,b", "name one region"),
            ("sqs://k:hush@eu-central-1/orders", "nothing follows"),
            ("sqs://k:hush@eu_central_1", "name of a region"),
            ("sqs://k@eu-central-1", "both halves"),
            ("sqs://k:hush@eu-central-1?fifos=true", "did you mean `fifo`?"),
            ("sqs://k:hush@eu-central-1?endpoint=127.0.0.1", "http://127.0.0.1:9324"),
            ("sqs://k:hush@eu-central-1?endpoint=http://a:hush@host", "without login"),
            ("sqs://k:hush@eu-central-1?prefix=a.b", "letters, digits"),
            ("sqs://k:hush@eu-central-1?visibility=1500ms", "whole seconds"),
            ("sqs://k:hush@eu-central-1?visibility=13h", "12h"),
            ("sqs://k:hush@eu-central-1?max_message=2MiB", "256KiB"),
        ];
        for (url, expected) in cases {
            let error = Config::from_url(url).expect_err(url).to_string();
            assert!(error.contains(expected), "{url}: {error}");
            assert!(!error.contains("hush"), "{error}");
        }
    }
}
