//! Reading from streams as a member of a group, and saying how far.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use message::{check_group, check_topic};
use redis::Value;
use tokio::task::JoinHandle;

use super::entry::{Entry, EntryId, list, number, text};
use super::error::{Error, receive as failed};
use super::member::{Delivered, Held, Member};
use super::script::{Call, Link, script};
use super::{Broker, Inner};
use crate::{Delivery, Position, ReceiveError, Subscriber, Subscription};

script!(JOIN: "join.lua");
script!(READ: "read.lua");
script!(ACKNOWLEDGE: "acknowledge.lua");

/// Bytes of payload that one `receive` returns, near enough: five hundred of the largest would fill the memory.
const MAX_BYTES: usize = 8 << 20;

/// How long Redis lets us wait for messages before we ask again.
const WAIT: Duration = Duration::from_secs(5);

/// How long to wait for the renewing task when the group has changed.
const HEARING: Duration = Duration::from_millis(100);

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
        inner.join(group, &topics).await?;
        let member = Member::new(&inner.tag, group, &topics, inner.config.lease, Arc::clone(&inner.heart));
        let member = Arc::new(member);
        let first = Arc::clone(&member);
        // On the keeper's thread, so that the connection is made there.
        let renewed = inner.keeper.spawn(async move { first.renew().await }).await;
        let gone = |_| Error::Away("the thread that renews leases has ended".to_owned());
        renewed.map_err(gone).flatten().map_err(|error| inner.failed(&error))?;
        // A connection of its own: it is blocked while it waits.
        let waiter = Link::new(inner.client.clone(), WAIT + inner.config.timeout, false);
        Ok(Box::new(Reader {
            keeping: Keeping(inner.keeper.spawn(Arc::clone(&member).keep())),
            waiter: Arc::new(waiter),
            waiting: None,
            after: 0,
            member,
            broker: self.clone(),
        }))
    }
}

impl Inner {
    fn failed(&self, error: &Error) -> ReceiveError {
        failed(error, &self.config.place())
    }

    /// Makes the group, so that nothing of it is removed before it is read.
    async fn join(&self, group: &str, topics: &[String]) -> Result<(), ReceiveError> {
        let mut call = Call::new(&JOIN, &self.tag);
        call.arg(u8::from(self.config.create)).arg(self.config.partitions).arg(group).arg(topics);
        let missing = self.reader.invoke(&call).await.map_err(|error| self.failed(&error))?;
        let missing: Vec<String> = list(missing).unwrap_or_default().into_iter().filter_map(text).collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(ReceiveError::Misconfigured(format!(
            "there is no topic {}, and none is to be made: publish to it first, or allow it with `create=true`",
            missing.join(", ")
        )))
    }
}

/// A subscription to Redis Streams.
struct Reader {
    member: Arc<Member>,
    keeping: Keeping,
    waiter: Arc<Link>,
    /// Waits for messages or a change in the group. Outlives a `receive` that is dropped: Redis would not notice, and the
    /// next one would stand in line behind it.
    waiting: Option<Waiting>,
    /// The partition that was read last: the next ones come first, so that none waits behind a busy one.
    after: u64,
    /// Keeps the renewing thread alive.
    broker: Broker,
}

type Waiting = Pin<Box<dyn Future<Output = Result<Value, Error>> + Send>>;

/// Stops renewing when the subscription is gone.
struct Keeping(JoinHandle<()>);

impl Drop for Keeping {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What one look found.
enum Found {
    Messages(Vec<Delivery>),
    /// Nothing, up to the ends of these streams; the group is as it was.
    Nothing {
        generation: EntryId,
        ends: Vec<(String, String)>,
    },
    /// Nothing, and the group has changed.
    Changed,
}

#[async_trait]
impl Subscription for Reader {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError> {
        loop {
            match self.look(max.max(1)).await.map_err(|error| self.broker.inner.failed(&error))? {
                Found::Messages(deliveries) => return Ok(deliveries),
                Found::Changed => {
                    self.member.look();
                    let _ = tokio::time::timeout(HEARING, self.member.heard.notified()).await;
                }
                Found::Nothing { generation, ends } => {
                    // One that waits already waits for less: it ends no later than a new one would.
                    let waiting = match self.waiting.take() {
                        Some(waiting) => waiting,
                        None => self.wait(generation, ends),
                    };
                    let answer = self.waiting.insert(waiting).await;
                    self.waiting = None;
                    answer.map_err(|error| self.broker.inner.failed(&error))?;
                }
            }
        }
    }

