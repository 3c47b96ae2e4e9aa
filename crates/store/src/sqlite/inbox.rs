//! The inbox: the work of each message and its mark, in one transaction.

mod forget;
mod page;
mod parked;
mod work;

use std::time::Duration;

use async_trait::async_trait;
use message::MessageId;
use rusqlite::{Connection, OptionalExtension, params};
use uuid::Uuid;

use super::SqliteStore;
use super::amend::{Acknowledger, audit};
use super::row::now;
use crate::audit::{dropped, unparked};
use crate::column::{OTHER_CONTENT, digest, millis};
use crate::statement::NO_SCRIPTS;
use crate::stuck::Stuck;
use crate::{
    Arrival, Error, Handled, Inbox, InboxCounts, InboxRules, Page, Paged, Parked, Processed, Receipt,
    Remembered, Reservation, Work,
};
use parked::Standing;
use work::Job;
pub use work::{SqlHandler, check_sql};

#[async_trait]
impl Inbox for SqliteStore {
    async fn check(&self, work: &Work) -> Result<(), Error> {
        match work {
            Work::Mark => Ok(()),
            Work::Sql(statement) => check_sql(&self.file.connect()?, statement),
            Work::Script(_) => Err(Error::Refused(NO_SCRIPTS.to_owned())),
        }
    }

    async fn process(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        work: &Work,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let job = match work {
            Work::Mark => Job::Nothing,
            Work::Sql(statement) => Job::statement(statement),
            Work::Script(_) => return Err(Error::Refused(NO_SCRIPTS.to_owned())),
        };
        self.work(group, arrivals, job, rules).await
    }

    async fn reserve(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        lease: Duration,
        rules: &InboxRules,
    ) -> Result<Vec<Reservation>, Error> {
        self.in_group(group, rules, move |desk| {
            arrivals.iter().map(|arrival| desk.reserve(arrival, lease)).collect()
        })
        .await
    }

    async fn conclude(
        &self,
        group: &str,
        conclusions: Vec<(Arrival, Uuid, Handled)>,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        self.in_group(group, rules, move |desk| {
            conclusions
                .into_iter()
                .map(|(arrival, token, handled)| {
                    if !desk.end_reservation(&arrival, token)? {
                        return Ok(Receipt::Busy);
                    }
                    if handled == Handled::Done {
                        return desk.conclude_done(&arrival);
                    }
                    // Looked at again: the reservation kept others from working on it, not from parking it.
                    match desk.standing(&arrival)? {
                        Standing::Settled(receipt) => Ok(receipt),
                        Standing::Free { attempts } => desk.conclude(&arrival, attempts, handled),
                    }
                })
                .collect()
        })
        .await
    }

    async fn due(&self, group: &str, limit: usize) -> Result<Vec<Arrival>, Error> {
        let group = group.to_owned();
        self.file.read(move |connection| parked::due(connection, &group, limit)).await
    }

    async fn processed(&self, group: &str, page: Page) -> Result<Paged<Processed>, Error> {
        let group = group.to_owned();
        self.file.read(move |connection| page::processed(connection, &group, page)).await
    }

    async fn parked(&self, group: &str, page: Page) -> Result<Paged<Parked>, Error> {
        let group = group.to_owned();
        self.file.read(move |connection| parked::list(connection, &group, page)).await
    }

    async fn unpark(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        let (group, actor) = (group.to_owned(), actor.to_owned());
        self.file
            .write(move |connection| {
                parked::unpark(connection, &group, id)?;
                audit(connection, &actor, "inbox requeue", id, &unparked(&group))
            })
            .await
    }

    async fn drop_parked(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        let (group, actor) = (group.to_owned(), actor.to_owned());
        self.file
            .write(move |connection| {
                let message = parked::discard(connection, &group, id)?;
                // The group will never do it: the producer must not wait for it for ever.
                let mut acknowledger = Acknowledger::new(connection)?;
                acknowledger.acknowledge(id, None, &group)?;
                acknowledger.finish()?;
                audit(connection, &actor, "inbox discard", id, &dropped(&group, &message))
            })
            .await
    }

