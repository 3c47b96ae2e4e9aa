//! Claims in Redis: one script locks a batch and gives the last one back, in one round trip.
//!
//! A message has two keys. `<prefix><id>` is the lock; its value is the number of the attempt, as people expect it.
//! `<prefix><id>:attempts` is a hash that outlives it: how many attempts were begun, of which delivery, and who has
//! the last one, so that nobody removes a lock that is not his. Time is that of Redis throughout.
//!
//! Redis may lose keys (a failover, an evicting policy, no AOF). Then a message of a dead worker is sent again before
//! its lock would have ended, as it would be without claims; the lane's epoch still decides what the store takes.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use message::MessageId;
use redis::Script;
use store::link::Link;
use store::{BatchId, Error};

use super::{Answer, Claims, End, Over, Wanted};

/// A Redis that does not answer in this time is away: the relay gives the batch back and tries again.
const PATIENCE: Duration = Duration::from_secs(2);

/// Messages in one run of the script: Redis does nothing else meanwhile.
const CHUNK: usize = 1_000;

/// Stands for the message's id in a pattern of keys.
const ID: &str = "{id}";

/// Where claims are kept, and for how long.
#[derive(Clone)]
pub struct Config {
    /// The Redis: `redis://host:6379/0`.
    pub url: String,
    /// What lock keys begin with; or their pattern, if it has `{id}` in it: `shop:{id}:lock`.
    pub prefix: String,
    /// How long a worker that died keeps its message. Longer than the slowest send.
    pub ttl: Duration,
    /// How long attempts are counted after the last one.
    pub keep: Duration,
}

impl Config {
    /// Locks of 15 minutes under `postrider:claim:`, counts of a week.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            prefix: "postrider:claim:".to_owned(),
            ttl: Duration::from_secs(15 * 60),
            keep: Duration::from_secs(7 * 24 * 60 * 60),
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the URL: it may hold a password.
        f.debug_struct("Config")
            .field("prefix", &self.prefix)
            .field("ttl", &self.ttl)
            .field("keep", &self.keep)
            .finish_non_exhaustive()
    }
}

/// Locks and counters of messages in Redis.
#[derive(Debug)]
pub struct RedisClaims {
    link: Link,
    exchange: Script,
    /// What a lock key has before the id, and after it.
    around: (String, String),
    ttl: Duration,
    keep: Duration,
}

impl RedisClaims {
    /// Claims as configured. Nothing is connected yet: a Redis that is away is waited for.
    ///
    /// # Errors
    /// When it could never work, with what to change.
    pub fn new(config: &Config) -> Result<Self, Error> {
        let Config { url, prefix, ttl, keep } = config;
        if prefix.is_empty() {
            let problem = "claims need a prefix for their keys, such as `postrider:claim:`";
            return Err(Error::Refused(problem.to_owned()));
        }
        if ttl.as_millis() == 0 || keep <= ttl {
            return Err(Error::Refused(format!(
                "a lock of {ttl:?} with a count of {keep:?} protects nothing: the lock must last a while, and its \
                 count longer, or a worker that crashes would never reach the limit of attempts"
            )));
        }
        let (before, after) = prefix.split_once(ID).unwrap_or((prefix, ""));
        Ok(Self {
            link: Link::new(url, PATIENCE)?,
            exchange: Script::new(include_str!("exchange.lua")),
            around: (before.to_owned(), after.to_owned()),
            ttl: *ttl,
            keep: *keep,
        })
    }

    fn keys(&self, id: MessageId) -> [String; 2] {
        let (before, after) = &self.around;
        let lock = format!("{before}{id}{after}");
        let counter = format!("{lock}:attempts");
        [lock, counter]
    }

