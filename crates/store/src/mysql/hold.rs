//! Keys whose later messages wait for an earlier one.
//!
//! A hold names the message that the others wait for. Followers are parked (`held`, not `ready`) when a claim
//! meets them, so that they cost nothing while they wait. When the message is sent or given up, they are let
//! go in order, a bounded number at a time; `released_to` is how far that has come, and whatever is newer goes
//! on being parked until all older ones are out.
//!
//! Of several messages of a key in trouble the earliest holds it; the others are parked like followers, and
//! each becomes the holder when its turn comes.
//!
//! The holds on the keys of a batch are read together, changed here in the order of the messages, and written together.
//! All of a key is on one lane, so whoever has locked the lane is alone with it.

use std::collections::{BTreeMap, BTreeSet};

use mysql_async::prelude::Queryable;
use mysql_async::{Row, Value};
use serde_json::json;

use super::error::Trouble;
use super::lane::Place;
use super::row::{Read, list};
use super::session::Tx;

/// Followers of one key let go in one step, and keys looked at.
const STEP: usize = 1_000;
const KEYS: usize = 64;

/// A topic and a key.
type Name = (String, String);

/// Who holds a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hold {
    slot: u16,
    seq: i64,
    released_to: i64,
    draining: bool,
}

/// The holds on some keys, as a transaction changes them.
#[derive(Debug, Default)]
pub(super) struct Holds {
    found: BTreeMap<Name, Hold>,
    changed: BTreeSet<Name>,
    /// Messages in trouble that wait behind another one from now on.
    waiting: BTreeSet<i64>,
    written: Written,
}

/// What became different.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    /// Followers may go.
    pub(super) lifted: bool,
    /// Followers must wait.
    pub(super) placed: bool,
}

impl Holds {
    /// Reads the holds on `names`.
    pub(super) async fn load<'a>(
        &mut self,
        tx: &mut Tx<'_>,
        names: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<(), Trouble> {
        let names: BTreeSet<(&str, &str)> = names.into_iter().collect();
        if names.is_empty() {
            return Ok(());
        }
        let names = json!(names.into_iter().collect::<Vec<_>>()).to_string();
        for mut row in tx.exec::<Row, _, _>(include_str!("hold/load.sql"), (names,)).await? {
            let name = (row.text(0)?, row.text(1)?);
            let hold = Hold {
                slot: row.small(2)?,
                seq: row.number(3)?,
                released_to: row.number(4)?,
                draining: row.flag(5)?,
            };
            self.found.insert(name, hold);
        }
        Ok(())
    }

    /// Whether the message `seq` of this key must wait.
    pub(super) fn blocks(&self, topic: &str, key: &str, seq: i64) -> bool {
        let hold = self.found.get(&(topic.to_owned(), key.to_owned()));
        hold.is_some_and(|hold| hold.seq < seq && hold.released_to < seq)
    }

    /// Makes the later messages of the key wait for `seq`, which is in trouble.
    pub(super) fn place(&mut self, topic: &str, key: &str, slot: u16, seq: i64) {
        let name = (topic.to_owned(), key.to_owned());
        let holder = self.found.get(&name).filter(|hold| !hold.draining).map(|hold| hold.seq);
        let waits = match holder {
            // Both are in trouble: the later one waits for the earlier one as any follower does.
            Some(holder) if holder != seq => Some(holder.max(seq)),
            _ => None,
        };
        self.waiting.extend(waits);
        if waits != Some(seq) {
            self.found.insert(name.clone(), Hold { slot, seq, released_to: 0, draining: false });
            self.changed.insert(name);
            self.written.placed = true;
        }
    }

    /// The message `seq` waits behind nobody any more.
    pub(super) fn stand(&mut self, seq: i64) {
        self.waiting.remove(&seq);
    }

    /// The message `seq` no longer holds its key, if it did: its followers may go.
    pub(super) fn lift(&mut self, topic: &str, key: Option<&str>, seq: i64) {
        let Some(key) = key else { return };
        let name = (topic.to_owned(), key.to_owned());
        if let Some(hold) = self.found.get_mut(&name).filter(|hold| hold.seq == seq && !hold.draining) {
            (hold.draining, hold.seq) = (true, 0);
            self.changed.insert(name);
            self.written.lifted = true;
        }
    }

    /// Writes what changed; after the messages themselves were written.
    pub(super) async fn write(self, tx: &mut Tx<'_>) -> Result<Written, Trouble> {
        if !self.waiting.is_empty() {
            held(tx, &self.waiting, true).await?;
        }
        upsert(tx, self.changed.iter().map(|name| (name, self.found[name]))).await?;
        Ok(self.written)
    }
}

async fn upsert(tx: &mut Tx<'_>, holds: impl Iterator<Item = (&Name, Hold)>) -> Result<(), Trouble> {
    let holds: Vec<_> = holds
        .map(|((topic, key), hold)| {
            json!([topic, key, hold.slot, hold.seq, hold.released_to, i32::from(hold.draining)])
        })
        .collect();
    if !holds.is_empty() {
        tx.exec_drop(include_str!("hold/write.sql"), (json!(holds).to_string(),)).await?;
    }
    Ok(())
}

