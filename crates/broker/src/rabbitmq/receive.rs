//! Receiving: a member of a group waits in line at every queue of its topics, and has those where it is the first.
//!
//! Each queue has a channel of its own: closing it is the one way to give a queue up with all that it has delivered, in
//! order. What the application gives back never returns to RabbitMQ, which would put it behind what it has sent ahead; it
//! is kept here and handed out again. It is still unacknowledged, so a crash loses nothing.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::{join_all, try_join_all};
use futures::stream::{BoxStream, SelectAll};
use futures::{FutureExt, StreamExt};
use lapin::message::Delivery as Delivered;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Acker, Channel, Connection, Consumer};
use message::{check_group, check_topic};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use super::config::Config;
use super::error::Fault;
use super::share::{self, Census};
use super::{Broker, layout, link, properties};
use crate::unfinished::Unfinished;
use crate::{Delivery, Position, ReceiveError, Subscriber, Subscription};

/// A farewell that takes longer than this is left to the server, which notices that we are gone.
const FAREWELL: Duration = Duration::from_secs(2);

/// How long RabbitMQ leaves a message with a member at work: a year, from version 3.12 on. Before, only the server's own
/// setting counts.
const AT_WORK: Duration = Duration::from_secs(365 * 24 * 60 * 60);

#[async_trait]
impl Subscriber for Broker {
    async fn subscribe(&self, group: &str, topics: &[String]) -> Result<Box<dyn Subscription>, ReceiveError> {
        let wrong = |error: message::Invalid| ReceiveError::Misconfigured(error.to_string());
        check_group(group).map_err(wrong)?;
        topics.iter().try_for_each(|topic| check_topic(topic)).map_err(wrong)?;
        let config = Arc::clone(&self.inner.config);
        let limit = config.timeout;
        let joining = tokio::time::timeout(limit, Member::join(config, group, topics));
        let late = |_| ReceiveError::Unreachable(format!("no answer within {limit:?}"));
        Ok(Box::new(joining.await.map_err(late)??))
    }
}

/// A place in line at a queue.
type Line = (Channel, Consumer);

/// What came at one of the queues; nothing is the end of it.
struct Arrival {
    partition: usize,
    turn: u64,
    what: Option<lapin::Result<Delivered>>,
}

/// A message that is here and not acknowledged.
struct Held {
    delivery: Delivery,
    acker: Acker,
}

/// One queue.
struct Partition {
    queue: ShortString,
    topic: Arc<str>,
    /// How often we stood in line; what comes from an earlier time is not ours any more.
    turn: u64,
    /// Nothing while we walk to the end of the line.
    channel: Option<Channel>,
    /// Came and was not handed out, or was given back.
    ready: VecDeque<Held>,
    /// Handed out and not acknowledged.
    out: usize,
    next_offset: i64,
    /// Whether something came since we stand in line: then we are the first.
    first: bool,
    /// Whether another member is to have it as soon as nothing of it is out.
    leaving: bool,
}

struct Member {
    config: Arc<Config>,
    connection: Arc<Connection>,
    partitions: Vec<Partition>,
    arrivals: SelectAll<BoxStream<'static, Arrival>>,
    unfinished: Unfinished<Held>,
    /// Those who walk to the end of a line.
    walking: JoinSet<(usize, Result<Line, Fault>)>,
    members: watch::Receiver<Census>,
    /// Counts the members; ends with us.
    _counting: JoinSet<()>,
    /// Where the next round of handing out begins.
    round: usize,
    broken: Option<String>,
}

