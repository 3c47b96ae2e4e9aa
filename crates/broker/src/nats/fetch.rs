//! Fetching the messages of one partition from its durable consumer, a batch at a time, ahead of whoever hands them out.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, Info, PullConsumer, pull};
use async_nats::jetstream::context::Context;
use async_nats::{Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures::StreamExt;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::acknowledge::{ACK, Item};
use super::config::Start;
use super::error::{Trouble, unserved};
use super::link::connections;
use super::member::Member;
use super::shelf::{Arrival, Count};
use super::stream::subject;
use super::{Inner, slug};
use crate::Position;

/// Messages that are fetched ahead from one partition.
const AHEAD: usize = 256;

/// Bytes that are fetched ahead from one partition, near enough.
const AHEAD_BYTES: usize = 4 << 20;

/// What a message is taken for until one has come.
const LARGE: usize = 64 << 10;

/// Fetched even when there is no room, for the missing one may be among them.
const FOR_THE_MISSING: usize = 16;

/// After a failure.
const PAUSE: Duration = Duration::from_millis(100);

/// The server stops by itself when nobody listens; what it sent just before is worth waiting for.
const GRACE: Duration = Duration::from_millis(200);

/// The partition that a task fetches from.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) partition: u64,
    pub(super) topic: String,
    pub(super) number: u32,
}

/// A task that fetches. Ends when it is dropped.
#[derive(Debug, Default)]
pub(super) struct Fetching {
    task: Option<JoinHandle<()>>,
    stop: watch::Sender<bool>,
    /// Rung when there is room for more.
    pub(super) room: Arc<Notify>,
}