/// Says of messages that they wait behind others, or no longer.
async fn held(tx: &mut Tx<'_>, seqs: impl IntoIterator<Item = &i64>, held: bool) -> Result<(), Trouble> {
    let sql = format!(
        "UPDATE outbox_events FORCE INDEX (PRIMARY) SET held = {} WHERE seq IN ({})",
        i32::from(held),
        list(seqs)
    );
    Ok(tx.query_drop(sql).await?)
}

/// Followers that a claim met.
pub(super) async fn park(tx: &mut Tx<'_>, seqs: &[i64]) -> Result<(), Trouble> {
    if seqs.is_empty() {
        return Ok(());
    }
    let sql = format!(
        "UPDATE outbox_events FORCE INDEX (PRIMARY) SET ready = 0, held = 1 WHERE seq IN ({})",
        list(seqs)
    );
    Ok(tx.query_drop(sql).await?)
}

/// Lets go some more followers of keys of `place` that are being drained. Answers whether any are left.
pub(super) async fn drain(tx: &mut Tx<'_>, place: &Place) -> Result<bool, Trouble> {
    let sql = format!(
        "SELECT topic, `key`, slot FROM outbox_holds FORCE INDEX (outbox_holds_draining)
         WHERE draining = 1 AND slot & {} IN ({}) LIMIT {KEYS}",
        place.mask(),
        list(place.lanes())
    );
    let mut keys: Vec<(Name, u16)> = Vec::new();
    for mut row in tx.query::<Row, _>(sql).await? {
        keys.push(((row.text(0)?, row.text(1)?), row.small(2)?));
    }
    if keys.is_empty() {
        return Ok(false);
    }
    let followers = followers(tx, &keys).await?;
    let mut step = Step::default();
    for ((name, slot), followers) in keys.iter().zip(&followers) {
        step.take(name, *slot, followers);
    }
    let left = keys.len() == KEYS || step.kept.values().any(|hold| hold.draining);
    step.write(tx).await?;
    Ok(left)
}

/// A message that waits, and whether it is in trouble itself.
type Follower = (i64, bool);

/// The first followers of each key, in order.
async fn followers(tx: &mut Tx<'_>, keys: &[(Name, u16)]) -> Result<Vec<Vec<Follower>>, Trouble> {
    let one = |number: usize| {
        format!(
            "(SELECT {number}, seq, status = 'dead' OR (ready = 0 AND next_attempt_at IS NOT NULL)
              FROM outbox_events FORCE INDEX (outbox_held)
              WHERE held_key = ? AND topic = ? ORDER BY seq LIMIT {STEP})"
        )
    };
    let sql = (0..keys.len()).map(one).collect::<Vec<_>>().join(" UNION ALL ");
    let values: Vec<Value> = keys
        .iter()
        .flat_map(|((topic, key), _)| -> [Value; 2] { [key.as_bytes().into(), topic.as_str().into()] })
        .collect();
    let mut followers = vec![Vec::new(); keys.len()];
    for mut row in tx.exec::<Row, _, _>(sql, values).await? {
        followers[row.small::<usize>(0)?].push((row.number(1)?, row.flag(2)?));
    }
    followers.iter_mut().for_each(|followers| followers.sort_unstable());
    Ok(followers)
}

/// One step of letting go.
#[derive(Debug, Default)]
struct Step {
    ready: Vec<i64>,
    /// Those in trouble that hold their key from now on.
    standing: Vec<i64>,
    kept: BTreeMap<Name, Hold>,
    done: Vec<Name>,
}

impl Step {
    fn take(&mut self, name: &Name, slot: u16, followers: &[Follower]) {
        for (seq, trouble) in followers {
            if *trouble {
                self.standing.push(*seq);
                self.kept.insert(name.clone(), Hold { slot, seq: *seq, released_to: 0, draining: false });
                return;
            }
            self.ready.push(*seq);
        }
        match followers.last() {
            Some((last, _)) if followers.len() == STEP => {
                let hold = Hold { slot, seq: 0, released_to: *last, draining: true };
                self.kept.insert(name.clone(), hold);
            }
            _ => self.done.push(name.clone()),
        }
    }

    async fn write(self, tx: &mut Tx<'_>) -> Result<(), Trouble> {
        if !self.ready.is_empty() {
            tx.query_drop(format!(
                "UPDATE outbox_events FORCE INDEX (PRIMARY) SET ready = 1, held = 0 WHERE seq IN ({})",
                list(self.ready)
            ))
            .await?;
        }
        if !self.standing.is_empty() {
            held(tx, &self.standing, false).await?;
        }
        upsert(tx, self.kept.iter().map(|(name, hold)| (name, *hold))).await?;
        if !self.done.is_empty() {
            tx.exec_drop(include_str!("hold/remove.sql"), (json!(self.done).to_string(),)).await?;
        }
        Ok(())
    }
}
