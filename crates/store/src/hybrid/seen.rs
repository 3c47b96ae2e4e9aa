//! What Redis has seen: ids with a digest of their content, for as long as the group keeps them.
//!
//! They are in hashes, each for a slice of time: a batch is one command, and a slice whose time is over goes as a whole. To
//! ask is a command for each slice, so there are few.
//!
//! Nothing here can fail: a Redis that does not answer has seen nothing, and is left alone for a while so that
//! messages do not wait for it one after another.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use message::MessageId;
use redis::{Pipeline, Value};
use tokio::task::JoinHandle;

use super::Config;
use crate::column::{digest_of, millis};
use crate::link::Link;
use crate::{Arrival, Error};

/// How long a Redis that did not answer is left alone.
const ALONE: Duration = Duration::from_secs(5);

/// After so many batches in a row without a duplicate Redis is asked about one in [`NOW_AND_THEN`] only: it would spare the
/// store nothing.
const IN_VAIN: u32 = 4;
const NOW_AND_THEN: u32 = 16;

/// Notes that may be on their way while the next batch begins, unless it asks.
const NOTING: usize = 8;

/// The time for which ids are kept is so many slices, and a part of one more.
const SLICES: i64 = 4;

/// Slices that are over are removed by whoever forgets ids, so many of the last; what it misses ends by itself.
const OVER: i64 = 8;

#[derive(Debug)]
pub(super) struct Seen {
    link: Link,
    scope: String,
    keep: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Redis did not answer: it is not asked before then.
    away_until: Option<Instant>,
    groups: HashMap<String, Known>,
    /// Notes on their way.
    noting: Vec<JoinHandle<()>>,
}

/// What is known of a group.
#[derive(Debug, Default)]
struct Known {
    /// Duplicates that the store was not asked about, by the last word of Redis; it does not fall when Redis is flushed.
    counted: u64,
    /// Those that Redis could not be told of yet.
    untold: u64,
    /// What Redis said last.
    said: Option<Said>,
    /// Batches since the last one with a duplicate in it.
    in_vain: u32,
}

impl Known {
    /// Whether Redis is asked about the batch that has come.
    fn is_worth_a_look(&mut self) -> bool {
        self.in_vain = self.in_vain.saturating_add(1);
        self.in_vain <= IN_VAIN || self.in_vain.is_multiple_of(NOW_AND_THEN)
    }
}

/// The time of Redis and how long the group keeps ids, both in milliseconds, when it answered last.
#[derive(Clone, Copy, Debug)]
struct Said {
    answered: Instant,
    now: i64,
    keep: i64,
}

impl Said {
    /// The time of Redis at a moment. A process that was stopped in between is behind: what it notes ends sooner.
    fn at(self, moment: Instant) -> i64 {
        self.now + millis(moment.saturating_duration_since(self.answered))
    }

    /// How long a slice is.
    fn width(self) -> i64 {
        (self.keep / SLICES).max(1)
    }

    /// The slice of a time.
    fn slice(self, time: i64) -> i64 {
        time.div_euclid(self.width())
    }

    /// The first slice of which anything is kept.
    fn first(self, now: i64) -> i64 {
        self.slice(now.saturating_sub(self.keep))
    }

    /// When a slice goes by itself: one after all of it is over. Whoever is still there removes it before, and that does not
    /// hold Redis up.
    fn end(self, slice: i64) -> i64 {
        (slice + 2).saturating_mul(self.width()).saturating_add(self.keep)
    }
}

/// A message as Redis knows it.
pub(super) struct Print {
    id: MessageId,
    topic: String,
    payload: Bytes,
    /// Made when it is needed first: usually while the store is at the next batch.
    digest: OnceLock<Vec<u8>>,
}

impl Print {
    pub(super) fn of(arrival: &Arrival) -> Self {
        let message = &arrival.message;
        let (topic, payload) = (message.topic.clone(), message.payload.clone());
        Self { id: message.id, topic, payload, digest: OnceLock::new() }
    }

    fn digest(&self) -> &[u8] {
        self.digest.get_or_init(|| digest_of(&self.topic, &self.payload))
    }

    /// What is kept of it, at a time in digits.
    fn value(&self, at: &str) -> Vec<u8> {
        [self.digest(), at.as_bytes()].concat()
    }

