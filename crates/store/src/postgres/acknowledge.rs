//! Recording that groups are done with messages, in a transaction of the caller's.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use chrono::{DateTime, Utc};
use message::{Event, MessageId, State, Status, step};
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::connection::Transaction;
use super::error::Trouble;
use super::inspect::in_flight;
use super::row::{between, groups, state};
use super::tally;
use crate::tally::{Tally, Wait};
use crate::{Acknowledged, Sent, Seq};

/// What the table says of a message.
struct Found {
    seq: i64,
    sent_at: Option<DateTime<Utc>>,
    groups: Option<Vec<String>>,
    state: State,
}

/// Records acknowledgements.
pub(super) struct Acknowledger<'a> {
    pub(super) tx: &'a Transaction,
    pub(super) sent: Sent,
}

impl Acknowledger<'_> {
    /// Records that each group is done with its message. `Seq` is where a message probably stands; it need not be known.
    pub(super) async fn acknowledge(
        &self,
        done: &[(MessageId, Option<Seq>, String)],
    ) -> Result<Vec<Acknowledged>, Trouble> {
        if done.is_empty() {
            return Ok(Vec::new());
        }
        let (now, found) = self.find(done).await?;
        let mut answers: Vec<Option<Acknowledged>> = Vec::with_capacity(done.len());
        // In order, so that two who acknowledge the same messages do not wait for each other.
        let mut new: BTreeMap<(i64, &str), Option<DateTime<Utc>>> = BTreeMap::new();
        for (id, _, group) in done {
            answers.push(match found.get(&id.0) {
                None => Some(Acknowledged::Unknown),
                Some(found) if found.groups.as_ref().is_some_and(|groups| !groups.contains(group)) => {
                    Some(Acknowledged::NotAsked)
                }
                Some(found) if step(found.state, Event::Acknowledged).is_err() => {
                    Some(Acknowledged::Refused(found.state.status))
                }
                Some(found) => {
                    new.insert((found.seq, group), found.sent_at);
                    None
                }
            });
        }
        let mut written = self.write(now, &new).await?;
        let answer = |(answer, (id, _, group)): (Option<Acknowledged>, &(MessageId, Option<Seq>, String))| {
            answer.unwrap_or_else(|| match written.remove(&(found[&id.0].seq, group.clone())) {
                true => Acknowledged::New,
                false => Acknowledged::Repeated,
            })
        };
        Ok(answers.into_iter().zip(done).map(answer).collect())
    }

    /// Reads the messages. One that is not sent yet is locked first: its settle may be on its way, and must either see
    /// this acknowledgement or be seen here.
    async fn find(
        &self,
        done: &[(MessageId, Option<Seq>, String)],
    ) -> Result<(DateTime<Utc>, HashMap<Uuid, Found>), Trouble> {
        let mut ids: Vec<Uuid> = done.iter().map(|(id, ..)| id.0).collect();
        ids.sort_unstable();
        ids.dedup();
        self.tx
            .execute(
                "SELECT 1 FROM outbox_events WHERE id = ANY ($1) AND status <> 'sent' ORDER BY seq FOR NO KEY UPDATE",
                &[(&ids, Type::UUID_ARRAY)],
            )
            .await?;
        let rows = self
            .tx
            .query(
                "SELECT id, seq, sent_at, ack_groups::text, status, attempts, crashes, delivery_epoch,
                        last_error IS NOT NULL, clock_timestamp()
                 FROM outbox_events WHERE id = ANY ($1)",
                &[(&ids, Type::UUID_ARRAY)],
            )
            .await?;
        let mut now = DateTime::default();
        let mut found = HashMap::with_capacity(rows.len());
        for row in &rows {
            now = row.try_get(9)?;
            let one = Found {
                seq: row.try_get(1)?,
                sent_at: row.try_get(2)?,
                groups: groups(row, 3)?,
                state: state(row, 4, false)?.perhaps_sent(row.try_get(8)?),
            };
            found.insert(row.try_get(0)?, one);
        }
        // Most acknowledgements come after the settle.
        if found.values().any(|found| found.state.status != Status::Sent) {
            let flying = in_flight(self.tx).await?;
            for one in found.values_mut().filter(|found| found.state.status != Status::Sent) {
                if flying.contains_key(&one.seq) {
                    one.state.status = Status::InFlight;
                }
            }
        }
        Ok((now, found))
    }

    /// Writes what is new of `done`, and answers which that was.
    async fn write(
        &self,
        now: DateTime<Utc>,
        done: &BTreeMap<(i64, &str), Option<DateTime<Utc>>>,
    ) -> Result<HashSet<(i64, String)>, Trouble> {
        if done.is_empty() {
            return Ok(HashSet::new());
        }
        let (seqs, groups): (Vec<i64>, Vec<&str>) = done.keys().copied().unzip();
        let rows = self
            .tx
            .query(
                "INSERT INTO outbox_acknowledgements (seq, grp, acknowledged_at)
                 SELECT a.seq, a.grp, $3 FROM unnest($1::bigint[], $2::text[]) AS a(seq, grp)
                 ON CONFLICT DO NOTHING RETURNING seq, grp",
                &[(&seqs, Type::INT8_ARRAY), (&groups, Type::TEXT_ARRAY), (&now, Type::TIMESTAMPTZ)],
            )
            .await?;
        let mut tally = Tally::default();
        let mut written = HashSet::with_capacity(rows.len());
        for row in &rows {
            let (seq, group): (i64, String) = (row.try_get(0)?, row.try_get(1)?);
            let sent_at = done.get(&(seq, group.as_str())).copied().flatten();
            tally.acknowledged();
            tally.waited(
                Wait::SentToAcknowledged,
                sent_at.map_or(Duration::ZERO, |sent_at| between(sent_at, now)),
            );
            written.insert((seq, group));
        }
        if written.is_empty() {
            return Ok(written);
        }
        self.tx
            .execute(
                "DELETE FROM outbox_unacknowledged u USING unnest($1::bigint[], $2::text[]) AS a(seq, grp)
                 WHERE u.grp = a.grp AND u.seq = a.seq",
                &[(&seqs, Type::INT8_ARRAY), (&groups, Type::TEXT_ARRAY)],
            )
            .await?;
        if self.sent == Sent::Delete {
            // Two groups that are done at the same moment may each see the other missing: retention removes it then.
            self.tx
                .execute(
                    "DELETE FROM outbox_events e WHERE e.seq = ANY ($1) AND e.status = 'sent'
                     AND NOT EXISTS (SELECT 1 FROM outbox_unacknowledged u WHERE u.seq = e.seq)",
                    &[(&seqs, Type::INT8_ARRAY)],
                )
                .await?;
        }
        tally::write(self.tx, tally).await?;
        Ok(written)
    }
}
