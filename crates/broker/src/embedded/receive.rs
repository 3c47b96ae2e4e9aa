//! Reading from the log as a member of a group, and saying how far.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use message::{check_group, check_topic};
use rusqlite::Connection;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::block::{Messages, Unreadable};
use super::error::receive as failed;
use super::member::Member;
use super::{Broker, position, share};
use crate::{Delivery, Outgoing, Position, ReceiveError, Subscriber, Subscription};

/// How soon another process's messages are looked for while traffic flows.
const QUICK: Duration = Duration::from_millis(5);

/// How seldom when there is none.
const SLOW: Duration = Duration::from_millis(500);

/// Bytes of payload that one `receive` returns, near enough: five hundred of the largest would fill the memory.
const MAX_BYTES: usize = 8 << 20;

#[async_trait]
impl Subscriber for Broker {
    async fn subscribe(&self, group: &str, topics: &[String]) -> Result<Box<dyn Subscription>, ReceiveError> {
        let refuse = |invalid: message::Invalid| ReceiveError::Misconfigured(invalid.to_string());
        check_group(group).map_err(refuse)?;
        topics.iter().try_for_each(|topic| check_topic(topic)).map_err(refuse)?;
        if topics.is_empty() {
            let text = format!("the consumer group `{group}` names no topic: name at least one");
            return Err(ReceiveError::Misconfigured(text));
        }
        let mut topics = topics.to_vec();
        topics.sort();
        topics.dedup();
        let inner = &self.inner;
        let (name, wanted) = (group.to_owned(), topics.clone());
        let id = inner
            .file
            .write(move |connection| share::subscribe(connection, &name, &wanted))
            .await
            .map_err(|error| failed(&error))?;
        let member =
            Arc::new(Member::new(Arc::clone(&inner.file), id, topics, inner.config.lease, &inner.presence));
        member.renew().await.map_err(|error| failed(&error))?;
        Ok(Box::new(Reader {
            keeping: Keeping(inner.keeper.spawn(Arc::clone(&member).keep())),
            bell: inner.bell.subscribe(),
            pause: QUICK,
            after: 0,
            member,
            broker: self.clone(),
        }))
    }
}

/// A subscription of the embedded broker.
struct Reader {
    member: Arc<Member>,
    keeping: Keeping,
    bell: watch::Receiver<()>,
    /// Until the next look without a bell.
    pause: Duration,
    /// The partition that was read last: the next ones come first, so that none waits behind a busy one.
    after: u32,
    /// Keeps the renewing thread alive.
    broker: Broker,
}

/// Stops renewing when the subscription is gone.
struct Keeping(JoinHandle<()>);

impl Drop for Keeping {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A partition to read and where to go on in it.
struct Wanted {
    id: u32,
    topic: Arc<str>,
    epoch: i64,
    next: i64,
}

/// What one look found.
struct Found {
    generation: i64,
    /// Whether the lease lasts. If not, partitions may still turn out to be ours: they keep their place.
    lasts: bool,
    /// Per partition: its epoch, where reading began, and what was read.
    read: Vec<(u32, i64, i64, Vec<Delivery>)>,
    /// Partitions that the file says belong to somebody else.
    lost: Vec<(u32, i64)>,
}

#[async_trait]
impl Subscription for Reader {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError> {
        loop {
            // Marked before looking: a message that is stored after the look rings again.
            self.bell.borrow_and_update();
            let deliveries = self.look(max.max(1)).await?;
            if !deliveries.is_empty() {
                self.pause = QUICK;
                return Ok(deliveries);
            }
            tokio::select! {
                _ = self.bell.changed() => {}
                () = self.member.taken.notified() => {}
                () = tokio::time::sleep(self.pause) => self.pause = (self.pause * 2).min(SLOW),
            }
        }
    }

    async fn acknowledge(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        let Some((member, commits)) = self.commits(positions) else { return Ok(()) };
        let group = self.member.group;
        let done = self
            .member
            .file
            .write(move |connection| commit(connection, group, member, commits))
            .await
            .map_err(|error| failed(&error))?;
        fail::fail_point!("broker::acknowledged");
        for Commit { partition, epoch, next, kept } in done {
            if !kept {
                tracing::debug!(partition, "an acknowledgement came after the partition was lost");
                self.member.lost(partition, epoch);
                continue;
            }
            let mut standing = self.member.standing();
            if let Some(held) = standing.held.get_mut(&partition).filter(|held| held.epoch == epoch) {
                held.committed = held.committed.max(next);
                if held.leaving && held.committed == held.next {
                    self.member.look();
                }
            }
        }
        Ok(())
    }

