//! What a member has received and not finished: hidden from others again and again, until it is done, given back or lost.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{
    BatchResultErrorEntry, ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry, Message,
    MessageSystemAttributeName as System,
};
use futures::{StreamExt, stream};
use tokio::time::{Instant, timeout};

use super::Config;
use super::error::{self, Trouble, trouble};
use super::letter;
use super::queue::Queue;
use crate::partition::fnv1a;
use crate::unfinished::Unfinished;
use crate::{Delivery, Position};

/// Messages in one request at most.
const ENTRIES: usize = 10;

/// Requests on their way at a time.
const WINDOW: usize = 8;

/// All that one member holds.
pub(super) struct Holding {
    client: Client,
    fifo: bool,
    visibility: Duration,
    timeout: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// To be handed out, the first first.
    waiting: VecDeque<Delivery>,
    /// Handed out or waiting.
    held: Unfinished<Arc<Held>>,
    /// The message group that each partition of a FIFO queue stands for, as long as something of it is held.
    groups: HashMap<u64, Group>,
    /// Messages were received.
    received: i64,
    /// The member has left.
    gone: bool,
}

struct Group {
    name: String,
    held: usize,
}

/// One message that a member holds.
pub(super) struct Held {
    queue: Arc<Queue>,
    receipt: String,
    delivery: Delivery,
    /// When others may get it, unless it is hidden again.
    until: Mutex<Instant>,
}

/// What can be done with messages that are held.
#[derive(Clone, Copy)]
pub(super) enum Act {
    /// They are done.
    Finish,
    /// Others do not see them for this long; for no time at all, they do.
    Hide(Duration),
}

