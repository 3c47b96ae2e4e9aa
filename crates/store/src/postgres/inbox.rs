//! The inbox: the work of each message and its mark, in one transaction.
//!
//! Of two transactions with the same id one waits for the other at the unique index of marks, so each begins by
//! marking all its messages in the order of their ids and takes back, at its end, the marks of those that were not done. Where one
//! has a mark already that fails; the call begins anew, and this time looks which have none. What was done is one row more, which
//! lists it in its order.
//!
//! A large call is done in shares, each with transactions of its own, side by side: messages of a key are in one share.
//!
//! With `ordered`, messages of one key are kept apart by an advisory lock of the transaction, and whoever reserves has such
//! locks for its ids; nothing else serialises the workers of a group.

mod desk;
mod each;
mod forget;
mod number;
mod parked;
mod parts;
mod reserved;
mod work;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use message::MessageId;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use tracing::warn;
use uuid::Uuid;

use super::PostgresStore;
use super::acknowledge::Acknowledger;
use super::amend::audit;
use super::connection::repeat;
use super::error::Trouble;
use super::inspect::{directed, start};
use super::row::{id, limit};
use crate::audit::{dropped, unparked};
use crate::statement::NO_SCRIPTS;
use crate::stuck::Stuck;
use crate::{
    Arrival, Error, Handled, Inbox, InboxCounts, InboxRules, Page, Paged, Parked, Processed, Receipt,
    Remembered, Reservation, Work,
};
use desk::{Desk, Purpose};
use parts::{KEYS, parts, shares};
use work::Job;
pub(super) use work::Statements;

/// Groups that were met.
#[derive(Debug, Default)]
pub(super) struct Groups(Mutex<HashMap<String, Arc<Group>>>);

/// Calls of a group that look before they mark, after one met a mark that it did not expect: at first, and at most, since they
/// are doubled each time.
const WARY: u32 = 16;
const WARIEST: u32 = 1_024;

/// What is known of a group.
#[derive(Debug)]
struct Group {
    /// It never changes.
    number: i64,
    wariness: Mutex<Wariness>,
}

/// Whether the marks of a group are looked at before they are made. Where everything is new, not to look spares much; where
/// something is not, the transaction was for nothing.
#[derive(Debug, Default)]
struct Wariness {
    /// Calls that still look.
    left: u32,
    /// How many did after the last surprise.
    last: u32,
}

impl Group {
    fn wariness(&self) -> MutexGuard<'_, Wariness> {
        self.wariness.lock().expect("nobody panics while it is wary")
    }

    fn is_wary(&self) -> bool {
        self.wariness().left > 0
    }

    /// A call of the group's: see [`Marking`].
    fn marking(&self) -> Marking<'_> {
        Marking { group: self, looks: AtomicBool::new(self.is_wary()) }
    }

    /// A transaction that did not look met a mark. What was begun before another one told of such a surprise is no further one.
    fn was_surprised(&self) {
        let mut wariness = self.wariness();
        if wariness.left == 0 {
            wariness.last = (wariness.last * 2).clamp(WARY, WARIEST);
        }
        wariness.left = wariness.last;
    }

    /// A call that looked met a mark, or none.
    fn has_looked(&self, met: bool) {
        let mut wariness = self.wariness();
        wariness.left = if met { wariness.last.max(WARY) } else { wariness.left.saturating_sub(1) };
    }
}

/// How a call makes its marks: it looks first if its group is wary, or once it was surprised itself.
struct Marking<'a> {
    group: &'a Group,
    looks: AtomicBool,
}

impl Marking<'_> {
    fn looks(&self) -> bool {
        self.looks.load(Ordering::Relaxed)
    }

    fn was_surprised(&self) {
        self.looks.store(true, Ordering::Relaxed);
        self.group.was_surprised();
    }
}

#[async_trait]
impl Inbox for PostgresStore {
    async fn check(&self, work: &Work) -> Result<(), Error> {
        match work {
            Work::Mark => Ok(()),
            Work::Sql(statement) => self.check_sql(statement).await,
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
            Work::Sql(statement) => Job::Statement(self.statement(statement).await?),
            Work::Script(_) => return Err(Error::Refused(NO_SCRIPTS.to_owned())),
        };
        let known = self.group(group).await?;
        let shares = shares(&arrivals, rules);
        let keys = KEYS / shares.len().max(1);
        let done = shares.iter().map(|share| {
            let share = share.iter().map(|place| &arrivals[*place]).collect();
            self.process_share(&known, group, share, &job, rules, keys)
        });
        let mut receipts = vec![Receipt::Busy; arrivals.len()];
        let mut unusable = false;
        // All of them to their end: one that is dropped would take its connection with it.
        for (share, done) in shares.iter().zip(join_all(done).await) {
            for (place, receipt) in share.iter().zip(done.inspect_err(|_| self.statements.forget(work))?) {
                unusable |= matches!(receipt, Receipt::Unavailable { .. });
                receipts[*place] = receipt;
            }
        }
        if unusable {
            self.statements.forget(work);
        }
        Ok(receipts)
    }

