//! Receiving as a member of a group: what the fetching tasks brought, in order, and what became of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::jetstream::kv;
use async_nats::jetstream::stream::{Config as Stream, DiscardPolicy};
use async_trait::async_trait;
use chrono::DateTime;
use message::{check_group, check_topic};
use tokio::task::JoinHandle;

use super::acknowledge::{ACK, Item};
use super::error::{Trouble, uncreated};
use super::headers::{self, EVENT};
use super::member::Member;
use super::stream::{covers, subject};
use super::{Broker, Inner};
use crate::envelope::{self, Arrived};
use crate::{Delivery, Position, ReceiveError, Subscriber, Subscription};

/// Bytes that one `receive` returns, near enough: five hundred of the largest would fill the memory.
const MAX_BYTES: usize = 8 << 20;

/// Without news, the standing is looked at this often.
const LOOK: Duration = Duration::from_millis(250);

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
        let joined = join(&self.inner, group, topics).await;
        joined.map(|reader| Box::new(reader) as Box<dyn Subscription>).map_err(|trouble| trouble.receive())
    }
}

async fn join(inner: &Arc<Inner>, group: &str, topics: Vec<String>) -> Result<Reader, Trouble> {
    let known = inner.ready().await?;
    for topic in &topics {
        let subject = subject(&inner.config.prefix, topic, 0);
        if !known.subjects.iter().any(|pattern| covers(pattern, &subject)) {
            inner.forget();
            let stream = &inner.config.stream;
            let text =
                format!("the stream `{stream}` does not keep the topic `{topic}`: add it to its subjects");
            return Err(Trouble::Refused(text));
        }
    }
    let member = Arc::new(Member::new(Arc::clone(inner), group, topics, inner.bucket().await?));
    let mut reader = Reader { keeping: None, member: Arc::clone(&member) };
    member.renew().await?;
    reader.keeping = Some(tokio::spawn(member.keep()));
    Ok(reader)
}

impl Inner {
    /// The bucket with the records of the groups, made if it is not there.
    async fn bucket(&self) -> Result<kv::Store, Trouble> {
        let context = self.link.connected(&self.config).await?;
        let name = self.bucket_name();
        if let Ok(bucket) = context.get_key_value(&name).await {
            return Ok(bucket);
        }
        let made = context.create_stream(bucket_stream(&name, self.config.replicas)).await;
        // If it failed, somebody else may have made it in the same moment.
        context.get_key_value(&name).await.map_err(|missing| match made {
            Ok(_) => Trouble::Away(missing.to_string()),
            Err(error) => uncreated(&error),
        })
    }
}

/// A bucket, as every client of NATS makes one. The library's own way asks the server for what only newer ones answer.
fn bucket_stream(bucket: &str, replicas: usize) -> Stream {
    Stream {
        name: format!("KV_{bucket}"),
        description: Some("Postrider: the members of consumer groups".to_owned()),
        subjects: vec![format!("$KV.{bucket}.>")],
        max_messages_per_subject: 1,
        discard: DiscardPolicy::New,
        allow_rollup: true,
        deny_delete: true,
        allow_direct: true,
        num_replicas: replicas,
        ..Stream::default()
    }
}

/// A subscription of a NATS broker.
struct Reader {
    member: Arc<Member>,
    keeping: Option<JoinHandle<()>>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(keeping) = &self.keeping {
            keeping.abort();
        }
        // The tasks that fetch keep the member, and the member them.
        self.member.standing().held.clear();
    }
}

#[async_trait]
impl Subscription for Reader {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError> {
        loop {
            let deliveries = self.take(max.max(1)).map_err(|trouble| trouble.receive())?;
            if !deliveries.is_empty() {
                return Ok(deliveries);
            }
            let _ = tokio::time::timeout(LOOK, self.member.arrived.notified()).await;
        }
    }

    async fn acknowledge(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        let items = self.finish(positions);
        self.member.tell(&items, ACK).await.map_err(|trouble| trouble.receive())?;
        fail::fail_point!("broker::acknowledged");
        self.member.standing().owed.clear();
        Ok(())
    }

