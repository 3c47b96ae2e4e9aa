//! Appending to streams: one script for all messages of a call, or one after another where that would be too much at once.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use message::{Invalid, check_topic};
use redis::Value;
use tokio::time::Instant;

use super::entry::{Texts, list, number, text};
use super::error::{Error, outcome as failed};
use super::script::{Call, Replicas, script};
use super::{Broker, Inner};
use crate::partition::partition;
use crate::{Guarantees, Outcome, Outgoing, Publisher};

script!(APPEND: "append.lua");
script!(TOPICS: "topics.lua");

/// Messages in one call at most.
const MAX_BATCH: usize = 1_000;

/// Messages and bytes in one script at most: Redis does nothing else while it runs.
const MAX_MESSAGES: usize = 500;
const MAX_BYTES: usize = 4 << 20;

/// Names in one entry at most: Lua passes on no more than some thousands of texts at once.
const MAX_NAMES: usize = 1_000;

/// How long to wait for replicas, at most.
const REPLICATION: Duration = Duration::from_secs(2);

#[async_trait]
impl Publisher for Broker {
    fn guarantees(&self) -> Guarantees {
        let config = &self.inner.config;
        Guarantees {
            key_order: true,
            ordered_batches: true,
            groups: true,
            fenced: true,
            max_payload: Some(config.max_payload),
            max_batch: MAX_BATCH,
            deduplication: Some(config.deduplication),
            durability: match config.replicas {
                0 => {
                    "survives a crash of Redis as far as its append-only file was flushed (appendfsync); a failover \
                     loses what the replica had not received"
                }
                _ => {
                    "is on replicas when it is confirmed, and on each server's disk as soon as appendfsync says; a \
                     failover to a replica that was behind can still lose it"
                }
            },
            needs: &[
                "appendonly yes; appendfsync always where not even the last second may be lost",
                "maxmemory-policy noeviction",
                "nobody who trims the streams but Postrider",
            ],
        }
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let end = Instant::now() + self.inner.config.timeout;
        let mut results = Results::new(&batch);
        let mut ready: Vec<Ready<'_>> = Vec::with_capacity(batch.len());
        for (number, outgoing) in batch.iter().enumerate() {
            match self.inner.prepare(number, outgoing) {
                _ if results.holds(number) => {}
                Ok(one) => ready.push(one),
                Err(error) => results.fail(number, Outcome::Rejected { error }),
            }
        }
        let mut rest = &ready[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at(portion(rest));
            self.inner.append(now, &mut results, end).await;
            rest = later;
        }
        results.all()
    }
}

/// A message that can be stored.
struct Ready<'a> {
    /// Its place in the batch.
    number: usize,
    outgoing: &'a Outgoing,
    texts: Texts<'a>,
}

impl Ready<'_> {
    fn topic(&self) -> &str {
        &self.outgoing.message.topic
    }

    /// What it is recognised by.
    fn mark(&self) -> [u8; 20] {
        let mut mark = [0; 20];
        mark[..16].copy_from_slice(self.outgoing.message.id.0.as_bytes());
        mark[16..].copy_from_slice(&self.outgoing.delivery.to_be_bytes());
        mark
    }
}

/// How many of them one script takes.
fn portion(ready: &[Ready<'_>]) -> usize {
    let mut bytes = 0;
    let fits = ready.iter().take(MAX_MESSAGES).take_while(|one| {
        bytes += one.texts.size();
        bytes <= MAX_BYTES
    });
    fits.count().max(1)
}

/// What became of the messages of a call, and which keys must wait.
struct Results<'a> {
    batch: &'a [Outgoing],
    outcomes: Vec<Option<Outcome>>,
    /// Where each of these stopped: what comes after that must not be stored.
    stopped: HashMap<(&'a str, &'a str), usize>,
}

impl<'a> Results<'a> {
    fn new(batch: &'a [Outgoing]) -> Self {
        Self { batch, outcomes: vec![None; batch.len()], stopped: HashMap::new() }
    }

    fn key(&self, number: usize) -> Option<(&'a str, &'a str)> {
        let message = &self.batch[number].message;
        message.key.as_deref().map(|key| (message.topic.as_str(), key))
    }

    /// Holds a message whose key has stopped; `false` when it may go.
    fn holds(&mut self, number: usize) -> bool {
        let held =
            self.key(number).is_some_and(|key| self.stopped.get(&key).is_some_and(|stop| *stop < number));
        if held {
            self.outcomes[number] = Some(Outcome::Held);
        }
        held
    }

