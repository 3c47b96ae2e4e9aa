//! Where messages are posted and how, from a URL. What is ours in its query stays here; the rest is the destination's.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use percent_encoding::percent_decode_str;
use url::{Host, Url};

use super::guard::Allow;
use super::sign::Key;
use crate::address::{BadUrl, Secret, beginning};

/// As people call it.
pub(super) const KIND: &str = "HTTP";

/// The parameters that are ours. Any other belongs to the destination.
pub(super) const PARAMETERS: [&str; 7] =
    ["allow_loopback", "allow_private", "concurrency", "rate", "secret", "timeout", "tls_ca"];

/// Values of the destination's parameters that are shorter are words, not tokens.
const SHORTEST_TOKEN: usize = 4;

/// The settings of a destination.
#[derive(Clone)]
pub struct Config {
    /// Where to; without the login, and without what is ours. Its path and query may hold a token: never shown.
    pub(super) destination: Url,
    /// Sent as basic authentication.
    pub login: Option<(String, Secret)>,
    /// What messages are signed with: several while one is being replaced.
    pub secrets: Vec<Key>,
    /// Requests that are under way at once at most.
    pub concurrency: usize,
    /// Requests in a second at most.
    pub rate: Option<f64>,
    /// How long one request may take, from the first look at its name to the last byte of the answer.
    pub timeout: Duration,
    /// Where it may be, beside on the internet.
    pub allow: Allow,
    /// A file with the only authorities whose certificates are believed, instead of those of this machine.
    pub tls_ca: Option<PathBuf>,
}

impl Config {
    /// Reads `https://user:password@example.com/hook?concurrency=16&rate=50&timeout=15s&secret=whsec_…`.
    ///
    /// `secret` may be there several times. Parameters that are not ours are sent to the destination as they are; one of
    /// the destination's that has a name of ours is sent when a letter of it is percent-encoded (`%74imeout=5`).
    ///
    /// # Errors
    /// When it is no such URL, a value makes no sense, or its host is an address that is not allowed.
    pub fn from_url(url: &str) -> Result<Self, BadUrl> {
        if !url.starts_with("http://") && !url.starts_with("https://") {
            let example = "https://example.com/hook";
            return Err(BadUrl::Scheme { found: beginning(url), kind: KIND, example });
        }
        let mut destination = Url::parse(url).map_err(|error| wrong("url", &error.to_string()))?;
        let login = login(&destination);
        // None of these can fail: the URL has a host.
        let _ = destination.set_username("");
        let _ = destination.set_password(None);
        destination.set_fragment(None);
        let query = destination.query().unwrap_or_default().to_owned();
        let mut config = Self {
            destination,
            login,
            secrets: Vec::new(),
            concurrency: 16,
            rate: None,
            timeout: Duration::from_secs(15),
            allow: Allow::default(),
            tls_ca: None,
        };
        let mut theirs = Vec::new();
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            match PARAMETERS.contains(&name) {
                true => config.set(name, &decoded(value))?,
                false => theirs.push(parameter),
            }
        }
        let theirs = theirs.join("&");
        config.destination.set_query(Some(&*theirs).filter(|query| !query.is_empty()));
        config.check()?;
        Ok(config)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), BadUrl> {
        let flag = || value.parse().map_err(|_| wrong(name, "use true or false"));
        match name {
            "allow_loopback" => self.allow.loopback = flag()?,
            "allow_private" => self.allow.private = flag()?,
            "concurrency" => self.concurrency = value.parse().map_err(|_| wrong(name, CONCURRENCY))?,
            "rate" => self.rate = Some(value.parse().map_err(|_| wrong(name, RATE))?),
            "timeout" => {
                self.timeout = humantime::parse_duration(value).map_err(|_| wrong(name, TIMEOUT))?;
            }
            "tls_ca" => self.tls_ca = Some(PathBuf::from(value)),
            // The name was found among PARAMETERS, so it is `secret`.
            _ => self.secrets.push(Key::parse(value).map_err(|error| wrong(name, &error.to_string()))?),
        }
        Ok(())
    }

    /// Whether the values make sense, however they were set.
    ///
    /// # Errors
    /// Names the value and what would be accepted.
    pub(super) fn check(&self) -> Result<(), BadUrl> {
        if !(1..=1024).contains(&self.concurrency) {
            return Err(wrong("concurrency", CONCURRENCY));
        }
        if self.rate.is_some_and(|rate| !(0.01..=100_000.0).contains(&rate)) {
            return Err(wrong("rate", RATE));
        }
        if !(Duration::from_millis(100)..=Duration::from_secs(600)).contains(&self.timeout) {
            return Err(wrong("timeout", TIMEOUT));
        }
        if !self.secrets.iter().all(Key::can_sign) {
            return Err(wrong("secret", "a public key cannot sign: use `whsec_…` or `whsk_…`"));
        }
        // A name is judged by what it resolves to, whenever it does.
        let address = match self.destination.host() {
            Some(Host::Ipv4(address)) => address.into(),
            Some(Host::Ipv6(address)) => address.into(),
            Some(Host::Domain(_)) | None => return Ok(()),
        };
        self.allow
            .check(address)
            .map_err(|refused| wrong("host", &format!("{address} is refused: {refused}")))
    }

    /// Scheme, host and port: what may be shown of the destination.
    pub fn origin(&self) -> String {
        self.destination.origin().ascii_serialization()
    }

    /// What the destination said, without what it repeats of our login, path and query: error pages do that.
    pub(super) fn redacted(&self, text: &str) -> String {
        let login = self.login.iter().flat_map(|(user, password)| {
            [password.reveal().to_owned(), BASE64.encode(format!("{user}:{}", password.reveal()))]
        });
        let path = Some(self.destination.path().to_owned()).filter(|path| path != "/");
        let query = self.destination.query().unwrap_or_default().split('&');
        let values = query.filter_map(|parameter| Some(parameter.split_once('=')?.1.to_owned()));
        let theirs = path.into_iter().chain(values.filter(|value| value.len() >= SHORTEST_TOKEN));
        let theirs = theirs.flat_map(|part| [decoded(&part), part]);
        let mut hidden: Vec<String> = login.chain(theirs).filter(|secret| !secret.is_empty()).collect();
        // The longest first: a part of one that was replaced would leave the rest of it.
        hidden.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        hidden.iter().fold(text.to_owned(), |text, secret| text.replace(secret, "***"))
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("origin", &self.origin())
            .field("login", &self.login)
            .field("secrets", &self.secrets)
            .field("concurrency", &self.concurrency)
            .field("rate", &self.rate)
            .field("timeout", &self.timeout)
            .field("allow", &self.allow)
            .field("tls_ca", &self.tls_ca)
            .finish_non_exhaustive()
    }
}

