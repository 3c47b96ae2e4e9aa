//! A member of a consumer group: what it holds, and the thread that keeps it in the group.
//!
//! librdkafka is polled all the time, however long the work takes: that is how it hears of changes in the group. The
//! messages themselves wait in a queue for each partition, so that a slow member takes no more than it asked for and
//! nothing has to be paused.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::Message as _;
use rdkafka::types::{RDKafkaErrorCode as Code, RDKafkaRespErr};
use rdkafka::{ClientContext, Offset, TopicPartitionList};
use tokio::sync::{Notify, oneshot};

use super::client::{Ear, log};
use super::error;
use crate::{Position, ReceiveError};

/// Between two looks at what has to be done.
const TICK: Duration = Duration::from_millis(50);

/// Why a subscription ends that the group has given up.
pub(super) const TAKEN_FOR_DEAD: &str = "the group took this member for dead and went on without it";

/// A consumer that tells its changes to us instead of acting on them.
pub(super) type Client = BaseConsumer<Changes>;

/// A partition of a topic, by its full name.
type Name = (String, i32);

/// What happened to the assignment.
#[derive(Debug)]
enum Change {
    Assigned(Vec<Name>),
    Revoked(Vec<Name>),
    /// The group went on without this member.
    Lost(Vec<Name>),
}

/// Collects the changes; they are acted on by the thread that polls.
#[derive(Default)]
pub(super) struct Changes {
    ear: Ear,
    heard: Mutex<Vec<Change>>,
    closing: AtomicBool,
}

impl Changes {
    fn take(&self) -> Vec<Change> {
        std::mem::take(&mut *self.heard.lock().expect("nobody panics while holding it"))
    }
}

impl ClientContext for Changes {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        log(level, facility, text);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.ear.hear(&error, reason);
    }
}

impl ConsumerContext for Changes {
    fn rebalance(&self, consumer: &Client, change: RDKafkaRespErr, partitions: &mut TopicPartitionList) {
        let assigned = change == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS;
        if self.closing.load(Ordering::SeqCst) {
            // Nobody is left to act on it.
            let done = if assigned { assign(consumer, partitions) } else { unassign(consumer, partitions) };
            return drop(done);
        }
        let names =
            partitions.elements().iter().map(|one| (one.topic().to_owned(), one.partition())).collect();
        let change = match assigned {
            true => Change::Assigned(names),
            false if consumer.assignment_lost() => Change::Lost(names),
            false => Change::Revoked(names),
        };
        tracing::debug!(?change, "the group changed");
        self.heard.lock().expect("nobody panics while holding it").push(change);
    }
}

fn assign(consumer: &Client, partitions: &TopicPartitionList) -> KafkaResult<()> {
    match consumer.rebalance_protocol() {
        RebalanceProtocol::Cooperative => consumer.incremental_assign(partitions),
        RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.assign(partitions),
    }
}

fn unassign(consumer: &Client, partitions: &TopicPartitionList) -> KafkaResult<()> {
    match consumer.rebalance_protocol() {
        RebalanceProtocol::Cooperative => consumer.incremental_unassign(partitions),
        RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.unassign(),
    }
}

fn list(names: &[Name]) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(names.len());
    for (topic, partition) in names {
        list.add_partition(topic, *partition);
    }
    list
}

/// A partition that this member holds. Offsets are of the next message each.
pub(super) struct Held {
    pub(super) name: Name,
    pub(super) queue: PartitionQueue<Changes>,
    /// Everything before it is acknowledged; unknown before the first message.
    finished: Option<i64>,
    /// What was handed out and is not acknowledged. Offsets have gaps, where transactions ended or were aborted.
    out: BTreeSet<i64>,
    /// Nothing more is handed out.
    pub(super) leaving: bool,
}

impl Held {
    /// A message is handed out.
    pub(super) fn receive(&mut self, offset: i64) {
        self.finished.get_or_insert(offset);
        self.out.insert(offset);
    }

    fn busy(&self) -> bool {
        !self.out.is_empty()
    }
}

/// What a member holds, and whether it is one at all.
#[derive(Default)]
pub(super) struct Standing {
    consumer: Option<Arc<Client>>,
    pub(super) held: BTreeMap<u64, Held>,
    /// The group waits for these; they go all at once, when none is busy.
    leaving: Vec<Name>,
    /// Said once by the next `receive`.
    pub(super) trouble: Option<ReceiveError>,
    /// Said by every `receive`: nothing comes any more.
    pub(super) over: Option<ReceiveError>,
}