    /// This one failed, and its key stops. Others of its key that had their turn in the same script are held too, unless
    /// nobody knows whether it stored them.
    fn fail(&mut self, number: usize, outcome: Outcome) {
        let uncertain = matches!(outcome, Outcome::Unconfirmed { .. });
        if !uncertain && self.holds(number) {
            return;
        }
        if let Some(key) = self.key(number) {
            let stop = self.stopped.entry(key).or_insert(number);
            *stop = number.min(*stop);
        }
        self.outcomes[number] = Some(outcome);
    }

    fn confirm(&mut self, number: usize) {
        self.outcomes[number] = Some(Outcome::Confirmed);
    }

    fn all(self) -> Vec<Outcome> {
        let outcomes = self.outcomes.into_iter();
        outcomes.map(|outcome| outcome.expect("every message was refused, held or sent")).collect()
    }
}

impl Inner {
    /// Whatever a message can be guilty of is found here.
    fn prepare<'a>(&self, number: usize, outgoing: &'a Outgoing) -> Result<Ready<'a>, String> {
        let message = &outgoing.message;
        check_topic(&message.topic).map_err(|invalid| invalid.to_string())?;
        let (size, limit) = (message.payload.len(), self.config.max_payload);
        if size > limit {
            return Err(Invalid::PayloadTooLarge { size, limit }.to_string());
        }
        let texts = Texts::of(outgoing);
        if texts.count() > MAX_NAMES {
            let headers = message.headers.len();
            return Err(format!("{headers} headers are more than Redis Streams can take: {MAX_NAMES}"));
        }
        Ok(Ready { number, outgoing, texts })
    }

    /// Stores what one script can take, unless their keys have stopped meanwhile.
    async fn append(&self, ready: &[Ready<'_>], results: &mut Results<'_>, end: Instant) {
        let mut ready: Vec<&Ready<'_>> = ready.iter().filter(|one| !results.holds(one.number)).collect();
        // Again where topics turn out to be other than they were.
        for _ in 0..3 {
            let topics = match self.partitions(&ready, end).await {
                Ok(topics) => topics,
                Err(error) => return self.blame(&ready, &error, results),
            };
            ready.retain(|one| {
                let there = topics.contains_key(one.topic());
                if !there {
                    results.fail(one.number, self.missing(one.topic()));
                }
                there
            });
            if ready.is_empty() {
                return;
            }
            let sorted = by_topic(&ready);
            match self.run(&sorted, &topics, end).await {
                Ok(Appended::Moved) => self.forget_topics(topics.keys()),
                Ok(Appended::Done(errors)) => {
                    for (place, one) in sorted.values().flatten().enumerate() {
                        match errors.get(&place) {
                            None => results.confirm(one.number),
                            Some(error) => results.fail(one.number, failed(error, &self.config.place())),
                        }
                    }
                    return;
                }
                Err(error) => return self.blame(&ready, &error, results),
            }
        }
        let error = Error::Away("the number of partitions changes again and again".to_owned());
        self.blame(&ready, &error, results);
    }

    fn blame(&self, ready: &[&Ready<'_>], error: &Error, results: &mut Results<'_>) {
        for one in ready {
            results.fail(one.number, failed(error, &self.config.place()));
        }
    }

    async fn run(
        &self,
        sorted: &BTreeMap<&str, Vec<&Ready<'_>>>,
        topics: &HashMap<String, u32>,
        end: Instant,
    ) -> Result<Appended, Error> {
        let mut call = Call::new(&APPEND, &self.tag);
        call.arg(u64::try_from(self.config.deduplication.as_millis()).unwrap_or(u64::MAX)).arg(sorted.len());
        for (topic, ready) in sorted {
            call.arg(*topic).arg(topics[*topic]).arg(ready.len());
        }
        let (forms, by_message) = forms(sorted.values().flatten().copied());
        call.arg(forms.len());
        for form in &forms {
            call.arg(form.texts.count());
            for name in form.texts.names() {
                call.arg(name);
            }
        }
        for one in sorted.values().flatten() {
            call.arg(&one.mark()[..]);
        }
        let mut by_message = by_message.into_iter();
        for (topic, ready) in sorted {
            for (one, form) in ready.iter().zip(&mut by_message) {
                // Lua counts from one.
                call.arg(partition(&one.outgoing.message, topics[*topic])).arg(form + 1);
                for value in one.texts.values() {
                    call.arg(value);
                }
            }
        }
        let wanted = self.config.replicas;
        let left = end.saturating_duration_since(Instant::now());
        let replicas = (wanted > 0).then(|| Replicas { wanted, patience: REPLICATION.min(left / 2) });
        let (answer, reached) = self.publisher.invoke_by(&call, replicas, end).await?;
        let appended = Appended::from_value(answer)
            .ok_or_else(|| Error::Unanswered("its answer makes no sense".to_owned()))?;
        if reached < wanted && matches!(appended, Appended::Done(_)) {
            return Err(Error::Unanswered(format!(
                "it is stored, but only {reached} of {wanted} replicas had it in time"
            )));
        }
        Ok(appended)
    }

    /// How many partitions the topics of these messages have; those that are missing are not in it.
    async fn partitions(&self, ready: &[&Ready<'_>], end: Instant) -> Result<HashMap<String, u32>, Error> {
        let names: HashSet<&str> = ready.iter().map(|one| one.topic()).collect();
        let mut topics: HashMap<String, u32> = {
            let known = self.topics.read().expect("nobody panics while holding the map");
            names.iter().filter_map(|name| Some(((*name).to_owned(), *known.get(*name)?))).collect()
        };
        let unknown: Vec<&str> = names.into_iter().filter(|name| !topics.contains_key(*name)).collect();
        if unknown.is_empty() {
            return Ok(topics);
        }
        let mut call = Call::new(&TOPICS, &self.tag);
        call.arg(u8::from(self.config.create)).arg(self.config.partitions);
        call.arg(&unknown);
        let (answer, _) = self.publisher.invoke_by(&call, None, end).await.map_err(|error| match error {
            // No message was sent yet.
            Error::Unanswered(text) => Error::Away(text),
            other => other,
        })?;
        let numbers = list(answer).unwrap_or_default();
        let learned: Vec<_> = unknown
            .into_iter()
            .zip(&numbers)
            .filter_map(|(name, value)| Some((name.to_owned(), u32::try_from(number(value)?).ok()?)))
            .filter(|(_, partitions)| *partitions > 0)
            .collect();
        self.topics.write().expect("nobody panics while holding the map").extend(learned.iter().cloned());
        topics.extend(learned);
        Ok(topics)
    }

    fn missing(&self, topic: &str) -> Outcome {
        let (tag, partitions) = (&self.tag, self.config.partitions);
        let error = format!(
            "the topic `{topic}` is not there and is not to be made: make it with \
             `redis-cli HSET '{tag}:topics' {topic} {partitions}`, or allow it with `create=true`"
        );
        Outcome::Misconfigured { error }
    }

    fn forget_topics<'a>(&self, names: impl Iterator<Item = &'a String>) {
        let mut known = self.topics.write().expect("nobody panics while holding the map");
        for name in names {
            known.remove(name);
        }
    }
}

/// In the order given within each topic: between topics there is none.
fn by_topic<'r, 'a>(ready: &[&'r Ready<'a>]) -> BTreeMap<&'r str, Vec<&'r Ready<'a>>> {
    let mut sorted: BTreeMap<&str, Vec<&Ready<'_>>> = BTreeMap::new();
    for one in ready {
        sorted.entry(one.topic()).or_default().push(one);
    }
    sorted
}