    async fn reserve(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        lease: Duration,
        rules: &InboxRules,
    ) -> Result<Vec<Reservation>, Error> {
        let known = self.group(group).await?;
        let mut reservations = Vec::with_capacity(arrivals.len());
        for part in parts(&arrivals, rules, KEYS, |arrival| arrival) {
            let marking = known.marking();
            let reserved = repeat(|| async {
                let tx = self.connections.transaction().await?;
                let result = async {
                    let mut desk =
                        Desk::open(self, &tx, group, &marking, rules, part.iter(), Purpose::Reserve).await?;
                    let reservations = desk.reserve(part, lease).await?;
                    desk.finish().await?;
                    Ok(reservations)
                }
                .await;
                tx.end(result).await
            });
            match reserved.await {
                Ok(reserved) => reservations.extend(reserved),
                // What was reserved before must be heard of: nobody else can have it.
                Err(error) if !reservations.is_empty() => {
                    warn!(group, %error, "part of a batch cannot be reserved; it comes again");
                    reservations.resize(arrivals.len(), Reservation::Settled(Receipt::Busy));
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(reservations)
    }

    async fn conclude(
        &self,
        group: &str,
        conclusions: Vec<(Arrival, Uuid, Handled)>,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let known = self.group(group).await?;
        let mut receipts = Vec::with_capacity(conclusions.len());
        for part in parts(&conclusions, rules, KEYS, |(arrival, ..)| arrival) {
            let marking = known.marking();
            let concluded = repeat(|| async {
                let tx = self.connections.transaction().await?;
                let result = async {
                    let arrivals = part.iter().map(|(arrival, ..)| arrival);
                    let mut desk =
                        Desk::open(self, &tx, group, &marking, rules, arrivals, Purpose::Conclude).await?;
                    let receipts = desk.conclude_all(part).await?;
                    desk.finish().await?;
                    Ok(receipts)
                }
                .await;
                tx.end(result).await
            });
            receipts.extend(concluded.await?);
        }
        Ok(receipts)
    }

    async fn due(&self, group: &str, most: usize) -> Result<Vec<Arrival>, Error> {
        let rows = self
            .read(include_str!("inbox/due.sql"), &[(&group, Type::TEXT), (&limit(most), Type::INT8)])
            .await?;
        Ok(rows.iter().map(parked::arrival).collect::<Result<_, Trouble>>()?)
    }

    async fn processed(&self, group: &str, page: Page) -> Result<Paged<Processed>, Error> {
        let sql = directed(include_str!("inbox/processed.sql"), page);
        let parameters = [
            (&group as _, Type::TEXT),
            (&start(page) as _, Type::INT8),
            // One row more is read than this.
            (&limit(page.limit).min(i64::MAX - 1) as _, Type::INT8),
        ];
        let rows = self.read(&sql, &parameters).await?;
        let processed = |row: &Row| {
            Ok(Processed {
                position: row.try_get(0)?,
                id: id(row, 1)?,
                topic: row.try_get(2)?,
                key: row.try_get(3)?,
                seq: row.try_get(4)?,
                processed_at: row.try_get(5)?,
            })
        };
        let items: Vec<Processed> = rows.iter().map(processed).collect::<Result<_, Trouble>>()?;
        let next = items.last().filter(|_| items.len() == page.limit).map(|last| last.position);
        Ok(Paged { items, next })
    }

    async fn parked(&self, group: &str, page: Page) -> Result<Paged<Parked>, Error> {
        let sql = directed(include_str!("inbox/list.sql"), page);
        let parameters = [
            (&group as _, Type::TEXT),
            (&start(page) as _, Type::INT8),
            (&limit(page.limit) as _, Type::INT8),
        ];
        let rows = self.read(&sql, &parameters).await?;
        Ok(parked::page(group, &rows, page)?)
    }

    async fn unpark(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let result = async {
                tx.begin().await?;
                parked::unpark(&tx, group, id).await?;
                audit(&tx, actor, "inbox requeue", id, &unparked(group)).await
            }
            .await;
            tx.end(result).await
        })
        .await
    }

    async fn drop_parked(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let result = async {
                tx.begin().await?;
                let message = parked::discard(&tx, group, id).await?;
                // The group will never do it: the producer must not wait for it for ever.
                let done = [(id, None, group.to_owned())];
                Acknowledger { tx: &tx, sent: self.sent }.acknowledge(&done).await?;
                audit(&tx, actor, "inbox discard", id, &dropped(group, &message)).await
            }
            .await;
            tx.end(result).await
        })
        .await
    }

    async fn inbox_counts(&self, group: &str) -> Result<InboxCounts, Error> {
        let rows = self
            .read(
                "SELECT coalesce(sum(processed), 0)::bigint, coalesce(sum(duplicates), 0)::bigint,
                        coalesce(sum(parked), 0)::bigint, coalesce(sum(dead), 0)::bigint
                 FROM inbox_counters WHERE grp = (SELECT grp FROM inbox_groups WHERE name = $1)",
                &[(&group, Type::TEXT)],
            )
            .await?;
        let Some(row) = rows.first() else { return Ok(InboxCounts::default()) };
        let number = |column| {
            let number: i64 = row.try_get(column).map_err(Trouble::from)?;
            Ok::<_, Error>(u64::try_from(number).unwrap_or(0))
        };
        Ok(InboxCounts {
            processed: number(0)?,
            duplicates: number(1)?,
            parked: number(2)?,
            dead: number(3)?,
        })
    }

    async fn remembered(&self, group: &str) -> Result<Remembered, Error> {
        let rows = self.read(include_str!("inbox/remembered.sql"), &[(&group, Type::TEXT)]).await?;
        let Some(row) = rows.first() else { return Ok(Remembered::default()) };
        let number = |column| {
            let number: i64 = row.try_get(column).map_err(Trouble::from)?;
            Ok::<_, Error>(u64::try_from(number).unwrap_or(0))
        };
        Ok(Remembered { ids: number(0)?, bytes: Some(number(1)?) })
    }

    async fn forget_ids(&self, group: &str, keep: Duration) -> Result<u64, Error> {
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let result = forget::ids(&tx, group, keep).await;
            tx.end(result).await
        })
        .await
    }
}