    async fn give_back(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        let mut standing = self.member.standing();
        let standing = &mut *standing;
        for (partition, first) in extremes(positions, i64::min) {
            let returned = standing.out.from(Position { partition, offset: first });
            let Some(held) = standing.held.get_mut(&partition) else { continue };
            let Some(shelf) = &mut held.shelf else { continue };
            // They are here and stay ours: to send them back to the server would only make them come later.
            returned.into_iter().for_each(|item| shelf.give_back(item.position.offset, item));
            if held.leaving {
                self.member.look.notify_one();
            }
        }
        self.member.arrived.notify_one();
        Ok(())
    }

    async fn close(mut self: Box<Self>) {
        if let Some(keeping) = self.keeping.take() {
            keeping.abort();
            // After its end no renewal can follow the farewell.
            let _ = keeping.await;
        }
        self.member.leave().await;
    }
}

impl Reader {
    /// Hands out what is there, `max` at most.
    fn take(&self, max: usize) -> Result<Vec<Delivery>, Trouble> {
        let mut standing = self.member.standing();
        let standing = &mut *standing;
        let lapsed = standing.locked_until.is_none_or(|until| until <= Instant::now());
        match &standing.trouble {
            Some(trouble @ Trouble::Refused(_)) => return Err(trouble.clone()),
            Some(trouble @ Trouble::Away(_)) if lapsed => return Err(trouble.clone()),
            // Somebody else may have them by now.
            _ if lapsed => return Ok(Vec::new()),
            _ => {}
        }
        let (mut deliveries, mut bytes) = (Vec::new(), 0);
        let mut order: Vec<u64> = standing.held.keys().copied().collect();
        let first = order.partition_point(|partition| *partition <= standing.after);
        order.rotate_left(first);
        for partition in order {
            let Some(held) = standing.held.get_mut(&partition).filter(|held| !held.leaving) else { continue };
            let Some(shelf) = &mut held.shelf else { continue };
            let before = deliveries.len();
            while deliveries.len() < max && bytes < MAX_BYTES {
                let Some((_, item)) = shelf.hand_out() else { break };
                bytes += item.message.length;
                deliveries.push(delivery(&held.topic, &self.member.inner.config.stream, &item));
                standing.out.insert(item.position, item);
            }
            if deliveries.len() > before {
                standing.after = partition;
                held.fetching.room.notify_one();
            }
        }
        Ok(deliveries)
    }

    /// What an acknowledgement of `positions` finishes, and what is owed from before.
    fn finish(&self, positions: &[Position]) -> Vec<Item> {
        let mut standing = self.member.standing();
        let standing = &mut *standing;
        for (partition, last) in extremes(positions, i64::max) {
            let done = standing.out.up_to(Position { partition, offset: last });
            let highest = done.last().map(|item| item.position.offset);
            standing.owed.extend(done);
            let Some(held) = standing.held.get_mut(&partition) else { continue };
            if let (Some(shelf), Some(highest)) = (&mut held.shelf, highest) {
                shelf.finish(highest);
            }
            if held.leaving {
                self.member.look.notify_one();
            }
        }
        standing.owed.sort_by_key(|item| item.position);
        standing.owed.clone()
    }
}

/// The position of each partition that speaks for the others.
fn extremes(positions: &[Position], which: fn(i64, i64) -> i64) -> BTreeMap<u64, i64> {
    let mut extremes = BTreeMap::new();
    for Position { partition, offset } in positions {
        extremes.entry(*partition).and_modify(|so_far| *so_far = which(*so_far, *offset)).or_insert(*offset);
    }
    extremes
}

pub(super) fn delivery(topic: &str, stream: &str, item: &Item) -> Delivery {
    let seq = item.position.offset;
    let arrived = Arrived {
        topic,
        payload: item.message.payload.clone(),
        content_type: None,
        key: None,
        fields: headers::read(item.message.headers.as_ref()),
        // A stream that is made again counts from one again.
        place: format!("{stream}/{seq}@{}", item.stored_at),
        stored_at: Some(DateTime::from_timestamp_nanos(item.stored_at)),
    };
    envelope::read(arrived, EVENT, item.position)
}