/// The forms that messages have, by one of each, and the form of every message. Those of one form have the same names in
/// their entries, and nearly all of a topic are of one form: so the names need not go to Redis with each of them.
fn forms<'r, 'a>(messages: impl Iterator<Item = &'r Ready<'a>>) -> (Vec<&'r Ready<'a>>, Vec<usize>) {
    let mut forms: Vec<&Ready<'_>> = Vec::new();
    let by_message = messages.map(|one| {
        let same = |form: &&Ready<'_>| form.texts.names().eq(one.texts.names());
        forms.iter().position(same).unwrap_or_else(|| {
            forms.push(one);
            forms.len() - 1
        })
    });
    let by_message = by_message.collect();
    (forms, by_message)
}

/// What the script answers.
enum Appended {
    /// A topic has another number of partitions than it had: nothing was stored.
    Moved,
    /// All are stored but these.
    Done(HashMap<usize, Error>),
}

impl Appended {
    fn from_value(value: Value) -> Option<Self> {
        let mut words = list(value)?.into_iter();
        match text(words.next()?)?.as_str() {
            "moved" => Some(Self::Moved),
            "done" => {
                let mut errors = HashMap::new();
                while let (Some(place), Some(error)) = (words.next(), words.next()) {
                    // Lua counts from one.
                    let place = usize::try_from(number(&place)?).ok()?.checked_sub(1)?;
                    errors.insert(place, Error::caught(&text(error)?));
                }
                Some(Self::Done(errors))
            }
            _ => None,
        }
    }
}