impl Member {
    async fn join(config: Arc<Config>, group: &str, topics: &[String]) -> Result<Self, Fault> {
        let connection = Arc::new(link::connect(&config).await?);
        let channel = connection.create_channel().await?;
        layout::exchange(&channel, &config).await?;
        let (mut partitions, mut rolls, mut signed) = (Vec::new(), Vec::new(), Vec::new());
        for topic in topics {
            if config.create {
                layout::queues(&channel, &config, group, topic).await?;
            }
            let topic: Arc<str> = topic.as_str().into();
            let roll = layout::roll(&config, group, &topic)?;
            signed.push(stand(&connection, &config, roll.clone()).await);
            rolls.push((Arc::clone(&topic), roll));
            for number in 0..config.partitions {
                let queue = layout::queue(&config, group, &topic, number)?;
                partitions.push(Partition::new(queue, Arc::clone(&topic)));
            }
        }
        let lines = partitions.iter().map(|partition| stand(&connection, &config, partition.queue.clone()));
        let lines = try_join_all(lines).await?;
        let (told, members) = watch::channel(Census::default());
        let mut counting = JoinSet::new();
        counting.spawn(async move {
            share::count(channel, rolls, told).await;
            // We are counted for as long as this is held; where there is no roll to sign, we have all that falls to us.
            drop(signed);
        });
        let mut member = Self {
            config,
            connection,
            partitions,
            arrivals: SelectAll::new(),
            unfinished: Unfinished::default(),
            walking: JoinSet::new(),
            members,
            _counting: counting,
            round: 0,
            broken: None,
        };
        for (index, line) in lines.into_iter().enumerate() {
            member.stands(index, line);
        }
        Ok(member)
    }

    /// We stand in line at a queue.
    fn stands(&mut self, partition: usize, (channel, consumer): Line) {
        let turn = self.partitions[partition].turn;
        self.partitions[partition].channel = Some(channel);
        let arrival = move |what| Arrival { partition, turn, what };
        let end = futures::stream::once(async move { arrival(None) });
        self.arrivals.push(consumer.map(move |what| arrival(Some(what))).chain(end).boxed());
    }

    fn arrived(&mut self, arrival: Arrival) {
        let Arrival { partition: index, turn, what } = arrival;
        let partition = &mut self.partitions[index];
        if turn != partition.turn {
            return;
        }
        match what {
            Some(Ok(delivered)) => {
                partition.first = true;
                let position = Position { partition: index as u64, offset: partition.next_offset };
                partition.next_offset += 1;
                let acker = delivered.acker.clone();
                let delivery = properties::arrived(&partition.topic, delivered, position);
                partition.ready.push_back(Held { delivery, acker });
            }
            Some(Err(error)) => self.broken = Some(Fault::from(error).text().to_owned()),
            None => {
                let gone = format!("the queue `{}` is gone, or was taken from us", partition.queue);
                self.broken.get_or_insert(gone);
            }
        }
    }

    /// Everything that is here already, so that the answer holds as much as there is.
    fn take_in(&mut self) {
        while let Some(Some(arrival)) = self.arrivals.next().now_or_never() {
            self.arrived(arrival);
        }
    }

    /// Up to `max`, in turn from each queue, each queue in its order.
    fn hand_out(&mut self, max: usize) -> Vec<Delivery> {
        let mut given = Vec::new();
        let count = self.partitions.len();
        for step in 0..count {
            let partition = &mut self.partitions[(self.round + step) % count];
            let room = max - given.len();
            if partition.leaving {
                continue;
            }
            for held in partition.ready.drain(..room.min(partition.ready.len())) {
                partition.out += 1;
                given.push(held.delivery.clone());
                self.unfinished.insert(held.delivery.position, held);
            }
        }
        self.round = (self.round + 1) % count.max(1);
        given
    }

    /// Gives up what is more than our part, once nothing of it is out.
    fn share(&mut self) {
        let census = self.members.borrow_and_update().clone();
        for (topic, members) in &census {
            let of_topic = self.partitions.iter_mut().filter(|partition| partition.topic == *topic);
            let mut ours: Vec<_> =
                of_topic.filter(|partition| partition.first && !partition.leaving).collect();
            let excess = ours.len().saturating_sub(share::part(self.config.partitions, *members));
            // Those with nothing out can go at once.
            ours.sort_by_key(|partition| partition.out);
            ours.into_iter().take(excess).for_each(|partition| partition.leaving = true);
        }
        for index in 0..self.partitions.len() {
            let partition = &mut self.partitions[index];
            if partition.leaving && partition.out == 0 {
                let channel = partition.leave();
                let (connection, config) = (Arc::clone(&self.connection), Arc::clone(&self.config));
                let queue = partition.queue.clone();
                self.walking.spawn(async move {
                    if let Some(channel) = channel {
                        // Closed or broken, it is the same: the queue is the next one's.
                        drop(channel.close(200, "".into()).await);
                    }
                    (index, stand(&connection, &config, queue).await)
                });
            }
        }
    }