/// A member of a group, shared by the subscription and the thread.
pub(super) struct Member {
    /// Full names, sorted: the place of a topic is part of the numbers of its partitions.
    topics: Vec<String>,
    standing: Mutex<Standing>,
    /// Rings when something may be received.
    pub(super) bell: Arc<Notify>,
    closing: AtomicBool,
}

impl Member {
    /// Starts the thread. What is returned is told when it has left the group.
    pub(super) fn start(
        consumer: Client,
        topics: Vec<String>,
    ) -> std::io::Result<(Arc<Self>, oneshot::Receiver<()>)> {
        let consumer = Arc::new(consumer);
        let standing = Standing { consumer: Some(Arc::clone(&consumer)), ..Standing::default() };
        let member = Arc::new(Self {
            topics,
            standing: Mutex::new(standing),
            bell: Arc::default(),
            closing: AtomicBool::new(false),
        });
        let (left, has_left) = oneshot::channel();
        let keeper = Arc::clone(&member);
        let thread = std::thread::Builder::new().name("kafka-member".to_owned());
        thread.spawn(move || {
            keeper.keep(&consumer);
            keeper.leave(consumer);
            // Whoever does not wait for it any more need not be told.
            let _ = left.send(());
        })?;
        Ok((member, has_left))
    }

