//! Recording that groups are done with messages.
//!
//! It takes no lane's lock: a consumer's transaction must not hold up a relay. An acknowledgement may so come before the
//! settlement of its message, or at the same time; whoever reads who has not acknowledged looks at both tables.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use message::{Event, MessageId, State, Status, step};
use mysql_async::prelude::Queryable;
use mysql_async::{Row, Value};
use serde_json::json;

use super::error::Trouble;
use super::inspect::in_flight;
use super::row::{Read, at, list};
use super::session::Tx;
use super::{MysqlStore, settle};
use crate::column::between;
use crate::tally::{Tally, Wait};
use crate::{Acknowledged, Error, Sent};

/// What is known of a message that somebody acknowledges.
#[derive(Clone, Debug)]
struct Found {
    seq: i64,
    sent_at: Option<i64>,
    groups: Option<Vec<String>>,
    state: State,
}

/// Records that groups are done with messages, in one transaction. One answer each, in order.
pub(super) async fn acknowledge(
    store: &MysqlStore,
    tx: &mut Tx<'_>,
    done: &[(MessageId, String)],
    now: i64,
    tally: &mut Tally,
) -> Result<Vec<Acknowledged>, Trouble> {
    let ids: BTreeSet<MessageId> = done.iter().map(|(id, _)| *id).collect();
    let mut found = find(tx, &ids).await?;
    if found.values().any(|found| found.state.status != Status::Sent) {
        fly(tx, &mut found).await?;
    }
    let seqs: Vec<i64> = found.values().map(|found| found.seq).collect();
    let mut known = acknowledged(tx, &seqs).await?;
    let mut new: BTreeSet<(i64, &str)> = BTreeSet::new();
    let mut answers = Vec::with_capacity(done.len());
    for (id, group) in done {
        let Some(found) = found.get(id) else {
            answers.push(Acknowledged::Unknown);
            continue;
        };
        answers.push(if found.groups.as_ref().is_some_and(|groups| !groups.contains(group)) {
            Acknowledged::NotAsked
        } else if step(found.state, Event::Acknowledged).is_err() {
            Acknowledged::Refused(found.state.status)
        } else if known.insert((found.seq, group.clone())) {
            new.insert((found.seq, group));
            Acknowledged::New
        } else {
            Acknowledged::Repeated
        });
    }
    if new.is_empty() {
        return Ok(answers);
    }
    write(tx, &new, now).await?;
    let by_seq: HashMap<i64, &Found> = found.values().map(|found| (found.seq, found)).collect();
    for (seq, _) in &new {
        tally.acknowledged();
        let sent_at = by_seq.get(seq).and_then(|found| found.sent_at);
        let waited = sent_at.map_or(Duration::ZERO, |sent_at| between(sent_at, now));
        tally.waited(Wait::SentToAcknowledged, waited);
    }
    if store.sent == Sent::Delete {
        let sent = found.values().filter(|found| found.state.status == Status::Sent);
        finish(store, tx, sent, &known, tally).await?;
    }
    Ok(answers)
}

async fn find(tx: &mut Tx<'_>, ids: &BTreeSet<MessageId>) -> Result<HashMap<MessageId, Found>, Trouble> {
    let places = vec!["?"; ids.len().max(1)].join(", ");
    let sql = format!(
        "SELECT id, seq, sent_at, ack_groups, status, attempts, crashes, delivery_epoch, last_error IS NOT NULL
         FROM outbox_events FORCE INDEX (outbox_id) WHERE id IN ({places}) ORDER BY seq"
    );
    let mut values: Vec<Value> = ids.iter().map(|id| id.to_string().into()).collect();
    if values.is_empty() {
        values.push(Value::NULL);
    }
    let mut found = HashMap::new();
    for mut row in tx.exec::<Row, _, _>(sql, values).await? {
        let one = Found {
            seq: row.number(1)?,
            sent_at: row.optional_millis(2)?,
            groups: row.groups(3)?,
            state: row.state(4, false)?.perhaps_sent(row.number(8)? != 0),
        };
        found.entry(row.id(0)?).or_insert(one);
    }
    Ok(found)
}

/// Says of those that are in flight that they are. One may be settled between the two looks: then it is in no batch any
/// more and was not Sent yet, so it is looked at once more.
async fn fly(tx: &mut Tx<'_>, found: &mut HashMap<MessageId, Found>) -> Result<(), Trouble> {
    let flying = in_flight(tx).await?;
    let mut settled = BTreeSet::new();
    for (id, found) in found.iter_mut().filter(|(_, found)| found.state.status != Status::Sent) {
        if flying.contains_key(&found.seq) {
            found.state.status = Status::InFlight;
        } else {
            settled.insert(*id);
        }
    }
    if !settled.is_empty() {
        found.extend(find(tx, &settled).await?);
    }
    Ok(())
}

/// Who has acknowledged already.
async fn acknowledged(tx: &mut Tx<'_>, seqs: &[i64]) -> Result<HashSet<(i64, String)>, Trouble> {
    let sql = format!("SELECT seq, grp FROM outbox_acknowledgements WHERE seq IN ({})", list(seqs));
    let mut known = HashSet::new();
    for mut row in tx.query::<Row, _>(sql).await? {
        known.insert((row.number(0)?, row.text(1)?));
    }
    Ok(known)
}

/// Writes acknowledgements. [`Trouble::Again`] when somebody else wrote one of them at the same time: looked at again, it
/// is a repeated one.
async fn write(tx: &mut Tx<'_>, new: &BTreeSet<(i64, &str)>, now: i64) -> Result<(), Trouble> {
    let rows = json!(new.iter().collect::<Vec<_>>()).to_string();
    tx.exec_drop(include_str!("acknowledge/write.sql"), (at(now), &rows)).await?;
    if tx.affected_rows() < new.len() as u64 {
        return Err(Trouble::Again(Error::Unavailable {
            reason: "the same acknowledgement came twice".to_owned(),
            retry_after: Duration::ZERO,
        }));
    }
    Ok(tx.exec_drop(include_str!("acknowledge/done.sql"), (&rows,)).await?)
}

/// Removes messages that all who were asked have acknowledged.
async fn finish<'a>(
    store: &MysqlStore,
    tx: &mut Tx<'_>,
    sent: impl Iterator<Item = &'a Found>,
    known: &HashSet<(i64, String)>,
    tally: &mut Tally,
) -> Result<(), Trouble> {
    let finished: Vec<i64> = sent
        .filter(|found| {
            let groups = found.groups.as_deref().unwrap_or_default();
            groups.iter().all(|group| known.contains(&(found.seq, group.clone())))
        })
        .map(|found| found.seq)
        .collect();
    if finished.is_empty() {
        return Ok(());
    }
    // Some may be on their way again by now.
    let sql = format!(
        "SELECT seq FROM outbox_events FORCE INDEX (PRIMARY) WHERE seq IN ({}) AND status = 'sent' FOR UPDATE",
        list(&finished)
    );
    let finished: Vec<i64> = tx.query(sql).await?;
    if finished.is_empty() {
        return Ok(());
    }
    let removed = settle::remove(tx, &finished).await?;
    store.uncount(tally, removed);
    Ok(())
}

impl MysqlStore {
    /// Sent records were removed. Where the trigger could be made, it counts.
    pub(super) fn uncount(&self, tally: &mut Tally, sent: u64) {
        if !self.trigger {
            tally.sent -= i64::try_from(sent).unwrap_or(i64::MAX);
        }
    }
}
