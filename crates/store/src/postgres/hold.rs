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
//! A key belongs to one lane, so the lane's lock covers its hold. A batch may touch many keys: what happens to them is
//! worked out in a [`Book`] and written in a few statements, however many they are.

use std::collections::{BTreeMap, BTreeSet};

use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::connection::Transaction;
use super::error::Trouble;
use super::row::{lane, small};

/// Followers of a key let go in one step.
const STEP: i64 = 1_000;

/// Keys that are drained in one step.
const KEYS: i64 = 64;

/// A topic and a key.
type Key = (String, String);

/// A row of `holds`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hold {
    seq: i64,
    draining: bool,
}

/// What a transaction makes of the holds it touches.
#[derive(Debug, Default)]
pub(super) struct Book {
    known: BTreeMap<Key, Option<Hold>>,
    changed: BTreeSet<Key>,
    /// Messages that wait behind another of their key from now on.
    waiting: BTreeSet<i64>,
}

impl Book {
    /// Notes what the table says of a message's key: the columns of a hold, or nulls, start at `column`.
    pub(super) fn note(
        &mut self,
        topic: &str,
        key: Option<&str>,
        row: &Row,
        column: usize,
    ) -> Result<(), Trouble> {
        let Some(key) = key else { return Ok(()) };
        let hold = match row.try_get::<_, Option<i64>>(column)? {
            Some(seq) => Some(Hold { seq, draining: row.try_get(column + 1)? }),
            None => None,
        };
        self.known.entry((topic.to_owned(), key.to_owned())).or_insert(hold);
        Ok(())
    }

    /// Makes the later messages of the key wait for `seq`, which is in trouble.
    pub(super) fn place(&mut self, topic: &str, key: &str, seq: i64) {
        let key = (topic.to_owned(), key.to_owned());
        let hold = self.known.entry(key.clone()).or_default();
        let holder = hold.filter(|hold| !hold.draining).map(|hold| hold.seq);
        if let Some(holder) = holder.filter(|holder| *holder != seq) {
            // Both are in trouble: the later one waits for the earlier one as any follower does.
            self.waiting.insert(holder.max(seq));
            if holder < seq {
                return;
            }
        }
        self.waiting.remove(&seq);
        *hold = Some(Hold { seq, draining: false });
        self.changed.insert(key);
    }

    /// The message `seq` no longer holds its key, if it did: its followers may go.
    pub(super) fn lift(&mut self, topic: &str, key: Option<&str>, seq: i64) {
        let Some(key) = key else { return };
        let key = (topic.to_owned(), key.to_owned());
        let hold = self.known.entry(key.clone()).or_default();
        if *hold == Some(Hold { seq, draining: false }) {
            *hold = Some(Hold { seq: 0, draining: true });
            self.changed.insert(key);
        }
    }

    /// Writes all that changed. Answers whether followers are to be let go.
    pub(super) async fn write(self, tx: &Transaction) -> Result<bool, Trouble> {
        if !self.waiting.is_empty() {
            let waiting: Vec<i64> = self.waiting.into_iter().collect();
            tx.execute(
                "UPDATE outbox_events SET held = true WHERE seq = ANY ($1)",
                &[(&waiting, Type::INT8_ARRAY)],
            )
            .await?;
        }
        let changed: Vec<(&Key, Hold)> =
            self.changed.iter().filter_map(|key| self.known[key].map(|hold| (key, hold))).collect();
        let holds = changed.iter().map(|(key, hold)| (*key, hold.seq, 0, hold.draining));
        upsert(tx, holds.collect()).await?;
        Ok(changed.iter().any(|(_, hold)| hold.draining))
    }
}

/// Writes holds: key, message, how far followers were let go, and whether they are being let go.
async fn upsert(tx: &Transaction, holds: Vec<(&Key, i64, i64, bool)>) -> Result<(), Trouble> {
    if holds.is_empty() {
        return Ok(());
    }
    let topics: Vec<&str> = holds.iter().map(|(key, ..)| key.0.as_str()).collect();
    let keys: Vec<&str> = holds.iter().map(|(key, ..)| key.1.as_str()).collect();
    let seqs: Vec<i64> = holds.iter().map(|hold| hold.1).collect();
    let released: Vec<i64> = holds.iter().map(|hold| hold.2).collect();
    let draining: Vec<bool> = holds.iter().map(|hold| hold.3).collect();
    tx.execute(
        "INSERT INTO outbox_holds (topic, key, seq, released_to, draining)
         SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::boolean[])
         ON CONFLICT (topic, key) DO UPDATE
         SET seq = excluded.seq, draining = excluded.draining,
             -- How far followers were let go stays known while they are.
             released_to = CASE WHEN excluded.draining THEN greatest(outbox_holds.released_to, excluded.released_to) ELSE 0 END",
        &[
            (&topics, Type::TEXT_ARRAY),
            (&keys, Type::TEXT_ARRAY),
            (&seqs, Type::INT8_ARRAY),
            (&released, Type::INT8_ARRAY),
            (&draining, Type::BOOL_ARRAY),
        ],
    )
    .await?;
    Ok(())
}

