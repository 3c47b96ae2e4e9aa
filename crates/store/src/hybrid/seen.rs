//! What Redis has seen: ids with a digest of their content, for as long as the group keeps them.
//!
//! Nothing here can fail: a Redis that does not answer has seen nothing, and is left alone for a while so that
//! messages do not wait for it one after another.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use redis::{Script, ScriptInvocation};

use super::Config;
use crate::column::{digest, millis};
use crate::link::Link;
use crate::{Arrival, Error};

/// How long a Redis that did not answer is left alone.
const ALONE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Seen {
    link: Link,
    scope: String,
    keep: Duration,
    look: Script,
    note: Script,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Redis did not answer: it is not asked before then.
    away_until: Option<Instant>,
    duplicates: HashMap<String, Duplicates>,
}

/// Duplicates of a group that the store was not asked about.
#[derive(Debug, Default)]
struct Duplicates {
    /// By the last word of Redis; it does not fall when Redis is flushed.
    counted: u64,
    /// Those that Redis could not be told of yet.
    untold: u64,
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
            look: Script::new(include_str!("look.lua")),
            note: Script::new(include_str!("note.lua")),
            state: Mutex::default(),
        })
    }

    /// Which of `arrivals` the store has done before, as far as Redis knows.
    pub(super) async fn look(&self, group: &str, arrivals: &[Arrival]) -> Vec<bool> {
        let mut call = self.look.prepare_invoke();
        call.key(self.group_key(group)).arg(millis(self.keep));
        for arrival in arrivals {
            call.key(self.id_key(group, arrival)).arg(digest(arrival));
        }
        match self.ask::<(Vec<u8>, u64)>(&call).await {
            Some((seen, counted)) if seen.len() == arrivals.len() => {
                self.change(group, |known| known.counted = known.counted.max(counted));
                seen.into_iter().map(|seen| seen == 1).collect()
            }
            _ => vec![false; arrivals.len()],
        }
    }

    /// The store has done these, and `duplicates` were answered without it.
    pub(super) async fn note(&self, group: &str, done: impl Iterator<Item = &Arrival>, duplicates: usize) {
        let done: Vec<&Arrival> = done.collect();
        if done.is_empty() && duplicates == 0 {
            return;
        }
        // Taken out while they are told, so that nobody else tells them too.
        let untold = self.change(group, |known| std::mem::take(&mut known.untold)) + duplicates as u64;
        let mut call = self.note.prepare_invoke();
        call.key(self.group_key(group)).arg(millis(self.keep)).arg("").arg(untold);
        for arrival in done {
            call.key(self.id_key(group, arrival)).arg(digest(arrival));
        }
        match self.ask::<u64>(&call).await {
            Some(counted) => self.change(group, |known| known.counted = known.counted.max(counted)),
            None => self.change(group, |known| known.untold += untold),
        }
    }

    /// The group keeps its ids for this long from now on.
    pub(super) async fn keep(&self, group: &str, keep: Duration) {
        let mut call = self.note.prepare_invoke();
        call.key(self.group_key(group)).arg(millis(self.keep)).arg(millis(keep)).arg(0);
        let _: Option<u64> = self.ask(&call).await;
    }

    /// How many duplicates of the group were answered without the store.
    pub(super) async fn duplicates(&self, group: &str) -> u64 {
        self.look(group, &[]).await;
        self.change(group, |known| known.counted + known.untold)
    }

    fn change<T>(&self, group: &str, change: impl FnOnce(&mut Duplicates) -> T) -> T {
        change(self.state().duplicates.entry(group.to_owned()).or_default())
    }

    /// Asks Redis; nothing when it does not answer, or did not a moment ago.
    async fn ask<T: redis::FromRedisValue>(&self, call: &ScriptInvocation<'_>) -> Option<T> {
        if self.state().away_until.is_some_and(|until| until > Instant::now()) {
            return None;
        }
        let answer = self.link.invoke(call).await;
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

    /// The length keeps scope and group apart, whatever they are made of.
    fn group_key(&self, group: &str) -> String {
        format!("postrider:seen:group:{}:{}:{group}", self.scope.len(), self.scope)
    }

    fn id_key(&self, group: &str, arrival: &Arrival) -> String {
        format!("postrider:seen:id:{}:{}:{group}:{}", self.scope.len(), self.scope, arrival.message.id)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while it holds the state")
    }
}
