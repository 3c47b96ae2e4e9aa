//! The URL of a broker, taken apart: what each backend asks of it, and a complaint about what nobody asked for.

#[cfg(feature = "wire")]
use std::collections::BTreeMap;
use std::fmt;
#[cfg(feature = "wire")]
use std::time::Duration;

#[cfg(feature = "wire")]
use percent_encoding::percent_decode_str;

/// Why a URL does not name a broker that can be used. Never shows a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadUrl {
    /// No broker has such URLs.
    #[error("`{found}` is not a broker: did you mean `{nearest}://`?")]
    Unknown {
        /// Its beginning.
        found: String,
        /// The scheme that is most like it.
        nearest: &'static str,
    },
    /// This program was built without it.
    #[error(
        "`{found}` is not in this build of the program: build it with `--features {feature}`, or with `--features full`"
    )]
    NotBuilt {
        /// Its beginning.
        found: String,
        /// What brings it.
        feature: &'static str,
    },
    /// It does not begin as it must.
    #[error("`{found}` is no {kind} broker: write `{example}`")]
    Scheme {
        /// Its beginning.
        found: String,
        /// The kind of broker that was asked.
        kind: &'static str,
        /// One that would be read.
        example: &'static str,
    },
    /// A parameter that does not exist.
    #[error("{kind} brokers have no parameter `{name}`: did you mean `{nearest}`?")]
    Parameter {
        /// The kind of broker.
        kind: &'static str,
        /// As it was written.
        name: String,
        /// The valid one that is most like it.
        nearest: &'static str,
    },
    /// A part with a value that it cannot have.
    #[error("`{name}` of the {kind} broker is wrong: {expected}")]
    Value {
        /// The kind of broker.
        kind: &'static str,
        /// Which part.
        name: String,
        /// What would be accepted.
        expected: String,
    },
}

/// A word that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Keeps a word from being shown.
    pub fn new(word: impl Into<String>) -> Self {
        Self(word.into())
    }

    /// The word itself, for whoever must be told it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// What a backend's URLs look like.
#[cfg(feature = "wire")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    /// As people call it.
    pub(crate) name: &'static str,
    /// What its URLs may begin with.
    pub(crate) schemes: &'static [&'static str],
    /// One of them.
    pub(crate) example: &'static str,
    /// The parameters that they may have.
    pub(crate) parameters: &'static [&'static str],
}

/// A URL of some kind of broker, in its parts.
#[cfg(feature = "wire")]
#[derive(Clone, Debug)]
pub(crate) struct Address {
    kind: Kind,
    pub(crate) scheme: String,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<Secret>,
    /// Host and port, as written; several where the broker is several servers.
    pub(crate) hosts: Vec<String>,
    /// What follows the hosts, without its first slash.
    pub(crate) path: String,
    parameters: BTreeMap<String, String>,
}

#[cfg(feature = "wire")]
impl Address {
    /// Takes `url` apart.
    ///
    /// # Errors
    /// When it is of another kind, or has a parameter that the kind does not.
    pub(crate) fn parse(url: &str, kind: Kind) -> Result<Self, BadUrl> {
        let (scheme, rest) =
            url.split_once("://").filter(|(scheme, _)| kind.schemes.contains(scheme)).ok_or_else(|| {
                BadUrl::Scheme { found: beginning(url), kind: kind.name, example: kind.example }
            })?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let (user, password) = match login.map(|login| login.split_once(':').unwrap_or((login, ""))) {
            Some((user, password)) => (Some(decoded(user)), Some(decoded(password))),
            None => (None, None),
        };
        let mut parameters = BTreeMap::new();
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            if !kind.parameters.contains(&name) {
                let nearest = nearest(name, kind.parameters);
                return Err(BadUrl::Parameter { kind: kind.name, name: name.to_owned(), nearest });
            }
            parameters.insert(name.to_owned(), decoded(value));
        }
        Ok(Self {
            kind,
            scheme: scheme.to_owned(),
            user: user.filter(|user| !user.is_empty()),
            password: password.filter(|password| !password.is_empty()).map(Secret::new),
            hosts: hosts.split(',').filter(|host| !host.is_empty()).map(str::to_owned).collect(),
            path: decoded(path),
            parameters,
        })
    }

    /// A complaint about one of its parts.
    pub(crate) fn wrong(&self, name: &str, expected: impl Into<String>) -> BadUrl {
        BadUrl::Value { kind: self.kind.name, name: name.to_owned(), expected: expected.into() }
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        debug_assert!(self.kind.parameters.contains(&name), "{name} is not among the parameters");
        self.parameters.get(name).map(String::as_str)
    }

    /// A whole number within bounds.
    pub(crate) fn number(&self, name: &str, least: u64, most: u64) -> Result<Option<u64>, BadUrl> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.map(Some).ok_or_else(|| self.wrong(name, format!("use a number from {least} to {most}")))
    }

    /// A duration such as `10s` within bounds.
    pub(crate) fn duration(
        &self,
        name: &str,
        least: Duration,
        most: Duration,
    ) -> Result<Option<Duration>, BadUrl> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let duration =
            humantime::parse_duration(text).ok().filter(|duration| (least..=most).contains(duration));
        let bounds = || {
            let (least, most) = (humantime::format_duration(least), humantime::format_duration(most));
            self.wrong(name, format!("use a duration from {least} to {most}, such as 10s"))
        };
        duration.map(Some).ok_or_else(bounds)
    }

    /// A number of bytes such as `64KiB` within bounds.
    pub(crate) fn size(&self, name: &str, least: usize, most: usize) -> Result<Option<usize>, BadUrl> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let size = size(text).filter(|size| (least..=most).contains(size));
        let expected = || self.wrong(name, format!("use a size from {least}B to {most}B, such as 256KiB"));
        size.map(Some).ok_or_else(expected)
    }

    /// `true` or `false`.
    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, BadUrl> {
        let Some(text) = self.text(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| self.wrong(name, "use true or false"))
    }
}