    async fn acknowledge(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        let finished = self.finished(positions);
        if finished.is_empty() {
            return Ok(());
        }
        let mut call = Call::new(&ACKNOWLEDGE, &self.member.tag);
        call.arg(&self.member.group).arg(&self.member.name);
        for (held, last) in finished.values() {
            call.arg(&*held.topic).arg(held.number).arg(&held.epoch).arg(last.to_string());
        }
        let answer = self.broker.inner.reader.invoke(&call).await;
        let answer = answer.map_err(|error| self.broker.inner.failed(&error))?;
        fail::fail_point!("broker::acknowledged");
        for ((partition, (held, _)), kept) in finished.iter().zip(list(answer).unwrap_or_default()) {
            if number(&kept) != Some(1) {
                tracing::debug!(partition, "an acknowledgement came after the partition was lost");
                self.member.lost(*partition, &held.epoch);
            }
        }
        self.member.look_if_done();
        Ok(())
    }

    async fn give_back(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        let mut standing = self.member.standing();
        for position in positions {
            let returned = standing.unfinished.from(*position);
            let Some(first) = returned.first() else { continue };
            standing.offsets.insert(position.partition, first.offset - 1);
            if let Some(held) = standing.held.get_mut(&position.partition) {
                held.next = first.id;
            }
        }
        drop(standing);
        self.member.look_if_done();
        Ok(())
    }

    async fn close(mut self: Box<Self>) {
        self.keeping.0.abort();
        // After its end no renewal can follow the farewell.
        let _ = (&mut self.keeping.0).await;
        let member = Arc::clone(&self.member);
        let left = self.broker.inner.keeper.spawn(async move { member.leave().await }).await;
        if let Ok(Err(error)) = left {
            tracing::warn!(?error, "could not leave the group; its leases will run out");
        }
    }
}

impl Reader {
    /// Looks once for messages and moves on past those it returns.
    ///
    /// Dropped at any point it loses nothing: what Redis has given out and nobody got is pending from where the member goes
    /// on, and comes first in the next look.
    async fn look(&mut self, max: usize) -> Result<Found, Error> {
        let (generation, wanted) = {
            let standing = self.member.standing();
            let wanted = standing.held.iter().filter(|(_, held)| !held.leaving);
            let mut wanted: Vec<(u64, Held)> = wanted.map(|(id, held)| (*id, held.clone())).collect();
            let turn = wanted.iter().position(|(partition, _)| *partition > self.after).unwrap_or(0);
            wanted.rotate_left(turn);
            (standing.generation, wanted)
        };
        let mut call = Call::new(&READ, &self.member.tag);
        call.arg(&self.member.group).arg(&self.member.name).arg(max).arg(MAX_BYTES).arg(wanted.len());
        for (_, held) in &wanted {
            call.arg(&*held.topic).arg(held.number).arg(&held.epoch).arg(held.next.to_string());
        }
        let answer = self.broker.inner.reader.invoke(&call).await?;
        let Answer { now, read, ends } = Answer::from_value(answer)
            .ok_or_else(|| Error::Unanswered("its answer makes no sense".to_owned()))?;
        let mut deliveries = Vec::new();
        // Without all ends something was read, and is not to be delivered by now.
        let mut changed = now != generation || ends.len() != wanted.len();
        for ((partition, held), entries) in wanted.iter().zip(read) {
            match entries {
                Some(entries) => self.deliver(*partition, held, entries, &mut deliveries),
                None => {
                    self.member.lost(*partition, &held.epoch);
                    changed = true;
                }
            }
        }
        if now != generation {
            self.member.look();
        }
        Ok(match (deliveries.is_empty(), changed) {
            (false, _) => Found::Messages(deliveries),
            (true, true) => Found::Changed,
            (true, false) => {
                let streams = wanted.iter().map(|(_, held)| self.stream(held));
                Found::Nothing { generation, ends: streams.zip(ends).collect() }
            }
        })
    }