    async fn inbox_counts(&self, group: &str) -> Result<InboxCounts, Error> {
        let group = group.to_owned();
        self.file
            .read(move |connection| {
                let counts = connection
                    .prepare_cached(
                        "SELECT processed, duplicates, parked, dead FROM inbox_groups WHERE name = ?1",
                    )?
                    .query_row([group], |row| {
                        Ok(InboxCounts {
                            processed: row.get(0)?,
                            duplicates: row.get(1)?,
                            parked: row.get(2)?,
                            dead: row.get(3)?,
                        })
                    })
                    .optional()?;
                Ok(counts.unwrap_or_default())
            })
            .await
    }

    async fn remembered(&self, group: &str) -> Result<Remembered, Error> {
        let group = group.to_owned();
        self.file.read(move |connection| forget::remembered(connection, &group)).await
    }

    async fn forget_ids(&self, group: &str, keep: Duration) -> Result<u64, Error> {
        let group = group.to_owned();
        self.file.write(move |connection| forget::ids(connection, &group, keep)).await
    }
}

impl SqliteStore {
    /// Runs `handler` for each arrival in the transaction of its mark, on the store's writer thread: for
    /// handlers written in Rust against rusqlite. It should be quick; all other writers wait for it. One that
    /// panics fails its message and no other.
    ///
    /// # Errors
    /// When the transaction fails, or the handler ended it; then nothing was done.
    pub async fn process_with(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        handler: SqlHandler,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        self.work(group, arrivals, Job::Function(handler), rules).await
    }

    async fn work(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        job: Job,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        self.in_group(group, rules, move |desk| {
            let undoes_itself = job.undoes_itself(desk.connection)?;
            let mut unavailable: Option<Receipt> = None;
            let mut stuck = Stuck::new(desk.rules);
            arrivals
                .iter()
                .map(|arrival| {
                    if let Some(receipt) = &unavailable {
                        return Ok(receipt.clone());
                    }
                    if stuck.holds(arrival) {
                        return Ok(Receipt::Busy);
                    }
                    let receipt = desk.process(arrival, &job, undoes_itself)?;
                    stuck.note(arrival, &receipt);
                    if matches!(receipt, Receipt::Unavailable { .. }) {
                        unavailable = Some(receipt.clone());
                    }
                    Ok(receipt)
                })
                .collect()
        })
        .await
    }

    async fn in_group<T: Send + 'static>(
        &self,
        group: &str,
        rules: &InboxRules,
        work: impl FnOnce(&mut GroupDesk<'_>) -> Result<Vec<T>, Error> + Send + 'static,
    ) -> Result<Vec<T>, Error> {
        let (group, rules) = (group.to_owned(), rules.clone());
        self.file
            .write(move |connection| {
                let mut desk = GroupDesk::new(connection, &group, &rules)?;
                let results = work(&mut desk)?;
                desk.finish()?;
                Ok(results)
            })
            .await
    }
}

/// The number of a group that has done something.
fn find_group(connection: &Connection, group: &str) -> rusqlite::Result<Option<i64>> {
    connection
        .prepare_cached("SELECT grp FROM inbox_groups WHERE name = ?1")?
        .query_row([group], |row| row.get(0))
        .optional()
}

/// The number of a group, made on first use.
pub(super) fn group_number(connection: &Connection, group: &str) -> rusqlite::Result<i64> {
    if let Some(number) = find_group(connection, group)? {
        return Ok(number);
    }
    connection.execute("INSERT INTO inbox_groups (name) VALUES (?1) ON CONFLICT DO NOTHING", [group])?;
    find_group(connection, group)?.ok_or(rusqlite::Error::QueryReturnedNoRows)
}

/// One group's work in one transaction.
pub(super) struct GroupDesk<'a> {
    connection: &'a Connection,
    rules: &'a InboxRules,
    name: &'a str,
    group: i64,
    now: i64,
    counts: Changes,
    acknowledger: Option<Acknowledger<'a>>,
    /// Whether anything is parked for the group: nearly always not, and then nobody needs to look.
    parked: bool,
    /// Whether anything is reserved for it.
    reservations: bool,
}

/// What a transaction adds to the group's counters.
#[derive(Default)]
struct Changes {
    processed: i64,
    duplicates: i64,
    parked: i64,
    dead: i64,
}