impl PostgresStore {
    /// Does the work of these, one transaction for each part of `keys` keys.
    async fn process_share(
        &self,
        known: &Group,
        group: &str,
        share: Vec<&Arrival>,
        job: &Job,
        rules: &InboxRules,
        keys: usize,
    ) -> Result<Vec<Receipt>, Error> {
        let mut receipts: Vec<Receipt> = Vec::with_capacity(share.len());
        let mut stuck = Stuck::new(rules);
        for part in parts(&share, rules, keys, |arrival| arrival) {
            if let Some(down @ Receipt::Unavailable { .. }) = receipts.last() {
                receipts.extend(vec![down.clone(); part.len()]);
                continue;
            }
            let marking = known.marking();
            let done = repeat(|| async {
                let tx = self.connections.transaction().await?;
                let result = async {
                    let arrivals = part.iter().copied();
                    let mut desk =
                        Desk::open(self, &tx, group, &marking, rules, arrivals, Purpose::Process).await?;
                    let receipts = desk.process(part, job, stuck.clone()).await?;
                    desk.finish().await?;
                    Ok(receipts)
                }
                .await;
                tx.end(result).await
            });
            let done = done.await?;
            part.iter().zip(&done).for_each(|(arrival, receipt)| stuck.note(arrival, receipt));
            receipts.extend(done);
        }
        Ok(receipts)
    }

    /// What is known of a group, which gets its number on first use, in a transaction of its own: what follows may be undone.
    async fn group(&self, group: &str) -> Result<Arc<Group>, Error> {
        let groups = || self.groups.0.lock().expect("nobody panics while a group is looked up");
        let known = groups().get(group).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        if group.contains('\0') {
            return Err(Error::Refused("a consumer group's name cannot have a NUL in it".to_owned()));
        }
        let find = "SELECT grp FROM inbox_groups WHERE name = $1";
        let mut rows = self.read(find, &[(&group, Type::TEXT)]).await?;
        if rows.is_empty() {
            let make = "INSERT INTO inbox_groups (name) VALUES ($1) ON CONFLICT DO NOTHING";
            self.execute(make, &[(&group, Type::TEXT)]).await?;
            rows = self.read(find, &[(&group, Type::TEXT)]).await?;
        }
        let row =
            rows.first().ok_or_else(|| Error::Broken(format!("the group {group} was removed by hand")))?;
        let number = row.try_get(0).map_err(Trouble::from)?;
        let known = Group { number, wariness: Mutex::default() };
        Ok(Arc::clone(groups().entry(group.to_owned()).or_insert(Arc::new(known))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_was_surprised_is_wary_for_a_while_and_for_longer_each_time() {
        let group = Group { number: 1, wariness: Mutex::default() };
        let calls_until_it_is_not = || {
            (0..)
                .take_while(|_| {
                    group.has_looked(false);
                    group.is_wary()
                })
                .count()
                + 1
        };
        assert!(!group.is_wary());
        let mut calls = Vec::new();
        for _ in 0..8 {
            group.was_surprised();
            calls.push(calls_until_it_is_not());
        }
        assert_eq!(calls, [16, 32, 64, 128, 256, 512, 1_024, 1_024]);
        let side_by_side = Group { number: 1, wariness: Mutex::default() };
        (0..4).for_each(|_| side_by_side.was_surprised());
        assert_eq!(side_by_side.wariness().left, 16, "one call with four transactions was surprised once");
        group.was_surprised();
        group.has_looked(false);
        group.has_looked(true);
        assert_eq!(calls_until_it_is_not(), 1_024, "marks that are expected keep it wary");
    }
}