    /// Hands out what was read of a partition, unless it was lost, asked to leave or moved back meanwhile.
    fn deliver(
        &mut self,
        partition: u64,
        before: &Held,
        entries: Vec<Entry>,
        deliveries: &mut Vec<Delivery>,
    ) {
        let Some(last) = entries.last().map(|entry| entry.id) else { return };
        let mut standing = self.member.standing();
        let same = |held: &&mut Held| held.epoch == before.epoch && held.next == before.next && !held.leaving;
        let Some(held) = standing.held.get_mut(&partition).filter(same) else { return };
        held.next = last.next();
        self.after = partition;
        let stream = self.stream(before);
        for entry in entries {
            let offset = standing.offsets.entry(partition).or_default();
            *offset += 1;
            let position = Position { partition, offset: *offset };
            standing
                .unfinished
                .insert(position, Delivered { partition, offset: position.offset, id: entry.id });
            deliveries.push(entry.read(&before.topic, &stream, position));
        }
    }

    fn stream(&self, held: &Held) -> String {
        format!("{}:stream:{}:{}", self.member.tag, held.topic, held.number)
    }

    /// Waits until one of these streams goes on, or the group changes.
    fn wait(&self, generation: EntryId, ends: Vec<(String, String)>) -> Waiting {
        let mut command = redis::cmd("XREAD");
        let patience = u64::try_from(WAIT.as_millis()).unwrap_or(u64::MAX);
        command.arg("COUNT").arg(1).arg("BLOCK").arg(patience).arg("STREAMS");
        command.arg(format!("{}:bell:{}", self.member.tag, self.member.group));
        let (streams, ends): (Vec<_>, Vec<_>) = ends.into_iter().unzip();
        command.arg(streams);
        command.arg(generation.to_string());
        command.arg(ends);
        let waiter = Arc::clone(&self.waiter);
        Box::pin(async move { waiter.query(&command).await })
    }

    /// What these positions finish: for each partition its last message. Positions that were not delivered since the
    /// partition was last taken are somebody else's by now and count for nothing.
    fn finished(&self, positions: &[Position]) -> BTreeMap<u64, (Held, EntryId)> {
        let mut standing = self.member.standing();
        let mut finished: BTreeMap<u64, (Held, EntryId)> = BTreeMap::new();
        for position in positions {
            let Some(last) = standing.unfinished.up_to(*position).last().copied() else { continue };
            let Some(held) = standing.held.get(&position.partition) else { continue };
            let (_, highest) = finished.entry(position.partition).or_insert((held.clone(), last.id));
            *highest = last.id.max(*highest);
        }
        finished
    }
}

/// What a look answers.
struct Answer {
    now: EntryId,
    /// For each partition what was read, or nothing if it is lost.
    read: Vec<Option<Vec<Entry>>>,
    ends: Vec<String>,
}

impl Answer {
    fn from_value(value: Value) -> Option<Self> {
        let [now, read, ends] = <[Value; 3]>::try_from(list(value)?).ok()?;
        let entries = |value: Value| match value {
            Value::Array(entries) => {
                Some(Some(entries.into_iter().map(Entry::from_value).collect::<Option<_>>()?))
            }
            Value::Nil => Some(None),
            _ => None,
        };
        Some(Self {
            now: text(now)?.parse().ok()?,
            read: list(read)?.into_iter().map(entries).collect::<Option<_>>()?,
            ends: list(ends)?.into_iter().map(text).collect::<Option<_>>()?,
        })
    }
}