    pub(super) fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().expect("nobody panics while holding it")
    }

    /// Those of `held` that the group waits for.
    pub(super) fn wanted(&self, held: &BTreeSet<u64>) -> Vec<u64> {
        let standing = self.standing();
        let is_wanted = |number: &&u64| standing.held.get(number).is_some_and(|held| held.leaving);
        held.iter().filter(is_wanted).copied().collect()
    }

    /// Asks the thread to leave the group.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
    }

    /// The consumer, while it is one.
    pub(super) fn consumer(&self) -> Option<Arc<Client>> {
        self.standing().consumer.clone()
    }

    fn keep(&self, consumer: &Arc<Client>) {
        while !self.closing.load(Ordering::SeqCst) {
            match consumer.poll(TICK) {
                None => {}
                // It slipped through before its partition had a queue of its own: it will come again, in order.
                Some(Ok(stray)) => {
                    drop(consumer.seek(
                        stray.topic(),
                        stray.partition(),
                        Offset::Offset(stray.offset()),
                        Duration::ZERO,
                    ));
                }
                Some(Err(failed)) => self.hear(&failed),
            }
            for change in consumer.context().take() {
                self.change(consumer, change);
            }
            // One that is no member any more does not join again: whoever reads it opens another.
            if self.standing().over.is_some() {
                break;
            }
            self.let_go(consumer);
        }
    }

    /// What librdkafka says of the connection or of a partition.
    pub(super) fn hear(&self, failed: &KafkaError) {
        let code = error::code(failed);
        let fatal = matches!(failed, KafkaError::MessageConsumptionFatal(_)) || code == Code::PollExceeded;
        if !fatal && error::passes(code) {
            tracing::debug!(error = %failed, "Kafka is expected back");
            return;
        }
        let trouble = error::receive(code, error::text(failed));
        let mut standing = self.standing();
        if fatal {
            standing.over = Some(trouble)
        } else {
            standing.trouble = Some(trouble)
        }
        drop(standing);
        self.bell.notify_one();
    }

    fn change(&self, consumer: &Arc<Client>, change: Change) {
        match change {
            Change::Assigned(names) => {
                for name in &names {
                    self.take(consumer, name);
                }
                if let Err(failed) = assign(consumer, &list(&names)) {
                    self.end(&failed.to_string());
                }
            }
            Change::Revoked(names) => {
                let mut standing = self.standing();
                for held in standing.held.values_mut() {
                    held.leaving |= names.contains(&held.name);
                }
                standing.leaving.extend(names);
                drop(standing);
                // Somebody may hold them while nothing else comes.
                self.bell.notify_one();
            }
            Change::Lost(names) => {
                self.standing().leaving.extend(names);
                self.end(TAKEN_FOR_DEAD);
            }
        }
    }

    /// Gives a partition its own queue before anything is fetched for it.
    fn take(&self, consumer: &Arc<Client>, name: &Name) {
        let Some(number) = self.number(name) else { return };
        let Some(mut queue) = consumer.split_partition_queue(&name.0, name.1) else { return };
        let bell = Arc::clone(&self.bell);
        queue.set_nonempty_callback(move || bell.notify_one());
        let held = Held { name: name.clone(), queue, finished: None, out: BTreeSet::new(), leaving: false };
        self.standing().held.insert(number, held);
        self.bell.notify_one();
    }

    /// Gives up the partitions that the group waits for, once nobody works on their messages.
    fn let_go(&self, consumer: &Arc<Client>) {
        let mut standing = self.standing();
        let busy = |held: &Held| held.leaving && held.busy();
        if standing.leaving.is_empty() || standing.held.values().any(busy) {
            return;
        }
        let names = std::mem::take(&mut standing.leaving);
        standing.held.retain(|_, held| !held.leaving);
        drop(standing);
        if let Err(failed) = unassign(consumer, &list(&names)) {
            self.end(&failed.to_string());
        }
    }

    /// The subscription is over: whoever reads it opens another.
    pub(super) fn end(&self, why: &str) {
        tracing::info!(why, "a subscription to Kafka ended");
        let mut standing = self.standing();
        standing.held.clear();
        standing.over.get_or_insert_with(|| ReceiveError::Unreachable(why.to_owned()));
        drop(standing);
        self.bell.notify_one();
    }

    /// Leaves the group at once. Closing waits for the network, which is why it is done by this thread.
    fn leave(&self, consumer: Arc<Client>) {
        consumer.context().closing.store(true, Ordering::SeqCst);
        let mut standing = self.standing();
        standing
            .over
            .get_or_insert_with(|| ReceiveError::Unreachable("the subscription was closed".to_owned()));
        standing.held.clear();
        standing.consumer = None;
        let names = std::mem::take(&mut standing.leaving);
        drop(standing);
        for change in consumer.context().take() {
            match change {
                Change::Assigned(names) => drop(assign(&consumer, &list(&names))),
                Change::Revoked(names) | Change::Lost(names) => drop(unassign(&consumer, &list(&names))),
            }
        }
        if !names.is_empty() {
            drop(unassign(&consumer, &list(&names)));
        }
        self.bell.notify_one();
        drop(consumer);
    }

    /// The number of a partition: the same for all members that listen to the same topics.
    fn number(&self, (topic, partition): &Name) -> Option<u64> {
        let place = self.topics.binary_search(topic).ok()? as u64;
        Some((place << 32) | u64::try_from(*partition).ok()?)
    }

    /// How far each partition may be committed, and under which name. What was not handed out by this member, since it
    /// holds the partition, is not its to finish.
    pub(super) fn finishing(&self, positions: &[Position]) -> BTreeMap<u64, (Name, i64)> {
        let standing = self.standing();
        let mut commits: BTreeMap<u64, (Name, i64)> = BTreeMap::new();
        for Position { partition, offset } in positions {
            let Some(held) = standing.held.get(partition) else { continue };
            if held.out.contains(offset) {
                let commit = commits.entry(*partition).or_insert_with(|| (held.name.clone(), 0));
                commit.1 = commit.1.max(offset + 1);
            }
        }
        commits
    }

    /// Kafka knows that these are done.
    pub(super) fn finished(&self, commits: &BTreeMap<u64, (Name, i64)>) {
        let mut standing = self.standing();
        for (partition, (_, next)) in commits {
            if let Some(held) = standing.held.get_mut(partition) {
                held.finished = held.finished.max(Some(*next));
                held.out = held.out.split_off(next);
            }
        }
    }

    /// Goes back to each position, or to the first after it that is not acknowledged.
    pub(super) fn go_back(&self, positions: &[Position]) -> KafkaResult<()> {
        let mut standing = self.standing();
        let Some(consumer) = standing.consumer.clone() else { return Ok(()) };
        for Position { partition, offset } in positions {
            let Some(held) = standing.held.get_mut(partition) else { continue };
            // The first of those that are given back: what lies between it and the position is done, or was never there.
            let Some(target) = held.out.split_off(offset).first().copied() else { continue };
            if !held.leaving {
                let (topic, number) = &held.name;
                // Without waiting: what was fetched before it is out of date from now on.
                consumer.seek(topic, *number, Offset::Offset(target), Duration::ZERO)?;
            }
        }
        self.bell.notify_one();
        Ok(())
    }
}