impl<'a> GroupDesk<'a> {
    fn new(connection: &'a Connection, name: &'a str, rules: &'a InboxRules) -> Result<Self, Error> {
        let group = group_number(connection, name)?;
        let acknowledger = rules.acknowledge.then(|| Acknowledger::new(connection)).transpose()?;
        let now = now(connection)?;
        let parked = parked::any(connection, group)?;
        let reservations = connection
            .prepare_cached("SELECT EXISTS (SELECT 1 FROM inbox_reserved WHERE grp = ?1)")?
            .query_row([group], |row| row.get(0))?;
        let counts = Changes::default();
        Ok(Self { connection, rules, name, group, now, counts, acknowledger, parked, reservations })
    }

    fn finish(self) -> Result<(), Error> {
        let Changes { processed, duplicates, parked, dead } = self.counts;
        if [processed, duplicates, parked, dead] != [0; 4] {
            self.connection
                .prepare_cached(
                    "UPDATE inbox_groups SET processed = processed + ?2, duplicates = duplicates + ?3,
                            parked = parked + ?4, dead = dead + ?5 WHERE grp = ?1",
                )?
                .execute(params![self.group, processed, duplicates, parked, dead])?;
        }
        self.acknowledger.map_or(Ok(()), Acknowledger::finish)
    }

    fn process(&mut self, arrival: &Arrival, job: &Job, undoes_itself: bool) -> Result<Receipt, Error> {
        // The usual case: with nothing parked or reserved, making the mark tells whether the message is new.
        if undoes_itself && !self.parked && !self.reservations && self.mark(arrival)? {
            let handled = self.run(arrival, job)?;
            if handled == Handled::Done {
                self.acknowledge(arrival)?;
                return Ok(Receipt::Done);
            }
            self.unmark(arrival)?;
            return self.conclude(arrival, 0, handled);
        }
        let attempts = match self.standing(arrival)? {
            Standing::Settled(receipt) => return Ok(receipt),
            Standing::Free { attempts } => attempts,
        };
        if self.reserved(arrival)? {
            return Ok(Receipt::Busy);
        }
        self.connection.prepare_cached("SAVEPOINT work")?.execute([])?;
        let handled = self.run(arrival, job)?;
        if handled != Handled::Done {
            self.connection.prepare_cached("ROLLBACK TO work")?.execute([])?;
        }
        self.connection.prepare_cached("RELEASE work")?.execute([])?;
        self.conclude(arrival, attempts, handled)
    }

    fn run(&self, arrival: &Arrival, job: &Job) -> Result<Handled, Error> {
        let handled = job.run(self.connection, self.name, arrival);
        if self.connection.is_autocommit() {
            // Nothing of this transaction is there any more, and nothing may be written outside of one.
            return Err(Error::Broken(format!(
                "the handler of {} ended the store's transaction at message {}: it must not commit or roll back, \
                 nor may a trigger or constraint of its tables",
                self.name, arrival.message.id
            )));
        }
        Ok(handled)
    }

    /// Writes what the handler said, for an arrival that is free.
    fn conclude(&mut self, arrival: &Arrival, attempts: u32, handled: Handled) -> Result<Receipt, Error> {
        match handled {
            Handled::Done => {
                if !self.mark(arrival)? {
                    return Err(Error::Broken(format!("message {} was done meanwhile", arrival.message.id)));
                }
                self.finished(arrival)
            }
            Handled::Retry { error, after } => self.retry(arrival, attempts, error, after),
            Handled::Dead { error } => self.bury(arrival, attempts + 1, error),
            Handled::Unavailable { error } => Ok(Receipt::Unavailable { error }),
        }
    }

    /// The work was done outside under a valid token: that cannot be undone, wherever its key stands by now.
    fn conclude_done(&mut self, arrival: &Arrival) -> Result<Receipt, Error> {
        // A handler with a transaction of its own (`sqlx::once`) made the mark in it: done, not a duplicate.
        if self.is_marked(arrival)? {
            return self.finished(arrival);
        }
        match self.done_before(arrival)? {
            Some(receipt) => Ok(receipt),
            None => self.conclude(arrival, 0, Handled::Done),
        }
    }

    fn finished(&mut self, arrival: &Arrival) -> Result<Receipt, Error> {
        self.unpark(arrival, true)?;
        self.acknowledge(arrival)?;
        Ok(Receipt::Done)
    }