    /// Whether `known` was kept of the same content, no longer ago than ids are kept.
    fn is_in(&self, known: &[u8], said: Said) -> bool {
        let at = known.strip_prefix(self.digest()).and_then(|at| str::from_utf8(at).ok()?.parse().ok());
        at.is_some_and(|at: i64| said.now - at < said.keep)
    }
}

impl Seen {
    pub(super) fn new(config: &Config) -> Result<Self, Error> {
        if config.scope.is_empty() {
            let problem = "a hybrid inbox needs a scope that names its store: ids of another store in the same Redis \
                           would be taken for its own";
            return Err(Error::Refused(problem.to_owned()));
        }
        Ok(Self {
            link: Link::new(&config.url, config.patience)?,
            scope: config.scope.clone(),
            keep: config.keep,
            state: Mutex::default(),
        })
    }

    /// Which of these the store has done before, as far as Redis knows. What was noted here before is known. Nothing if Redis
    /// is not worth asking, or does not answer.
    pub(super) async fn look(&self, group: &str, prints: &[Print]) -> Option<Vec<bool>> {
        let worth_a_look = self.change(group, Known::is_worth_a_look);
        if worth_a_look || self.state().noting.len() > NOTING {
            self.settle_notes().await;
        }
        if !worth_a_look || prints.is_empty() {
            return None;
        }
        // Where to look depends on the time of Redis.
        let before = match self.change(group, |group| group.said) {
            Some(said) => said,
            None => self.hear(group, redis::pipe()).await?.0,
        };
        let mut call = redis::pipe();
        let now = before.at(Instant::now());
        for slice in before.first(now)..=before.slice(now) {
            call.cmd("HMGET").arg(self.slice_key(group, before, slice));
            for print in prints {
                call.arg(print.id.0.as_bytes());
            }
        }
        let (said, answers) = self.hear(group, call).await?;
        let mut known = vec![false; prints.len()];
        for answer in answers {
            let found: Vec<Option<Vec<u8>>> = redis::from_redis_value(answer).unwrap_or_default();
            for ((known, print), found) in known.iter_mut().zip(prints).zip(found) {
                *known |= found.is_some_and(|found| print.is_in(&found, said));
            }
        }
        Some(known)
    }

    /// Asks what `call` asks, and what Redis says of the group and the time; after the ids: what the group said of them since
    /// then counts.
    async fn hear(&self, group: &str, mut call: Pipeline) -> Option<(Said, Vec<Value>)> {
        call.cmd("HMGET").arg(self.group_key(group)).arg("keep").arg("duplicates").cmd("TIME");
        let mut answers = self.ask::<Vec<Value>>(&call).await?;
        // Not sooner: what is noted must not be younger than it is.
        let answered = Instant::now();
        let (seconds, micros): (i64, i64) = redis::from_redis_value(answers.pop()?).ok()?;
        let (keep, counted): (Option<i64>, Option<u64>) = redis::from_redis_value(answers.pop()?).ok()?;
        let now = seconds * 1_000 + micros / 1_000;
        let said = Said { answered, now, keep: keep.unwrap_or_else(|| millis(self.keep)) };
        self.change(group, |group| {
            group.counted = group.counted.max(counted.unwrap_or(0));
            group.said = Some(said);
        });
        Some((said, answers))
    }

    /// The store has done these, and `duplicates` were answered without it. Nobody waits until Redis knows.
    pub(super) fn note(self: &Arc<Self>, group: &str, done: Vec<Print>, duplicates: usize) {
        // Untold ones are taken out while they are told, so that nobody else tells them too.
        let (said, untold) = self.change(group, |group| (group.said, std::mem::take(&mut group.untold)));
        let untold = untold + duplicates as u64;
        if done.is_empty() && untold == 0 {
            return;
        }
        let (seen, group) = (Arc::clone(self), group.to_owned());
        let noting = tokio::spawn(async move {
            match seen.ask::<(u64,)>(&seen.notes(&group, &done, said, untold)).await {
                Some((counted,)) => seen.change(&group, |group| group.counted = group.counted.max(counted)),
                None => seen.change(&group, |group| group.untold += untold),
            }
        });
        let mut state = self.state();
        state.noting.retain(|noting| !noting.is_finished());
        state.noting.push(noting);
    }