/// `64`, `64B`, `64KiB`, `1MiB`, `64KB`, `1MB`.
pub(crate) fn size(text: &str) -> Option<usize> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit: usize = match text[digits..].trim() {
        "" | "B" => 1,
        "KB" => 1_000,
        "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "MiB" => 1 << 20,
        _ => return None,
    };
    text[..digits].parse::<usize>().ok()?.checked_mul(unit)
}

/// The valid name that is most like the given one.
pub(crate) fn nearest(name: &str, valid: &[&'static str]) -> &'static str {
    let likeness = |valid: &&&str| (strsim::jaro_winkler(name, valid) * 1e6) as u64;
    valid.iter().max_by_key(likeness).copied().unwrap_or_default()
}

/// Only the scheme of a wrong URL: the rest may hold a password.
pub(crate) fn beginning(url: &str) -> String {
    url.split_once("://")
        .map_or_else(|| url.chars().take(16).collect(), |(scheme, _)| format!("{scheme}://…"))
}

#[cfg(feature = "wire")]
fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(all(test, feature = "wire"))]
mod tests {
    use super::*;

    const KIND: Kind = Kind {
        name: "Kafka",
        schemes: &["kafka"],
        example: "kafka://127.0.0.1:9092",
        parameters: &["linger", "create", "max_payload", "partitions"],
    };

    #[test]
    fn every_part_is_found_and_decoded() {
        let url = "kafka://ann:p%40ss%3A@one:9092,two:9093/a%20b?linger=5ms&create=true&max_payload=64KiB";
        let address = Address::parse(url, KIND).expect("it is one");
        assert_eq!(address.user.as_deref(), Some("ann"));
        assert_eq!(address.password.as_ref().map(Secret::reveal), Some("p@ss:"));
        assert_eq!((address.hosts.len(), address.path.as_str()), (2, "a b"));
        let most = Duration::from_secs(1);
        assert_eq!(address.duration("linger", Duration::ZERO, most), Ok(Some(Duration::from_millis(5))));
        assert_eq!(address.flag("create"), Ok(Some(true)));
        assert_eq!(address.size("max_payload", 1, 1 << 20), Ok(Some(64 << 10)));
        assert_eq!(address.number("partitions", 1, 10), Ok(None));
        assert!(!format!("{address:?}").contains("p@ss"));
    }

    #[test]
    fn what_is_wrong_is_said_with_what_would_be_right_and_never_with_the_password() {
        let wrong = |url: &str| {
            let address = Address::parse(url, KIND)?;
            address.number("partitions", 1, 10)?;
            address.flag("create")?;
            address.duration("linger", Duration::ZERO, Duration::from_secs(1))?;
            address.size("max_payload", 1, 1 << 20)
        };
        let cases = [
            ("amqp://ann:hush@host", "write `kafka://127.0.0.1:9092`"),
            ("hush", "write `kafka://"),
            ("kafka://ann:hush@host?lingr=1", "did you mean `linger`?"),
            ("kafka://ann:hush@host?partitions=11", "from 1 to 10"),
            ("kafka://ann:hush@host?create=yes", "true or false"),
            ("kafka://ann:hush@host?linger=2s", "from 0s to 1s"),
            ("kafka://ann:hush@host?max_payload=1GB", "such as 256KiB"),
        ];
        for (url, expected) in cases {
            let error = wrong(url).expect_err(url).to_string();
            assert!(error.contains(expected), "{url}: {error}");
            assert!(!error.contains("ann:hush"), "{error}");
        }
    }
}