impl Holding {
    pub(super) fn new(client: Client, config: &Config) -> Self {
        let Config { fifo, visibility, timeout, .. } = *config;
        Self { client, fifo, visibility, timeout, state: Mutex::default() }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn visibility(&self) -> Duration {
        self.visibility
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics while holding what is held")
    }

    /// Takes what SQS has just given. A member that has left takes nothing: others are to have it at once.
    pub(super) async fn take(&self, queue: &Arc<Queue>, messages: Vec<Message>) {
        let until = Instant::now() + self.visibility;
        let held = |message: Message, position| {
            let receipt = message.receipt_handle.clone().unwrap_or_default();
            let delivery = letter::read(message, &queue.topic, position);
            Arc::new(Held { queue: Arc::clone(queue), receipt, delivery, until: Mutex::new(until) })
        };
        let mut unwanted = Vec::new();
        {
            let mut state = self.state();
            for message in messages {
                if state.gone {
                    unwanted.push(held(message, Position { partition: 0, offset: 0 }));
                    continue;
                }
                let position = state.place(queue, &message, self.fifo);
                let held = held(message, position);
                state.waiting.push_back(held.delivery.clone());
                state.held.insert(position, held);
            }
        }
        self.give_up(unwanted).await;
    }

    /// The next messages, `max` at most.
    pub(super) fn hand_out(&self, max: usize) -> Vec<Delivery> {
        let mut state = self.state();
        let count = state.waiting.len().min(max);
        state.waiting.drain(..count).collect()
    }

    /// Takes out what is done with these positions.
    pub(super) fn done(&self, positions: &[Position]) -> Vec<Arc<Held>> {
        let mut state = self.state();
        let mut done = Vec::new();
        for position in positions {
            let finished = state.held.up_to(*position);
            state
                .waiting
                .retain(|waiting| !finished.iter().any(|held| held.delivery.position == waiting.position));
            state.let_go(&finished);
            done.extend(finished);
        }
        done
    }

    /// Holds on to what could not be finished.
    pub(super) fn hold_on(&self, all: &[Arc<Held>]) {
        let mut state = self.state();
        for held in all {
            state.count(held);
            state.held.insert(held.delivery.position, Arc::clone(held));
        }
    }

    /// Takes these positions, and all after them in their partitions, back from whoever works on them. What is returned
    /// must be given up.
    ///
    /// Of a FIFO queue they wait here to be handed out again: while earlier messages of the group are unfinished, SQS would
    /// give them to nobody.
    pub(super) fn take_back(&self, positions: &[Position]) -> Vec<Arc<Held>> {
        let mut first: BTreeMap<u64, i64> = BTreeMap::new();
        for Position { partition, offset } in positions {
            let known = first.entry(*partition).or_insert(*offset);
            *known = (*known).min(*offset);
        }
        let mut state = self.state();
        let mut returned = Vec::new();
        for (partition, offset) in first {
            let back = state.held.from(Position { partition, offset });
            let after = |at: Position| at.partition == partition && at.offset >= offset;
            state.waiting.retain(|waiting| !after(waiting.position));
            if !self.fifo {
                returned.extend(back);
                continue;
            }
            for held in back.into_iter().rev() {
                state.waiting.push_front(held.delivery.clone());
                state.held.insert(held.delivery.position, held);
            }
        }
        returned
    }

    /// Leaves; what was held must be given up, or comes to others when its time is over.
    pub(super) fn leave(&self) -> Vec<Arc<Held>> {
        let mut state = self.state();
        state.gone = true;
        state.waiting.clear();
        state.groups.clear();
        let held = state.held.iter().cloned().collect();
        state.held.clear();
        held
    }

    /// Lets others have them now.
    pub(super) async fn give_up(&self, all: Vec<Arc<Held>>) {
        for (held, result) in self.act(&all, Act::Hide(Duration::ZERO), self.timeout).await {
            if let Err(trouble) = result {
                let error = trouble.about(&held.queue.name);
                tracing::debug!(%error, "a message could not be given back; it comes again when its time is over");
            }
        }
    }

    /// Hides everything again and again, until it is stopped.
    pub(super) async fn keep(self: Arc<Self>) {
        // Two chances to renew before the time is over.
        let pause = self.visibility / 3;
        loop {
            tokio::time::sleep(pause).await;
            let all: Vec<_> = self.state().held.iter().cloned().collect();
            let asked = Instant::now();
            for (held, result) in self.act(&all, Act::Hide(self.visibility), pause).await {
                match result {
                    Ok(()) => *held.until() = asked + self.visibility,
                    Err(Trouble::Refused(text)) => self.lose(&held, &text),
                    Err(trouble) if *held.until() <= Instant::now() => {
                        self.lose(&held, &trouble.about(&held.queue.name));
                    }
                    Err(_) => {}
                }
            }
        }
    }

    /// Somebody else has it, or will soon. With it goes all that follows in its partition.
    fn lose(&self, held: &Held, error: &str) {
        let mut state = self.state();
        let partition = held.delivery.position.partition;
        // What was finished meanwhile is not lost.
        let position = held.delivery.position;
        if !state.held.iter().any(|other| other.delivery.position == position) {
            return;
        }
        let (queue, id) = (&held.queue.name, held.delivery.message.id);
        tracing::warn!(%queue, %id, %error, "a message was lost to others before it was finished");
        state.held.forget(partition);
        state.groups.remove(&partition);
        state.waiting.retain(|waiting| waiting.position.partition != partition);
    }

    /// Does the same with all, ten in a request; what SQS says of each.
    pub(super) async fn act(
        &self,
        all: &[Arc<Held>],
        act: Act,
        limit: Duration,
    ) -> Vec<(Arc<Held>, Result<(), Trouble>)> {
        let mut queues: HashMap<&str, Vec<Arc<Held>>> = HashMap::new();
        for held in all {
            queues.entry(&held.queue.url).or_default().push(Arc::clone(held));
        }
        let mut requests = Vec::new();
        for (url, held) in queues {
            requests.extend(held.chunks(ENTRIES).map(|part| (url.to_owned(), part.to_vec())));
        }
        let requests = requests.into_iter().map(|(url, part)| async move {
            let asked = timeout(limit, self.ask(&url, &part, act)).await;
            let asked =
                asked.unwrap_or_else(|_| Err(Trouble::Unknown("it did not answer in time".to_owned())));
            let result = |(id, held): (usize, Arc<Held>)| match &asked {
                Ok(answer) => (held, answer.of(&id.to_string())),
                Err(trouble) => (held, Err(trouble.clone())),
            };
            part.into_iter().enumerate().map(result).collect::<Vec<_>>()
        });
        stream::iter(requests).buffer_unordered(WINDOW).concat().await
    }

    async fn ask(&self, url: &str, part: &[Arc<Held>], act: Act) -> Result<Answer, Trouble> {
        match act {
            Act::Finish => {
                let mut request = self.client.delete_message_batch().queue_url(url);
                for (id, held) in part.iter().enumerate() {
                    let entry = DeleteMessageBatchRequestEntry::builder().id(id.to_string());
                    let entry = entry.receipt_handle(&held.receipt).build();
                    request = request.entries(entry.expect("it has all it needs"));
                }
                let answer = request.send().await.map_err(|error| trouble(&error))?;
                let done = answer.successful.into_iter().map(|entry| entry.id).collect();
                Ok(Answer { done, failed: answer.failed })
            }
            Act::Hide(time) => {
                let seconds = i32::try_from(time.as_secs()).unwrap_or(i32::MAX);
                let mut request = self.client.change_message_visibility_batch().queue_url(url);
                for (id, held) in part.iter().enumerate() {
                    let entry = ChangeMessageVisibilityBatchRequestEntry::builder().id(id.to_string());
                    let entry = entry.receipt_handle(&held.receipt).visibility_timeout(seconds).build();
                    request = request.entries(entry.expect("it has all it needs"));
                }
                let answer = request.send().await.map_err(|error| trouble(&error))?;
                let done = answer.successful.into_iter().map(|entry| entry.id).collect();
                Ok(Answer { done, failed: answer.failed })
            }
        }
    }
}

/// What SQS says of the entries of a request.
struct Answer {
    done: Vec<String>,
    failed: Vec<BatchResultErrorEntry>,
}

impl Answer {
    fn of(&self, id: &str) -> Result<(), Trouble> {
        match self.failed.iter().find(|entry| entry.id() == id) {
            Some(failed) => Err(error::entry(failed)),
            None if self.done.iter().any(|done| done == id) => Ok(()),
            None => Err(Trouble::Unknown("its answer does not name the message".to_owned())),
        }
    }
}

impl Held {
    pub(super) fn queue(&self) -> &str {
        &self.queue.name
    }