    /// Makes the mark. `false` when there is one already.
    fn mark(&mut self, arrival: &Arrival) -> Result<bool, Error> {
        let message = &arrival.message;
        let new = self.connection.prepare_cached(include_str!("inbox/mark.sql"))?.execute(params![
            self.group,
            message.id.to_string(),
            digest(arrival),
            message.topic,
            message.key,
            arrival.seq,
            self.now
        ])?;
        self.counts.processed += i64::from(new == 1);
        Ok(new == 1)
    }

    fn unmark(&mut self, arrival: &Arrival) -> Result<(), Error> {
        self.connection
            .prepare_cached("DELETE FROM inbox_ids WHERE grp = ?1 AND id = ?2")?
            .execute(params![self.group, arrival.message.id.to_string()])?;
        self.counts.processed -= 1;
        Ok(())
    }

    fn acknowledge(&mut self, arrival: &Arrival) -> Result<(), Error> {
        if let Some(acknowledger) = &mut self.acknowledger {
            acknowledger.acknowledge(arrival.message.id, arrival.seq, self.name)?;
        }
        Ok(())
    }

    fn is_marked(&self, arrival: &Arrival) -> Result<bool, Error> {
        Ok(self
            .connection
            .prepare_cached(
                "SELECT EXISTS (SELECT 1 FROM inbox_ids WHERE grp = ?1 AND id = ?2 AND digest = ?3)",
            )?
            .query_row(params![self.group, arrival.message.id.to_string(), digest(arrival)], |row| {
                row.get(0)
            })?)
    }

    /// The receipt of a message that was done before, if it was.
    fn done_before(&mut self, arrival: &Arrival) -> Result<Option<Receipt>, Error> {
        let same: Option<bool> = self
            .connection
            .prepare_cached("SELECT digest = ?3 FROM inbox_ids WHERE grp = ?1 AND id = ?2")?
            .query_row(params![self.group, arrival.message.id.to_string(), digest(arrival)], |row| row.get(0))
            .optional()?;
        match same {
            None => Ok(None),
            Some(true) => {
                self.counts.duplicates += 1;
                // A crash between a handler's own commit and its conclusion leaves it parked.
                self.unpark(arrival, false)?;
                self.acknowledge(arrival)?;
                Ok(Some(Receipt::Duplicate))
            }
            Some(false) => {
                let error = OTHER_CONTENT.to_owned();
                // It may come often; it is kept, and counted, once, and never in the place of another.
                match self.place(arrival.message.id)? {
                    Some(place) if place.dead || !place.is_of(arrival) => Ok(Some(Receipt::Dead { error })),
                    _ => self.bury(arrival, 0, error).map(Some),
                }
            }
        }
    }

    fn reserve(&mut self, arrival: &Arrival, lease: Duration) -> Result<Reservation, Error> {
        if let Standing::Settled(receipt) = self.standing(arrival)? {
            return Ok(Reservation::Settled(receipt));
        }
        let token = Uuid::new_v4();
        let granted = self
            .connection
            .prepare_cached(
                "INSERT INTO inbox_reserved (grp, id, token, until) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT DO UPDATE SET token = excluded.token, until = excluded.until WHERE until <= ?5",
            )?
            .execute(params![
                self.group,
                arrival.message.id.to_string(),
                token.to_string(),
                self.now + millis(lease),
                self.now
            ])?;
        Ok(if granted == 1 { Reservation::Granted(token) } else { Reservation::Settled(Receipt::Busy) })
    }

    fn reserved(&self, arrival: &Arrival) -> Result<bool, Error> {
        Ok(self
            .connection
            .prepare_cached(
                "SELECT EXISTS (SELECT 1 FROM inbox_reserved WHERE grp = ?1 AND id = ?2 AND until > ?3)",
            )?
            .query_row(params![self.group, arrival.message.id.to_string(), self.now], |row| row.get(0))?)
    }

    fn end_reservation(&self, arrival: &Arrival, token: Uuid) -> Result<bool, Error> {
        let ended = self
            .connection
            .prepare_cached(
                "DELETE FROM inbox_reserved WHERE grp = ?1 AND id = ?2 AND token = ?3 AND until > ?4",
            )?
            .execute(params![self.group, arrival.message.id.to_string(), token.to_string(), self.now])?;
        Ok(ended == 1)
    }
}
