//! The stream that keeps the messages: what it is called, whether it will do, and how it is made.

use std::time::Duration;

use async_nats::jetstream::stream::{Config as Stream, DiscardPolicy, Info, RetentionPolicy, StorageType};

use super::config::Config;
use super::error::{Trouble, uncreated, unseen};
use super::{Inner, Known};
use crate::contract::unrecognised;

/// NATS' own limit, until the server has told another.
pub(super) const USUAL_LIMIT: usize = 1 << 20;

/// What headers may need beside the largest payload.
pub(super) const HEADROOM: usize = 4 << 10;

/// What a promise rests on is looked at again after this long: somebody may have changed it.
const FRESH: Duration = Duration::from_secs(60);

/// A stream that we made says so, and into how many parts its topics are divided.
const MADE: &str = "Postrider, partitions=";

/// The subject of a topic's partition. A topic may begin or end with a dot, or have two in a row, which no subject may:
/// `~`, which no topic has, stands between them.
pub(super) fn subject(prefix: &str, topic: &str, partition: u32) -> String {
    let mut subject = String::with_capacity(prefix.len() + topic.len() + 6);
    subject.push_str(prefix);
    for word in topic.split('.') {
        subject.push('.');
        subject.push_str(if word.is_empty() { "~" } else { word });
    }
    subject.push('.');
    subject.push_str(&partition.to_string());
    subject
}

/// Whether a stream or subscription on `pattern` gets what is sent to `subject`.
pub(super) fn covers(pattern: &str, subject: &str) -> bool {
    let mut words = subject.split('.');
    for part in pattern.split('.') {
        match (part, words.next()) {
            (">", Some(_)) => return true,
            ("*", Some(_)) => {}
            (part, Some(word)) if part == word => {}
            _ => return false,
        }
    }
    words.next().is_none()
}

/// The stream that we make where there is none.
pub(super) fn ours(config: &Config) -> Stream {
    Stream {
        name: config.stream.clone(),
        description: Some(format!("{MADE}{}", config.partitions)),
        subjects: vec![format!("{}.>", config.prefix)],
        retention: RetentionPolicy::Limits,
        storage: StorageType::File,
        // If somebody limits its size one day, it must not throw away what nobody has read.
        discard: DiscardPolicy::New,
        max_age: config.retain,
        duplicate_window: config.window(),
        num_replicas: config.replicas,
        ..Stream::default()
    }
}

/// Why messages must not be given to a stream like this.
pub(super) fn unfit(stream: &Stream, config: &Config) -> Option<(String, &'static str)> {
    if stream.no_ack {
        return Some((
            "it confirms nothing (no_ack)".to_owned(),
            "set no_ack to false, or name another stream",
        ));
    }
    if stream.sealed {
        return Some(("it is sealed and takes nothing".to_owned(), "name another stream"));
    }
    if stream.mirror.is_some() {
        return Some(("it is a mirror and takes nothing".to_owned(), "name the stream that it mirrors"));
    }
    if stream.storage == StorageType::Memory && stream.num_replicas < 3 {
        return Some((
            "it is in memory: a restart of the server would lose what was confirmed".to_owned(),
            "make it again with file storage, or with three replicas",
        ));
    }
    let made = stream.description.as_deref().and_then(|text| text.strip_prefix(MADE))?;
    (made != config.partitions.to_string()).then(|| {
        let text = format!("it was made with {made} partitions, and partitions={} is set", config.partitions);
        (text, "set the number that it was made with: another would change the place of every key")
    })
}

/// Why a stream that recognises duplicates for `window` does not recognise all that may be sent again, and what to do.
pub(super) fn forgetful(window: Duration, horizon: Duration) -> Option<(String, &'static str)> {
    let fix = "raise duplicate_window, which costs memory, or count on the inbox, which recognises them all";
    unrecognised(Some(window), horizon).map(|text| (text, fix))
}

impl Inner {
    /// Whether the stream, whoever made it, recognises a message that is sent again within `horizon`.
    pub(super) async fn recognises(&self, horizon: Duration) -> Result<(), Trouble> {
        if let Some(known) = self.recall().filter(|known| known.at.elapsed() > FRESH) {
            self.forget_this(&known);
        }
        let known = self.ready().await?;
        let Some((text, fix)) = forgetful(known.window, horizon) else { return Ok(()) };
        // Whoever asks next looks whether it was mended.
        self.forget_this(&known);
        Err(Trouble::Refused(format!("the stream `{}` {text}: {fix}", self.config.stream)))
    }