    async fn run(&self, over: &[Over], wanted: &[Wanted]) -> Result<Vec<Answer>, Error> {
        let mut call = self.exchange.prepare_invoke();
        for id in over.iter().map(|over| over.id).chain(wanted.iter().map(|wanted| wanted.id)) {
            let [lock, counter] = self.keys(id);
            call.key(lock).key(counter);
        }
        call.arg(millis(self.ttl)).arg(millis(self.keep)).arg(over.len());
        for over in over {
            call.arg(over.owner.to_string()).arg(word(over.end));
        }
        for wanted in wanted {
            call.arg(wanted.owner.to_string()).arg(wanted.delivery).arg(wanted.attempts);
        }
        let (waits, owners): (Vec<i64>, Vec<String>) = self.link.invoke(&call).await?;
        Ok(waits.into_iter().zip(owners).map(|(wait, owner)| answer(wait, &owner)).collect())
    }
}

#[async_trait]
impl Claims for RedisClaims {
    async fn exchange(&self, over: &[Over], wanted: &[Wanted]) -> Result<Vec<Answer>, String> {
        let mut answers = Vec::with_capacity(wanted.len());
        let none: (&[Over], &[Wanted]) = (&[], &[]);
        let given_back = over.chunks(CHUNK).map(|over| (over, none.1));
        let locked = wanted.chunks(CHUNK).map(|wanted| (none.0, wanted));
        let chunks: Vec<_> = if over.len() + wanted.len() <= CHUNK {
            vec![(over, wanted)]
        } else {
            given_back.chain(locked).collect()
        };
        for (over, wanted) in chunks {
            answers.extend(self.run(over, wanted).await.map_err(reason)?);
        }
        match answers.len() == wanted.len() {
            true => Ok(answers),
            false => Err(format!("Redis answered {} of {} messages", answers.len(), wanted.len())),
        }
    }
}

/// What Redis said, without a word about a store.
fn reason(error: Error) -> String {
    match error {
        Error::Unavailable { reason, .. } => reason,
        other => other.to_string(),
    }
}

fn answer(wait: i64, owner: &str) -> Answer {
    match u64::try_from(wait) {
        Err(_) => Answer::Locked,
        Ok(wait) => Answer::Held {
            owner: BatchId::parse_str(owner).ok(),
            rest: (wait > 0).then(|| Duration::from_millis(wait)),
        },
    }
}

fn word(end: End) -> &'static str {
    match end {
        End::Finished => "finished",
        End::Failed => "failed",
        End::Released => "released",
    }
}

fn millis(duration: Duration) -> u64 {
    // Redis adds this to its clock: what does not fit is as good as for ever.
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).min(1 << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(prefix: &str) -> [String; 2] {
        let config = Config { prefix: prefix.to_owned(), ..Config::new("redis://h") };
        RedisClaims::new(&config).expect("it can work").keys(MessageId::new())
    }

    #[test]
    fn keys_are_a_prefix_and_the_id_or_what_a_pattern_makes_of_it() {
        let [lock, counter] = keys("safehome:user_event:{id}");
        assert!(lock.starts_with("safehome:user_event:") && !lock.contains('{'), "{lock}");
        assert_eq!(counter, format!("{lock}:attempts"));
        let [lock, _] = keys("shop:{id}:lock");
        assert!(lock.starts_with("shop:") && lock.ends_with(":lock"), "{lock}");
        assert!(keys("mine:")[0].starts_with("mine:"));
    }

    #[test]
    fn what_could_never_work_is_refused_with_what_to_change() {
        let refused = |config: Config| RedisClaims::new(&config).expect_err("refused").to_string();
        let config = || Config::new("redis://h");
        assert!(refused(Config { prefix: String::new(), ..config() }).contains("prefix"));
        assert!(refused(Config { ttl: Duration::ZERO, ..config() }).contains("must last a while"));
        assert!(refused(Config { keep: Duration::from_secs(1), ..config() }).contains("longer"));
        assert!(refused(Config::new("http://me:secret@h")).contains("redis://host"));
        assert!(!format!("{:?}", Config::new("redis://me:secret@h")).contains("secret"));
    }
}