    async fn give_back(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        let mut standing = self.member.standing();
        for Position { partition, offset } in positions {
            if let Some(held) = standing.held.get_mut(&number(*partition)) {
                held.next = held.next.min(*offset).max(held.committed);
                if held.leaving && held.committed == held.next {
                    self.member.look();
                }
            }
        }
        Ok(())
    }

    async fn close(mut self: Box<Self>) {
        self.keeping.0.abort();
        // After its end no renewal can follow the farewell.
        let _ = (&mut self.keeping.0).await;
        let (group, member) = (self.member.group, self.member.standing().member);
        let Some(member) = member else { return };
        let left = self.member.file.write(move |connection| share::leave(connection, group, member)).await;
        match left {
            Ok(()) => self.broker.inner.ring(),
            Err(error) => tracing::warn!(%error, "could not leave the group; its leases will run out"),
        }
    }
}

impl Reader {
    /// Looks once for messages and moves on past those it returns.
    async fn look(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError> {
        let group = self.member.group;
        let (member, known, wanted) = {
            let standing = self.member.standing();
            let lapsed = standing.locked_until.is_none_or(|until| until <= Instant::now());
            if let Some(trouble) = standing.trouble.as_ref().filter(|_| lapsed) {
                return Err(failed(trouble));
            }
            let mut wanted: Vec<_> = standing
                .held
                .iter()
                .filter(|(_, held)| !held.leaving)
                .map(|(id, held)| Wanted {
                    id: *id,
                    topic: Arc::clone(&held.topic),
                    epoch: held.epoch,
                    next: held.next,
                })
                .collect();
            let turn = wanted.iter().position(|wanted| wanted.id > self.after).unwrap_or(0);
            wanted.rotate_left(turn);
            (standing.member.unwrap_or_default(), standing.generation, wanted)
        };
        let found = self
            .member
            .file
            .read(move |connection| look(connection, group, member, &wanted, max))
            .await
            .map_err(|error| failed(&error))?;
        if found.generation != known || !found.lasts {
            self.member.look();
        }
        for (partition, epoch) in &found.lost {
            self.member.lost(*partition, *epoch);
        }
        let mut standing = self.member.standing();
        let mut deliveries = Vec::new();
        for (partition, epoch, from, read) in found.read {
            // It may have been lost, or asked to leave, while it was read.
            let same =
                |held: &&mut super::member::Held| held.epoch == epoch && held.next == from && !held.leaving;
            let Some(held) = standing.held.get_mut(&partition).filter(same) else { continue };
            if let Some(last) = read.last() {
                held.next = last.position.offset + 1;
                self.after = partition;
            }
            deliveries.extend(read);
        }
        Ok(deliveries)
    }

    /// What must be written for these positions. A position that was not delivered since the partition was last
    /// taken is somebody else's by now and counts for nothing.
    fn commits(&self, positions: &[Position]) -> Option<(i64, Vec<Commit>)> {
        let mut highest: BTreeMap<u32, i64> = BTreeMap::new();
        let standing = self.member.standing();
        let member = standing.member?;
        for Position { partition, offset } in positions {
            let partition = number(*partition);
            let Some(held) = standing.held.get(&partition) else { continue };
            if (held.committed..held.next).contains(offset) {
                let next = highest.entry(partition).or_insert(offset + 1);
                *next = (*next).max(offset + 1);
            }
        }
        let commits: Vec<_> = highest
            .into_iter()
            .map(|(partition, next)| {
                let epoch = standing.held[&partition].epoch;
                Commit { partition, epoch, next, kept: false }
            })
            .collect();
        (!commits.is_empty()).then_some((member, commits))
    }
}

/// A partition as this broker counts them. A position of another broker names none of ours.
fn number(partition: u64) -> u32 {
    u32::try_from(partition).unwrap_or(u32::MAX)
}

/// One partition's acknowledgement.
struct Commit {
    partition: u32,
    epoch: i64,
    next: i64,
    /// Whether the partition was still ours.
    kept: bool,
}

fn commit(
    connection: &Connection,
    group: i64,
    member: i64,
    mut commits: Vec<Commit>,
) -> Result<Vec<Commit>, sqlite::Error> {
    let mut update = connection.prepare_cached(
        "UPDATE broker_offsets SET committed = max(committed, ?5)
         WHERE group_id = ?1 AND partition = ?2 AND member = ?3 AND epoch = ?4",
    )?;
    for commit in &mut commits {
        commit.kept = update.execute((group, commit.partition, member, commit.epoch, commit.next))? > 0;
    }
    Ok(commits)
}

/// Reads what is wanted, of partitions that are still ours in this very snapshot.
fn look(
    connection: &Connection,
    group: i64,
    member: i64,
    wanted: &[Wanted],
    max: usize,
) -> Result<Found, sqlite::Error> {
    let snapshot = connection.unchecked_transaction()?;
    let generation = snapshot
        .prepare_cached("SELECT generation FROM broker_groups WHERE id = ?1")?
        .query_row([group], |row| row.get(0))?;
    let mut ours: BTreeMap<u32, (i64, i64, i64)> = BTreeMap::new();
    let mut held = snapshot.prepare_cached(include_str!("held.sql"))?;
    let mut rows = held.query((group, member))?;
    let mut lasts = true;
    while let Some(row) = rows.next()? {
        ours.insert(row.get(0)?, (row.get(1)?, row.get(2)?, row.get(3)?));
        lasts = row.get(4)?;
    }
    let mut found = Found { generation, lasts, read: Vec::new(), lost: Vec::new() };
    if !lasts {
        return Ok(found);
    }
    let mut ready = Vec::with_capacity(wanted.len());
    for wanted in wanted {
        match ours.get(&wanted.id) {
            Some((epoch, first, end)) if *epoch == wanted.epoch => {
                let from = wanted.next.max(*first);
                if from < *end {
                    ready.push((wanted, from, (*end - from) as usize));
                }
            }
            _ => found.lost.push((wanted.id, wanted.epoch)),
        }
    }
    let counts = divide(max, ready.iter().map(|(.., available)| *available));
    let mut bytes = 0;
    for ((wanted, from, _), count) in ready.into_iter().zip(counts) {
        if count == 0 || bytes >= MAX_BYTES {
            continue;
        }
        let deliveries = read(&snapshot, wanted, from, count, &mut bytes)?;
        found.read.push((wanted.id, wanted.epoch, wanted.next, deliveries));
    }
    Ok(found)
}

/// How many to take from each: an equal part, and what others do not use goes to the first that can.
fn divide(max: usize, available: impl ExactSizeIterator<Item = usize> + Clone) -> Vec<usize> {
    let part = max.div_ceil(available.len().max(1));
    let mut left = max;
    let mut counts: Vec<usize> = available
        .clone()
        .map(|available| {
            let count = available.min(part).min(left);
            left -= count;
            count
        })
        .collect();
    for (count, available) in counts.iter_mut().zip(available) {
        let more = (available - *count).min(left);
        *count += more;
        left -= more;
    }
    counts
}

fn read(
    connection: &Connection,
    wanted: &Wanted,
    from: i64,
    count: usize,
    bytes: &mut usize,
) -> Result<Vec<Delivery>, sqlite::Error> {
    let mut select = connection.prepare_cached(include_str!("read.sql"))?;
    let start = position(wanted.id, from);
    let mut rows = select.query((start, start + count as i64))?;
    let mut deliveries = Vec::with_capacity(count);
    while let Some(row) = rows.next()? {
        let first = row.get::<_, i64>(0)? - position(wanted.id, 0);
        let broken = |_: Unreadable| unreadable(wanted.id, first);
        let mut messages = Messages::of(row.get(2)?).map_err(broken)?;
        for offset in first..first + row.get::<_, i64>(1)? {
            if offset < from {
                messages.skip().map_err(broken)?;
                continue;
            }
            if deliveries.len() >= count || *bytes >= MAX_BYTES {
                return Ok(deliveries);
            }
            let Outgoing { message, seq, delivery, .. } = messages.next(&wanted.topic).map_err(broken)?;
            *bytes += message.size();
            let position = Position { partition: u64::from(wanted.id), offset };
            let message = Arc::unwrap_or_clone(message);
            deliveries.push(Delivery { message, seq: Some(seq), delivery, position });
        }
    }
    Ok(deliveries)
}

fn unreadable(partition: u32, offset: i64) -> sqlite::Error {
    sqlite::Error::Statement(format!(
        "the block at offset {offset} of partition {partition} is damaged or was written by a newer program"
    ))
}

#[cfg(test)]
mod tests {
    use super::divide;

    #[test]
    fn a_busy_partition_takes_only_what_others_do_not_use() {
        assert_eq!(divide(10, [100, 1, 3].into_iter()), [6, 1, 3]);
        assert_eq!(divide(9, [100, 100, 100].into_iter()), [3, 3, 3]);
        assert_eq!(divide(2, [5, 5, 5].into_iter()), [1, 1, 0]);
        assert_eq!(divide(10, [1, 2].into_iter()), [1, 2]);
        assert_eq!(divide(10, [].into_iter()), Vec::<usize>::new());
    }
}