impl Fetching {
    /// Ends when no message is on its way to it any more.
    pub(super) async fn stop(mut self) {
        self.stop.send_replace(true);
        if let Some(task) = &mut self.task {
            let _ = tokio::time::timeout(5 * GRACE, task).await;
        }
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Fetches until it is stopped, whatever happens to the server.
pub(super) fn start(member: Arc<Member>, slot: Slot) -> Fetching {
    let mut fetching = Fetching::default();
    let mut stop = fetching.stop.subscribe();
    let room = Arc::clone(&fetching.room);
    fetching.task = Some(tokio::spawn(async move {
        while let Err(trouble) = follow(&member, &slot, &room, &mut stop).await {
            tracing::warn!(%trouble, topic = slot.topic, number = slot.number, "fetching is interrupted");
            member.standing().trouble = Some(trouble);
            member.arrived.notify_one();
            if tokio::time::timeout(PAUSE, stopped(&mut stop)).await.is_ok() {
                return;
            }
        }
    }));
    fetching
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // Nobody to stop it any more is as good.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// A request that the server may still answer.
struct Asked {
    /// Messages that may still come.
    left: usize,
    /// Then it is over, even if the server does not say so.
    until: Instant,
}

/// Opens the consumer and fetches from it. Ends well when it is stopped.
async fn follow(
    member: &Member,
    slot: &Slot,
    room: &Notify,
    stop: &mut watch::Receiver<bool>,
) -> Result<(), Trouble> {
    let inner = &member.inner;
    inner.ready().await?;
    let context = inner.link.connected(&inner.config).await?;
    let client = context.client();
    let mut gone = std::pin::pin!(inner.link.gone(&client, connections(&client)));
    let mut consumer = open(inner, context, &member.group, slot).await?;
    let info = consumer.cached_info();
    member.opened(slot.partition, made(info), count(info));
    let requests = format!("$JS.API.CONSUMER.MSG.NEXT.{}.{}", inner.config.stream, info.name);
    let inbox = client.new_inbox();
    let away = |error: &dyn std::fmt::Display| Trouble::Away(error.to_string());
    let mut messages = client.subscribe(inbox.clone()).await.map_err(|error| away(&error))?;
    let expires = (member.lease() / 2).clamp(Duration::from_millis(100), Duration::from_secs(30));
    let tick = (member.lease() / 10).min(Duration::from_secs(1));
    let mut asked = Asked { left: 0, until: Instant::now() };
    loop {
        if member.has_gap(slot.partition) {
            let info = consumer.info().await.map_err(|error| away(&error))?;
            member.compare(slot.partition, count(info));
        }
        if asked.left == 0 || Instant::now() >= asked.until {
            let batch = member.room(slot.partition);
            if batch > 0 {
                let request = serde_json::json!({"batch": batch, "expires": expires.as_nanos() as u64});
                let request = Bytes::from(request.to_string());
                let sent = client.publish_with_reply(requests.clone(), inbox.clone(), request).await;
                sent.map_err(|error| away(&error))?;
                asked = Asked { left: batch, until: Instant::now() + expires + Duration::from_secs(1) };
            }
        }
        tokio::select! {
            message = messages.next() => {
                let message = message.ok_or_else(|| Trouble::Away("the client is closed".to_owned()))?;
                take(member, context, slot, message, &mut asked).await?;
            }
            () = room.notified() => {}
            () = tokio::time::sleep(tick) => {}
            () = &mut gone => return Err(Trouble::Away("the connection was lost".to_owned())),
            () = stopped(stop) => break,
        }
    }
    drain(member, context, slot, &mut messages, &mut asked).await;
    Ok(())
}

/// A busy partition fills the last request at once; of an idle one nothing is on its way.
async fn drain(
    member: &Member,
    context: &Context,
    slot: &Slot,
    messages: &mut Subscriber,
    asked: &mut Asked,
) {
    let until = Instant::now() + GRACE;
    while asked.left > 0 {
        let Ok(Some(message)) = tokio::time::timeout_at(until, messages.next()).await else { break };
        if take(member, context, slot, message, asked).await.is_err() {
            break;
        }
    }
    // Said before anything is returned: the server would deliver it to this request again.
    let _ = messages.unsubscribe().await;
}

/// Puts a message on its shelf, or heeds what the server says of the request.
async fn take(
    member: &Member,
    context: &Context,
    slot: &Slot,
    message: Message,
    asked: &mut Asked,
) -> Result<(), Trouble> {
    match message.status {
        None => {}
        Some(StatusCode::IDLE_HEARTBEAT) => return Ok(()),
        Some(StatusCode::TIMEOUT | StatusCode::NOT_FOUND) => {
            asked.left = 0;
            return Ok(());
        }
        Some(status) => {
            // The consumer or its stream is gone, or its leader changes: looked at anew.
            member.inner.forget();
            let text = message.description.as_deref().unwrap_or("nobody answers");
            return Err(Trouble::Away(format!("{status} {text}")));
        }
    }
    asked.left = asked.left.saturating_sub(1);
    let Some(reply) = message.reply.clone() else { return Ok(()) };
    let Some([seq, delivery, stored_at]) = numbers(&reply) else { return Ok(()) };
    let position = Position { partition: slot.partition, offset: seq };
    let item = Item { position, message, reply, stored_at };
    if let Some(done) = member.arrive(delivery.unsigned_abs(), item) {
        // Its acknowledgement was lost on the way.
        let _ = context.client().publish(done.reply, Bytes::from_static(ACK)).await;
    }
    Ok(())
}

impl Member {
    fn has_gap(&self, partition: u64) -> bool {
        let standing = self.standing();
        standing
            .held
            .get(&partition)
            .and_then(|held| held.shelf.as_ref())
            .is_some_and(|shelf| shelf.has_gap())
    }

    /// How many messages to ask for.
    fn room(&self, partition: u64) -> usize {
        let standing = self.standing();
        let lasts = standing.locked_until.is_some_and(|until| std::time::Instant::now() < until);
        let Some(held) = standing.held.get(&partition).filter(|held| lasts && !held.leaving) else {
            return 0;
        };
        let Some(shelf) = &held.shelf else { return 0 };
        let size = if held.largest == 0 { LARGE } else { held.largest };
        let most = (AHEAD_BYTES / size).clamp(1, AHEAD);
        let free = most.saturating_sub(shelf.len());
        match shelf.has_gap() {
            true => free.max(FOR_THE_MISSING),
            // Not for every single message that was handed out.
            false if free * 2 < most => 0,
            false => free,
        }
    }

    /// Puts a message on its shelf. One that is done already is returned.
    fn arrive(&self, delivery: u64, item: Item) -> Option<Item> {
        let mut standing = self.standing();
        let position = item.position;
        let held = standing.held.get_mut(&position.partition)?;
        held.largest = held.largest.max(item.message.length);
        let (arrival, item) = held.shelf.as_mut()?.arrive(delivery, position.offset, item);
        let rings = arrival == Arrival::Waits;
        let done = match (arrival, item) {
            (Arrival::IsOut, Some(item)) => {
                // The newer words of the server on it are as good as the older.
                standing.out.insert(position, item);
                None
            }
            (Arrival::IsDone, item) => item,
            _ => None,
        };
        drop(standing);
        if rings {
            self.arrived.notify_one();
        }
        done
    }
}

/// The message's number in the stream, the number of its delivery and when it was stored, from the subject that it is
/// acknowledged by: `$JS.ACK.stream.consumer.times.seq.delivery.nanoseconds.pending`, in newer servers with the domain and
/// the account before the stream.
pub(super) fn numbers(reply: &str) -> Option<[i64; 3]> {
    let words: Vec<&str> = reply.strip_prefix("$JS.ACK.")?.split('.').collect();
    let first = if words.len() < 9 { 3 } else { 5 };
    let number = |place: usize| words.get(first + place)?.parse().ok();
    Some([number(0)?, number(1)?, number(2)?])
}

fn made(info: &Info) -> String {
    format!("{:?}", info.created)
}

fn count(info: &Info) -> Count {
    Count {
        deliveries: info.delivered.consumer_sequence,
        pending: info.num_ack_pending,
        floor: i64::try_from(info.ack_floor.stream_sequence).unwrap_or(i64::MAX),
    }
}

/// The durable consumer of a group's partition, made if it is not there: it is the group's bookmark.
async fn open(inner: &Inner, context: &Context, group: &str, slot: &Slot) -> Result<PullConsumer, Trouble> {
    let (config, name) = (&inner.config, consumer_name(group, &slot.topic, slot.number));
    match context.get_consumer_from_stream::<pull::Config, _, _>(&name, &config.stream).await {
        Ok(consumer) => return Ok(consumer),
        Err(error) => unserved(&error).map_or(Ok(()), Err)?,
    }
    let deliver_policy = match config.start {
        Start::Oldest => DeliverPolicy::All,
        Start::Sequence(start_sequence) => DeliverPolicy::ByStartSequence { start_sequence },
        Start::Time(time) => {
            let time = async_nats::datetime::parse_rfc3339(&time.to_rfc3339());
            let start_time = time.map_err(|error| Trouble::Refused(error.to_string()))?;
            DeliverPolicy::ByStartTime { start_time }
        }
    };
    let wanted = pull::Config {
        durable_name: Some(name),
        description: Some(format!(
            "Postrider: group {group}, topic {}, partition {}",
            slot.topic, slot.number
        )),
        deliver_policy,
        ack_policy: AckPolicy::Explicit,
        ack_wait: config.lease,
        filter_subject: subject(&config.prefix, &slot.topic, slot.number),
        max_deliver: -1,
        max_ack_pending: -1,
        ..pull::Config::default()
    };
    let made = context.create_consumer_on_stream(wanted, &config.stream).await;
    made.map_err(|error| unserved(&error).unwrap_or_else(|| Trouble::Away(error.to_string())))
}

/// What the consumer of a group's partition is called.
pub(super) fn consumer_name(group: &str, topic: &str, number: u32) -> String {
    format!("{}-{number}", slug(&[group, topic]))
}

#[cfg(test)]
mod tests {
    use super::numbers;

    #[test]
    fn the_numbers_of_a_delivery_are_read_from_both_kinds_of_reply() {
        let old = "$JS.ACK.events.durable.3.100.7.1790230470084404000.42";
        let new = "$JS.ACK.hub.Xa1.events.durable.3.100.7.1790230470084404000.42.z";
        for reply in [old, new] {
            assert_eq!(numbers(reply), Some([100, 7, 1_790_230_470_084_404_000]), "{reply}");
        }
        assert_eq!(numbers("_INBOX.x"), None);
        assert_eq!(numbers("$JS.ACK.events"), None);
    }
}