    /// What is known of the stream; looked at, and made if need be, when nothing is.
    pub(super) async fn ready(&self) -> Result<Known, Trouble> {
        if let Some(known) = self.recall() {
            return Ok(known);
        }
        let _alone = self.looking.lock().await;
        if let Some(known) = self.recall() {
            return Ok(known);
        }
        let stream = self.find_or_make().await?.config;
        let name = &self.config.stream;
        if let Some((text, fix)) = unfit(&stream, &self.config) {
            return Err(Trouble::Refused(format!("the stream `{name}` cannot be used: {text}; {fix}")));
        }
        let context = self.link.connected(&self.config).await?;
        let server = context.client().max_payload();
        let own = usize::try_from(stream.max_message_size).ok().filter(|limit| *limit > 0);
        let limit = own.map_or(server, |own| own.min(server));
        Ok(self.remember(limit, stream.duplicate_window, stream.subjects))
    }

    /// The stream as it is now, if it is there. Changes nothing.
    pub(super) async fn look(&self) -> Result<Option<Info>, Trouble> {
        let context = self.link.connected(&self.config).await?;
        if !context.client().server_info().jetstream {
            return Err(Trouble::Refused(
                "JetStream is not enabled: start the server with --jetstream".to_owned(),
            ));
        }
        match context.get_stream(&self.config.stream).await {
            Ok(stream) => Ok(Some(stream.cached_info().clone())),
            Err(error) => unseen(&error).map_or(Ok(None), Err),
        }
    }

    async fn find_or_make(&self) -> Result<Info, Trouble> {
        if let Some(found) = self.look().await? {
            return Ok(found);
        }
        let name = &self.config.stream;
        if !self.config.create {
            return Err(Trouble::Refused(format!(
                "there is no stream `{name}`: make it, or allow it to be made with create=true"
            )));
        }
        let context = self.link.connected(&self.config).await?;
        match context.create_stream(ours(&self.config)).await {
            Ok(stream) => Ok(stream.cached_info().clone()),
            // Somebody else may have made it in the same moment, with other settings.
            Err(error) => self.look().await?.ok_or_else(|| uncreated(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_topic_has_subjects_of_its_own() {
        assert_eq!(subject("postrider", "orders", 3), "postrider.orders.3");
        assert_eq!(subject("a.b", "orders.eu", 0), "a.b.orders.eu.0");
        let topics = ["a", "a.", ".a", "a..b", "a.b", "a.1", "...", "a.-", "a._"];
        let mut subjects: Vec<_> = topics.iter().map(|topic| subject("p", topic, 1)).collect();
        for subject in &subjects {
            assert!(subject.split('.').all(|word| !word.is_empty()), "{subject}");
        }
        subjects.sort();
        subjects.dedup();
        assert_eq!(subjects.len(), topics.len());
    }

    #[test]
    fn a_pattern_covers_what_the_server_says_it_does() {
        let cases = [
            ("p.>", "p.orders.1", true),
            ("p.>", "p", false),
            ("p.orders.*", "p.orders.1", true),
            ("p.orders.*", "p.orders", false),
            ("p.orders.*", "p.orders.eu.1", false),
            ("p.orders.1", "p.orders.1", true),
            ("p.orders.1", "p.orders.2", false),
            ("*.orders.>", "p.orders.1", true),
        ];
        for (pattern, subject, expected) in cases {
            assert_eq!(covers(pattern, subject), expected, "{pattern} and {subject}");
        }
    }

    #[test]
    fn a_stream_that_would_lose_or_never_confirm_is_refused() {
        let config = Config::default();
        assert_eq!(unfit(&ours(&config), &config), None);
        let stream = || Stream { description: None, ..ours(&config) };
        assert_eq!(
            unfit(&stream(), &Config { partitions: 4, ..config.clone() }),
            None,
            "it says nothing of partitions"
        );
        let cases = [
            (Stream { no_ack: true, ..stream() }, "no_ack"),
            (Stream { sealed: true, ..stream() }, "sealed"),
            (Stream { storage: StorageType::Memory, ..stream() }, "memory"),
            (ours(&Config { partitions: 4, ..config.clone() }), "4 partitions"),
        ];
        for (stream, expected) in cases {
            let (text, _) = unfit(&stream, &config).expect(expected);
            assert!(text.contains(expected), "{text}");
        }
    }
}