fn login(url: &Url) -> Option<(String, Secret)> {
    let (user, password) = (decoded(url.username()), decoded(url.password().unwrap_or_default()));
    (!user.is_empty() || !password.is_empty()).then(|| (user, Secret::new(password)))
}

/// A `+` stays what it is, because secrets are full of them.
fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

fn wrong(name: &str, expected: &str) -> BadUrl {
    BadUrl::Value { kind: KIND, name: name.to_owned(), expected: expected.to_owned() }
}

const CONCURRENCY: &str = "use a number from 1 to 1024";
const RATE: &str = "use a number of requests in a second from 0.01 to 100000";
const TIMEOUT: &str = "use a duration from 100ms to 10m, such as 15s";

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

    fn read(url: &str) -> Result<Config, String> {
        Config::from_url(url).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_ours_stays_here_and_the_rest_is_sent_on_as_it_was() {
        let url = format!(
            "https://ann:p%40ss@example.com:8443/a%20b/hook?x=1+2&concurrency=4&rate=2.5&y=%26&timeout=2s\
             &secret={SECRET}&secret={SECRET}&%74imeout=5&cloudevents=yes&empty&tls_ca=/ca.pem#part"
        );
        let config = read(&url).expect("it is one");
        let destination = config.destination.as_str();
        assert_eq!(
            destination,
            "https://example.com:8443/a%20b/hook?x=1+2&y=%26&%74imeout=5&cloudevents=yes&empty"
        );
        assert_eq!((config.concurrency, config.rate, config.secrets.len()), (4, Some(2.5), 2));
        assert_eq!(config.timeout, Duration::from_secs(2));
        assert_eq!(config.login, Some(("ann".to_owned(), Secret::new("p@ss"))));
        assert_eq!(config.tls_ca, Some(PathBuf::from("/ca.pem")));
        assert_eq!(config.origin(), "https://example.com:8443");
        assert_eq!(config.allow, Allow::default());
        let plain = read("https://example.com/hook?concurrency=4").expect("it is one");
        assert_eq!(plain.destination.as_str(), "https://example.com/hook");
    }

    #[test]
    fn nothing_secret_is_shown() {
        let url = format!("https://ann:hush@example.com/hush/hook?token=hush&secret={SECRET}");
        let config = read(&url).expect("it is one");
        let shown = format!("{config:?}");
        assert!(!shown.contains("hush") && !shown.contains(&SECRET[6..]), "{shown}");
        let cases = [
            ("no such order", "no such order"),
            ("the token hush is unknown", "the token *** is unknown"),
            ("Authorization: Basic YW5uOmh1c2g=", "Authorization: Basic ***"),
            ("Cannot POST /hush/hook?token=hush", "Cannot POST ***?token=***"),
        ];
        for (said, shown) in cases {
            assert_eq!(config.redacted(said), shown);
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_what_would_be_right_and_never_with_a_secret() {
        let cases = [
            ("amqp://ann:hush@host", "write `https://example.com/hook`"),
            ("https://ann:hush@", "empty host"),
            ("https://ann:hush@host:99999", "invalid port"),
            ("https://ann:hush@host?concurrency=0", "from 1 to 1024"),
            ("https://ann:hush@host?concurrency=many", "from 1 to 1024"),
            ("https://ann:hush@host?rate=0", "in a second"),
            ("https://ann:hush@host?rate=NaN", "in a second"),
            ("https://ann:hush@host?timeout=1ms", "such as 15s"),
            ("https://ann:hush@host?timeout=1h", "such as 15s"),
            ("https://ann:hush@host?allow_private=yes", "true or false"),
            ("https://ann:hush@host?secret=hush", "whsec_"),
            ("https://ann:hush@host?secret=whsec_aHVzaA==", "24 to 64"),
            ("https://ann:hush@host?secret=whpk_11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=", "cannot sign"),
            ("https://ann:hush@127.0.0.1/", "allow_loopback=true"),
            ("https://ann:hush@10.1.2.3/", "allow_private=true"),
        ];
        for (url, expected) in cases {
            let error = read(url).expect_err(url);
            assert!(error.contains(expected), "{url}: {error}");
            assert!(!error.contains("ann:hush") && !error.contains("aHVzaA"), "{error}");
        }
    }

    /// Ways to write an address that is refused, none of which looks like one to a simple filter.
    const DISGUISED: &str = "
        127.0.0.1 127.0.0.1. 127.1 127.0.1 127.00.00.01 0177.0.0.1 0177.0.0.01 0x7f.0.0.1 0x7f.1
        0x7F.0x0.0x0.0x1 0x7f000001 0X7F000001 2130706433 017700000001 127.0.0.0x1 %31%32%37.0.0.1
        127%2e0%2e0%2e1 １２７.0.0.1 ①②⑦.⓪.⓪.① 127。0。0。1 127｡0｡0｡1 127．0．0．1 0.0.0.0 0 00 0x0 0.0 0x
        10.0.0.1 10.1 012.0.0.1 0xa.0.0.1 0xa000001 167772161 10.0.0.1. 192.168.1.1 192.168.257
        192.11010305 0xc0a80101 3232235777 0300.0250.1.1 172.16.0.1 0xac.0x10.0.1 2886729729
        172.31.255.255 169.254.169.254 169.254.43518 169.16689662 2852039166 0xa9fea9fe
        0xA9.0xFE.0xA9.0xFE 0251.0376.0251.0376 025177524776 169.254.169.254. 169.254.170.2 100.64.0.1
        100.100.100.200 1681915904 168.63.129.16 192.0.0.192 198.18.0.1 192.0.2.1 198.51.100.1
        203.0.113.1 224.0.0.1 240.0.0.1 255.255.255.255 4294967295 0xffffffff 037777777777 192.88.99.1
        [::1] [0:0:0:0:0:0:0:1] [0000:0000:0000:0000:0000:0000:0000:0001] [::0.0.0.1] [::]
        [::ffff:127.0.0.1] [::ffff:7f00:1] [0:0:0:0:0:ffff:127.0.0.1] [::FFFF:7F00:0001]
        [::ffff:10.0.0.1] [::ffff:169.254.169.254] [::ffff:a9fe:a9fe] [::ffff:192.168.0.1] [::127.0.0.1]
        [::7f00:1] [64:ff9b::7f00:1] [64:ff9b::127.0.0.1] [64:ff9b:1::a00:1] [2002:7f00:1::]
        [2002:a9fe:a9fe::] [2001:0:4136:e378:8000:63bf:3fff:fdd2] [2600::5efe:7f00:1] [fe80::1]
        [fec0::1] [fc00::1] [fd00::1] [fd00:ec2::254] [fd20:ce::254] [ff02::1] [2001:db8::1] [3fff::1]
        [100::1] [5f00::1] [::ffff:0:127.0.0.1]
    ";

    #[test]
    fn an_address_in_disguise_is_refused_before_anything_is_sent() {
        for host in DISGUISED.split_whitespace() {
            for url in [format!("http://{host}/"), format!("https://user@{host}:8080/?allow_me=true")] {
                let error = read(&url).expect_err(&url);
                assert!(error.contains("`host` of the HTTP broker is wrong"), "{url}: {error}");
            }
        }
        for host in ["1.1.1.1", "0x08080808", "[2606:4700:4700::1111]", "example.com", "127.0.0.1.nip.io"] {
            assert!(
                read(&format!("https://{host}/")).is_ok(),
                "{host}: a name is judged when it is resolved"
            );
        }
        for url in ["http://127.1/?allow_loopback=true", "http://[::1]/?allow_loopback=true"] {
            assert!(read(url).is_ok(), "{url}");
        }
        assert!(read("http://10.0.0.1/?allow_private=true").is_ok());
        assert!(read("http://169.254.169.254/?allow_private=true&allow_loopback=true").is_err());
    }
}