    fn walked(&mut self, walk: Result<(usize, Result<Line, Fault>), JoinError>) {
        match walk {
            Ok((partition, Ok(line))) => self.stands(partition, line),
            Ok((_, Err(fault))) => self.broken = Some(fault.text().to_owned()),
            Err(error) => self.broken = Some(error.to_string()),
        }
    }
}

#[async_trait]
impl Subscription for Member {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError> {
        loop {
            self.take_in();
            if let Some(why) = &self.broken {
                return Err(ReceiveError::Unreachable(why.clone()));
            }
            self.share();
            let given = self.hand_out(max);
            if !given.is_empty() || max == 0 {
                return Ok(given);
            }
            tokio::select! {
                Some(arrival) = self.arrivals.next() => self.arrived(arrival),
                Some(walk) = self.walking.join_next() => self.walked(walk),
                Ok(()) = self.members.changed() => {}
                else => return Err(ReceiveError::Unreachable("the connection is gone".to_owned())),
            }
        }
    }

    async fn acknowledge(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        let mut last = BTreeMap::new();
        for Position { partition, offset } in positions {
            last.entry(*partition)
                .and_modify(|most: &mut i64| *most = (*most).max(*offset))
                .or_insert(*offset);
        }
        let mut ackers = Vec::new();
        for (partition, offset) in last {
            let finished = self.unfinished.up_to(Position { partition, offset });
            let Some(partition) = self.partitions.get_mut(partition as usize) else { continue };
            partition.out -= finished.len();
            ackers.extend(finished.into_iter().last().map(|held| held.acker));
        }
        // All before it on its channel, which are all before it of its queue. Where the channel is gone, nothing is said:
        // the messages are another's by now.
        let options = BasicAckOptions { multiple: true };
        let acknowledged = join_all(ackers.iter().map(|acker| acker.ack(options)));
        let limit = self.config.timeout;
        let late = |_| ReceiveError::Unreachable(format!("no word could be sent for {limit:?}"));
        for done in tokio::time::timeout(limit, acknowledged).await.map_err(late)? {
            done.map_err(|error| ReceiveError::Unreachable(error.to_string()))?;
        }
        Ok(())
    }

    async fn give_back(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        for position in positions {
            let returned = self.unfinished.from(*position);
            let Some(partition) = self.partitions.get_mut(position.partition as usize) else { continue };
            partition.out -= returned.len();
            for held in returned.into_iter().rev() {
                partition.ready.push_front(held);
            }
        }
        Ok(())
    }

    async fn close(self: Box<Self>) {
        // Whether it was heard or not: a connection that ends gives back what it holds.
        drop(tokio::time::timeout(FAREWELL, self.connection.close(200, "".into())).await);
    }
}

impl Partition {
    fn new(queue: ShortString, topic: Arc<str>) -> Self {
        Self {
            queue,
            topic,
            turn: 0,
            channel: None,
            ready: VecDeque::new(),
            out: 0,
            next_offset: 0,
            first: false,
            leaving: false,
        }
    }

    /// Forgets all that came. The channel returns it to the queue when it is closed.
    fn leave(&mut self) -> Option<Channel> {
        self.turn += 1;
        self.ready.clear();
        self.first = false;
        self.leaving = false;
        self.channel.take()
    }
}

/// Goes to the end of the line at a queue.
async fn stand(connection: &Connection, config: &Config, queue: ShortString) -> Result<Line, Fault> {
    let channel = connection.create_channel().await?;
    channel.basic_qos(config.prefetch, BasicQosOptions::default()).await?;
    let mut arguments = FieldTable::default();
    let timeout = i64::try_from(AT_WORK.as_millis()).unwrap_or(i64::MAX);
    arguments.insert("x-consumer-timeout".into(), AMQPValue::LongLongInt(timeout));
    let consumer = channel.basic_consume(queue, "".into(), BasicConsumeOptions::default(), arguments).await?;
    Ok((channel, consumer))
}
