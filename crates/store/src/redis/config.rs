//! Where the store is, and what its owner accepts.

use std::fmt;

use ::redis::{Client, ConnectionAddr, IntoConnectionInfo};

use super::promise::ACCEPTED;
use crate::Error;

/// Where a store on Redis is and how careful it must be.
#[derive(Clone, PartialEq, Eq)]
pub struct Config {
    /// `redis://user:password@host:6379/0`, or `rediss://` for TLS.
    pub url: String,
    /// The start of all keys, with a hash tag: `{postrider}`. A name without braces is put into them.
    pub prefix: String,
    /// Replicas that must have a write before it is answered. A store that was told of too few says so.
    pub replicas: u32,
    /// `Some("I accept that messages may be lost")` lets the store start on a server that may lose them.
    pub accept_loss: Option<String>,
}

impl Config {
    /// The prefix when none is chosen.
    pub const DEFAULT_PREFIX: &'static str = "{postrider}";

    /// A store at `url` with the usual prefix, on a server that must not lose anything.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), prefix: Self::DEFAULT_PREFIX.to_owned(), replicas: 0, accept_loss: None }
    }

    /// The prefix with its hash tag.
    pub(super) fn checked_prefix(&self) -> Result<String, Error> {
        let name = self.prefix.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
        let name = name.unwrap_or(&self.prefix);
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:".contains(&byte);
        if name.is_empty() || name.len() > 100 || !name.bytes().all(plain) {
            return Err(Error::Refused(format!(
                "`{}` cannot be the prefix of a store on Redis: use 1 to 100 letters, digits, dots, dashes, colons or \
                 underscores, like `{}`",
                self.prefix,
                Self::DEFAULT_PREFIX
            )));
        }
        Ok(format!("{{{name}}}"))
    }

    /// A client for the URL. Errors never repeat the URL: it may hold a password.
    pub(super) fn client(&self) -> Result<Client, Error> {
        let refused = |error: ::redis::RedisError| {
            Error::Refused(format!("the URL of the store is not one of Redis ({}): {HOW}", error.category()))
        };
        let info = self.url.as_str().into_connection_info().map_err(refused)?;
        if matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            // Other parts of the program may have chosen already; then theirs is used.
            let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        }
        Client::open(info).map_err(refused)
    }

    pub(super) fn accepts_loss(&self) -> bool {
        self.accept_loss.as_deref() == Some(ACCEPTED)
    }
}

/// What a URL looks like.
const HOW: &str = "write redis://user:password@host:6379/0, or rediss:// for TLS";

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("url", &without_password(&self.url))
            .field("prefix", &self.prefix)
            .field("replicas", &self.replicas)
            .field("accept_loss", &self.accept_loss)
            .finish()
    }
}

/// The URL as it may be shown.
fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return "(not a URL)".to_owned() };
    // A password may hold an `@` or a `/` by mistake: all before the last `@` is kept back.
    match rest.rsplit_once('@') {
        Some((secret, place)) => {
            let user = secret.split(':').next().unwrap_or_default();
            format!("{scheme}://{user}:***@{place}")
        }
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_never_shown() {
        for url in ["redis://:s3cret@host:1/0", "rediss://ann:s3cret@host", "redis://ann:s3/cr@s3cret@host:1"]
        {
            let shown = format!("{:?}", Config::new(url));
            assert!(!shown.contains("s3") && shown.contains("***@host"), "{shown}");
        }
        let wrong = Config::new("http://:s3cret@host").client().expect_err("not a URL of Redis").to_string();
        assert!(!wrong.contains("s3cret") && wrong.contains("redis://user"), "{wrong}");
    }

    #[test]
    fn a_prefix_has_a_hash_tag() {
        let prefix = |text: &str| Config { prefix: text.to_owned(), ..Config::new("") }.checked_prefix();
        assert_eq!(prefix("shop").expect("a name"), "{shop}");
        assert_eq!(prefix("{shop:eu}").expect("a name"), "{shop:eu}");
        for wrong in ["", "{}", "a b", "a{b}", "{a", "ö"] {
            prefix(wrong).expect_err(wrong);
        }
    }
}