/// A message that is sendable again: its topic, slot and number.
pub(super) type Again = (String, u16, i64);

/// Lets go some more followers of keys that are being drained, on these lanes. Answers which, and whether any are left.
pub(super) async fn drain(tx: &Transaction, mask: u16, lanes: &[i16]) -> Result<(Vec<Again>, bool), Trouble> {
    let rows = tx
        .query(
            include_str!("drain.sql"),
            &[
                (&small(mask), Type::INT2),
                (&lanes, Type::INT2_ARRAY),
                (&KEYS, Type::INT8),
                (&STEP, Type::INT8),
            ],
        )
        .await?;
    let mut keys: BTreeMap<Key, Vec<(i64, bool)>> = BTreeMap::new();
    for row in &rows {
        let followers = keys.entry((row.try_get(0)?, row.try_get(1)?)).or_default();
        if let Some(seq) = row.try_get(2)? {
            followers.push((seq, row.try_get(3)?));
        }
    }
    let mut free = Vec::new();
    let mut troubled = Vec::new();
    let mut holds = Vec::new();
    let mut over: Vec<&Key> = Vec::new();
    let mut left = keys.len() == usize::try_from(KEYS).unwrap_or(0);
    for (key, followers) in &keys {
        let trouble = followers.iter().position(|(_, trouble)| *trouble);
        free.extend(followers[..trouble.unwrap_or(followers.len())].iter().map(|(seq, _)| *seq));
        match (trouble, followers.last()) {
            (Some(place), _) => {
                troubled.push(followers[place].0);
                holds.push((key, followers[place].0, 0, false));
            }
            (None, Some((last, _))) if followers.len() == usize::try_from(STEP).unwrap_or(0) => {
                left = true;
                holds.push((key, 0, *last, true));
            }
            (None, _) => over.push(key),
        }
    }
    if !troubled.is_empty() {
        tx.execute(
            "UPDATE outbox_events SET held = false WHERE seq = ANY ($1)",
            &[(&troubled, Type::INT8_ARRAY)],
        )
        .await?;
    }
    upsert(tx, holds).await?;
    remove(tx, &over).await?;
    Ok((release(tx, &free).await?, left))
}

/// Followers that may go.
async fn release(tx: &Transaction, seqs: &[i64]) -> Result<Vec<Again>, Trouble> {
    if seqs.is_empty() {
        return Ok(Vec::new());
    }
    let rows = tx
        .query(
            "UPDATE outbox_events SET ready = true, held = false WHERE seq = ANY ($1) RETURNING topic, slot, seq",
            &[(&seqs, Type::INT8_ARRAY)],
        )
        .await?;
    again(&rows)
}

/// Reads messages that are sendable again.
pub(super) fn again(rows: &[Row]) -> Result<Vec<Again>, Trouble> {
    rows.iter().map(|row| Ok((row.try_get(0)?, lane(row, 1)?, row.try_get(2)?))).collect()
}

async fn remove(tx: &Transaction, keys: &[&Key]) -> Result<(), Trouble> {
    if keys.is_empty() {
        return Ok(());
    }
    let (topics, keys): (Vec<&str>, Vec<&str>) =
        keys.iter().map(|key| (key.0.as_str(), key.1.as_str())).unzip();
    tx.execute(
        "DELETE FROM outbox_holds WHERE (topic, key) IN (SELECT * FROM unnest($1::text[], $2::text[]))",
        &[(&topics, Type::TEXT_ARRAY), (&keys, Type::TEXT_ARRAY)],
    )
    .await?;
    Ok(())
}

/// Followers that a claim met.
pub(super) async fn park(tx: &Transaction, seqs: &[i64]) -> Result<(), Trouble> {
    if !seqs.is_empty() {
        tx.execute(
            "UPDATE outbox_events SET ready = false, held = true WHERE seq = ANY ($1)",
            &[(&seqs, Type::INT8_ARRAY)],
        )
        .await?;
    }
    Ok(())
}