    fn until(&self) -> MutexGuard<'_, Instant> {
        self.until.lock().expect("nobody panics while holding it")
    }
}

impl State {
    /// Where a message is: after all others of its group, or in a partition of its own.
    fn place(&mut self, queue: &Queue, message: &Message, fifo: bool) -> Position {
        self.received += 1;
        let received = self.received;
        let group = message.attributes.as_ref().and_then(|known| known.get(&System::MessageGroupId));
        let Some(group) = group.filter(|_| fifo) else {
            return Position { partition: received.unsigned_abs(), offset: 0 };
        };
        let name = format!("{}/{group}", queue.name);
        let mut partition = fnv1a(name.as_bytes());
        // Two groups in one partition would finish each other's messages.
        while self.groups.get(&partition).is_some_and(|group| group.name != name) {
            partition = partition.wrapping_add(1);
        }
        self.groups.entry(partition).or_insert(Group { name, held: 0 }).held += 1;
        Position { partition, offset: received }
    }

    /// Counts one that is held again.
    fn count(&mut self, held: &Held) {
        if let Some(group) = self.groups.get_mut(&held.delivery.position.partition) {
            group.held += 1;
        }
    }

    /// A group of which nothing is held is forgotten: there are as many groups as there are keys.
    fn let_go(&mut self, all: &[Arc<Held>]) {
        for held in all {
            let partition = held.delivery.position.partition;
            if let Some(group) = self.groups.get_mut(&partition) {
                group.held -= 1;
                if group.held == 0 {
                    self.groups.remove(&partition);
                }
            }
        }
    }
}