    /// The commands that tell Redis, all or none: a slice must not be left without its end.
    fn notes(&self, group: &str, done: &[Print], said: Option<Said>, untold: u64) -> Pipeline {
        let mut call = redis::pipe();
        call.atomic();
        // Whoever was never told the time cannot say when.
        if let Some(said) = said.filter(|said| said.keep > 0 && !done.is_empty()) {
            let now = said.at(Instant::now());
            let slice = said.slice(now);
            let (key, at) = (self.slice_key(group, said, slice), now.to_string());
            call.cmd("HSET").arg(&key);
            for print in done {
                call.arg(print.id.0.as_bytes()).arg(print.value(&at));
            }
            call.ignore();
            call.cmd("PEXPIREAT").arg(key).arg(said.end(slice)).ignore();
        }
        call.cmd("HINCRBY").arg(self.group_key(group)).arg("duplicates").arg(untold);
        call
    }

    /// A message came again, whoever recognised it.
    pub(super) fn met_a_duplicate(&self, group: &str) {
        self.change(group, |group| group.in_vain = 0);
    }

    /// The group keeps its ids for this long from now on.
    pub(super) async fn keep(&self, group: &str, keep: Duration) {
        let mut call = redis::pipe();
        call.cmd("HSET").arg(self.group_key(group)).arg("keep").arg(millis(keep)).ignore();
        if let Some(said) = self.change(group, |group| group.said) {
            let first = said.first(said.at(Instant::now()));
            call.cmd("UNLINK");
            for slice in first.saturating_sub(OVER)..first {
                call.arg(self.slice_key(group, said, slice));
            }
            call.ignore();
        }
        let _: Option<()> = self.ask(&call).await;
        // What is noted before Redis is asked again must be where others look.
        self.change(group, |group| {
            if let Some(said) = &mut group.said {
                said.keep = millis(keep);
            }
        });
    }

    /// How many duplicates of the group were answered without the store.
    pub(super) async fn duplicates(&self, group: &str) -> u64 {
        self.settle_notes().await;
        self.hear(group, redis::pipe()).await;
        self.change(group, |group| group.counted + group.untold)
    }

    /// Waits until Redis knows what was noted here.
    async fn settle_notes(&self) {
        let noting = std::mem::take(&mut self.state().noting);
        for noted in noting {
            let _ = noted.await;
        }
    }

    fn change<T>(&self, group: &str, change: impl FnOnce(&mut Known) -> T) -> T {
        change(self.state().groups.entry(group.to_owned()).or_default())
    }

    /// Asks Redis; nothing when it does not answer, or did not a moment ago.
    async fn ask<T: redis::FromRedisValue>(&self, call: &Pipeline) -> Option<T> {
        if self.state().away_until.is_some_and(|until| until > Instant::now()) {
            return None;
        }
        let answer = self.link.ask(call).await;
        let mut state = self.state();
        match answer {
            Ok(answer) => {
                if state.away_until.take().is_some() {
                    tracing::info!("Redis answers again: it is asked for what was seen");
                }
                Some(answer)
            }
            Err(error) => {
                if state.away_until.is_none() {
                    tracing::warn!(%error, "Redis does not say what was seen: the store alone recognises duplicates");
                }
                state.away_until = Some(Instant::now() + ALONE);
                None
            }
        }
    }

    /// Where a slice of a group's ids is. The length keeps scope and group apart, whatever they are made of.
    fn slice_key(&self, group: &str, said: Said, slice: i64) -> String {
        let (scope, width) = (&self.scope, said.width());
        format!("postrider:seen:ids:{}:{scope}:{group}:{width}:{slice}", scope.len())
    }

    fn group_key(&self, group: &str) -> String {
        format!("postrider:seen:group:{}:{}:{group}", self.scope.len(), self.scope)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while it holds the state")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_in_a_slice_that_is_looked_at_until_its_time_is_over() {
        let now = 1_794_954_321_123;
        for keep in [1, 3, 4, 7, 400, 7 * 24 * 3_600_000, now, now * 9, i64::MAX / 4] {
            let said = Said { answered: Instant::now(), now, keep };
            let (first, last) = (said.first(now), said.slice(now));
            assert!(last - first < SLICES + 4, "{keep}: {first} to {last}");
            for age in [0, 1, keep / 4, keep / 2, keep - 1] {
                let slice = said.slice(now.saturating_sub(age));
                assert!((first..=last).contains(&slice), "{keep}: {slice} is not within {first} to {last}");
                assert!(
                    said.end(slice) > now.saturating_sub(age).saturating_add(keep),
                    "{keep}: it ends too soon"
                );
            }
            let over = said.slice(now.saturating_sub(keep).saturating_sub(said.width()));
            assert!(over < first, "{keep}: what is over is not looked at");
        }
    }
}
