//! `[store]`: where messages wait, and the settings that only some stores know.

use std::path::PathBuf;

use store::{Retention, Sent};

use super::Store;
use super::read::Reader;
use super::section::Section;
use super::show::redacted;
use super::tree::Node;

/// The default when nobody names a store.
const DEFAULT: &str = "sqlite://postrider-data/postrider.db";

/// The words that let a store on Redis start although it may lose messages.
pub(crate) const ACCEPT_LOSS: &str = "I accept that messages may be lost";

/// What kind of store a URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A file.
    Sqlite(PathBuf),
    /// A PostgreSQL database.
    Postgres,
    /// A MySQL or MariaDB database.
    Mysql,
    /// A Redis server.
    Redis,
}

impl Place {
    /// Reads a URL. Says what is wrong with it, without its password.
    pub(super) fn of(url: &str) -> Result<Self, String> {
        const SHAPES: &str = "use sqlite://path/to/file.db, postgres://user@host/database, \
                              mysql://user@host/database or redis://host";
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(format!("this is not a URL: {SHAPES}"));
        };
        let place = match scheme {
            "sqlite" if rest.contains('?') => {
                return Err(
                    "a sqlite:// URL takes no parameters here: remove the ? and what follows".to_owned()
                );
            }
            "sqlite" if rest.is_empty() => {
                return Err("name the file, such as sqlite://postrider-data/postrider.db".to_owned());
            }
            "sqlite" => Self::Sqlite(PathBuf::from(rest)),
            "postgres" | "postgresql" => Self::Postgres,
            "mysql" | "mariadb" => Self::Mysql,
            "redis" | "rediss" => Self::Redis,
            _ => return Err(format!("`{scheme}://` is not a store: {SHAPES}")),
        };
        if let Some(feature) = place.missing() {
            return Err(format!(
                "`{scheme}://` is not in this build: build with `--features {feature}`, or with `--features full` for everything"
            ));
        }
        if rest.is_empty() {
            return Err(format!("`{}` names no server: {SHAPES}", redacted(url)));
        }
        if !matches!(place, Self::Sqlite(_))
            && let Some(port) = ports(rest).find(|port| port.parse::<u16>().is_err())
        {
            let port = port.escape_debug();
            return Err(format!(
                "`{port}` is no port: use a number up to 65535, or leave it out for the usual one"
            ));
        }
        Ok(place)
    }

    /// The feature that this build lacks for it.
    fn missing(&self) -> Option<&'static str> {
        let (built, feature) = match self {
            Self::Sqlite(_) => (true, "sqlite"),
            Self::Postgres => (cfg!(feature = "postgres"), "postgres"),
            Self::Mysql => (cfg!(feature = "mysql"), "mysql"),
            Self::Redis => (cfg!(feature = "redis"), "redis"),
        };
        (!built).then_some(feature)
    }
}

/// The ports of a URL's servers, of which there may be several, as they are written.
fn ports(rest: &str) -> impl Iterator<Item = &str> {
    let authority = rest.split(['/', '?']).next().unwrap_or(rest);
    let servers = authority.rsplit_once('@').map_or(authority, |(_, servers)| servers);
    // The colons of an address of IPv6 stand within brackets.
    servers.split(',').filter_map(|server| server.rsplit(']').next()?.split_once(':').map(|(_, port)| port))
}

const KEYS: [&str; 8] =
    ["url", "retention", "sent", "doorbell", "connections", "prefix", "replicas", "accept_loss"];

impl<'a> Reader<'a> {
    pub(super) fn store(&mut self, node: Option<Node>) -> Store {
        let mut section = self.section("store", node, &KEYS);
        self.mark(&section, &KEYS);
        let found = section.parsed("url", |url| Ok((url.to_owned(), Place::of(url)?)));
        let (url, place) = found.map_or_else(
            || (DEFAULT.to_owned(), Place::Sqlite(PathBuf::from("postrider-data/postrider.db"))),
            |found| found.value,
        );
        only(&section, &place);
        let defaults = Retention::default();
        let mut kept =
            self.section("store.retention", section.take("retention"), &["sent", "dead", "keys", "audit"]);
        Store {
            url,
            place,
            sent: section.word(
                "sent",
                &[("keep", Sent::Keep), ("delete", Sent::Delete), ("partition", Sent::Partition)],
                Sent::Keep,
            ),
            doorbell: section.flag("doorbell", false),
            connections: section.number("connections", 2, 1_000, 10) as usize,
            prefix: section.text("prefix").map_or_else(|| "{postrider}".to_owned(), |found| found.value),
            replicas: section.number("replicas", 0, 100, 0),
            accept_loss: section
                .parsed("accept_loss", |words| match words == ACCEPT_LOSS {
                    true => Ok(true),
                    false => Err(format!("write out what it means: accept_loss = \"{ACCEPT_LOSS}\"")),
                })
                .is_some(),
            retention: Retention {
                sent: kept.duration("sent", defaults.sent),
                dead: kept.duration("dead", defaults.dead),
                keys: kept.duration("keys", defaults.keys),
                audit: kept.duration("audit", defaults.audit),
            },
        }
    }
}

/// Complains about settings that this kind of store does not have: they would be ignored in silence.
fn only(section: &Section<'_>, place: &Place) {
    let refuse = |keys: &[&str], whose: &str| {
        for key in keys.iter().filter(|key| section.has(key)) {
            section.complain(
                key,
                section.origin_of(key),
                format!("only {whose} has this setting: remove it"),
            );
        }
    };
    if matches!(place, Place::Sqlite(_) | Place::Redis) {
        refuse(&["sent", "connections"], "a store on PostgreSQL or MySQL");
    }
    if *place != Place::Postgres {
        refuse(&["doorbell"], "a store on PostgreSQL");
    }
    if *place != Place::Redis {
        refuse(&["prefix", "replicas", "accept_loss"], "a store on Redis");
    }
}

#[cfg(all(test, feature = "postgres"))]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_none_is_refused_and_no_password_is_taken_for_one() {
        for good in [
            "postgres://h/d",
            "postgres://u:p%40ss@h:5432/d",
            "postgres://u:a:b@one:1,two:2/d?x=a:b",
            "postgres://[::1]:5432/d",
            "postgres://[::1]/d",
            "postgres://u:secret@h",
        ] {
            assert_eq!(Place::of(good), Ok(Place::Postgres), "{good}");
        }
        for (bad, shown) in [
            ("postgres://h:99999/d", "`99999`"),
            ("postgres://u:secret@h:abc/d", "`abc`"),
            ("postgres://one:1,two:x/d", "`x`"),
            ("postgres://h:1:2/d", "`1:2`"),
            ("postgres://[::1]:x/d", "`x`"),
        ] {
            let refused = Place::of(bad).expect_err(bad);
            assert!(refused.contains(shown) && !refused.contains("secret"), "{refused}");
        }
    }
}
