//! Subscriber: one streaming pull for each topic, read ahead as far as [`Config::window`](super::Config::window) goes.
//!
//! A task of its own reads each stream, so that a `receive` that is dropped takes nothing with it, and the client extends
//! the leases of all that was read until it is acknowledged.
//!
//! What is given back stays leased and is delivered again from here, before anything else: the service would send it
//! again only after all before it in its key are settled, and would let what is on its way overtake it. It goes to other
//! members when this one closes or dies.
//!
//! The client keeps outages to itself, and after a long one takes up to a minute to open its stream again. So a member that
//! hears nothing asks now and then whether the service is there, and says so if it is not: whoever joins again has a
//! fresh stream.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::DateTime;
use futures::future::{join, join_all, try_join_all};
use google_cloud_pubsub::client;
use google_cloud_pubsub::model;
use google_cloud_pubsub::subscriber::handler::Handler;
use google_cloud_pubsub::subscriber::{MessageStream, ShutdownBehavior, ShutdownToken};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::error::{self, Failure};
use super::setup::Unfit;
use super::{Broker, EVENT_PREFIX, Inner};
use crate::envelope::{Arrived, read};
use crate::partition::fnv1a;
use crate::unfinished::Unfinished;
use crate::{Delivery, Position, ReceiveError, Subscriber, Subscription};

/// After this long without a message somebody should look whether there is still a service.
const SILENCE: Duration = Duration::from_secs(10);

/// What was sent to a member before it said farewell has arrived by then.
const UNDER_WAY: Duration = Duration::from_millis(500);

/// For how long a word to the service may be on its way.
const ON_ITS_WAY: Duration = Duration::from_millis(100);

/// How long a farewell may take: what is not said by then, the end of the leases says.
const FAREWELL: Duration = Duration::from_secs(5);

#[async_trait]
impl Subscriber for Broker {
    async fn subscribe(&self, group: &str, topics: &[String]) -> Result<Box<dyn Subscription>, ReceiveError> {
        let inner = &self.inner;
        let ready = try_join_all(topics.iter().map(|topic| inner.prepare_subscription(group, topic)));
        let ready = timeout(inner.config.timeout, ready).await.unwrap_or(Err(Unfit::Late));
        ready.map_err(Unfit::receive)?;
        let clients = inner.clients().await.map_err(|error| Unfit::Client(error).receive())?;
        let (sender, incoming) = mpsc::unbounded_channel();
        let streams = topics.iter().enumerate().map(|(topic, name)| {
            let path = inner.subscription_path(group, name);
            let stream = inner.stream(&clients.subscriber, &path);
            let end = stream.shutdown_token();
            let reader = Reader { topic, path, create: inner.config.create, sender: sender.clone() };
            Stream { end, task: tokio::spawn(reader.run(stream)) }
        });
        Ok(Box::new(Member {
            inner: Arc::clone(inner),
            group: group.to_owned(),
            topics: topics.to_vec(),
            streams: streams.collect(),
            held: Unfinished::default(),
            again: VecDeque::new(),
            incoming,
            next: 0,
            failed: None,
            heard: Instant::now(),
        }))
    }
}

impl Inner {
    fn stream(&self, subscriber: &client::Subscriber, path: &str) -> MessageStream {
        subscriber
            .subscribe(path)
            .set_max_outstanding_messages(self.config.window)
            .set_max_lease_extension(self.config.ack_deadline)
            // As long as the work takes: it is not the client that decides when a member is dead.
            .set_max_lease(Duration::MAX)
            .set_shutdown_behavior(ShutdownBehavior::WaitForProcessing)
            .build()
    }
}

/// Reads a stream until it ends or nobody listens.
struct Reader {
    topic: usize,
    path: String,
    create: bool,
    sender: mpsc::UnboundedSender<Result<Message, ReceiveError>>,
}

impl Reader {
    async fn run(self, mut stream: MessageStream) {
        // The service sends no more than the window, so what waits in the channel is bounded.
        while let Some(next) = stream.next().await {
            let next = match next {
                Ok((content, handler)) => Ok(Message { topic: self.topic, content, handler }),
                Err(error) if self.create && error::failure(&error) == Failure::Missing => {
                    // Whoever subscribes anew makes it again.
                    Err(ReceiveError::Unreachable(format!("the subscription {} is gone", self.path)))
                }
                Err(error) => Err(error::receive(&error, &format!("subscription {}", self.path))),
            };
            if self.sender.send(next).is_err() {
                return;
            }
        }
    }
}

/// A message that is leased to us.
struct Message {
    /// Which of the member's topics.
    topic: usize,
    content: model::Message,
    handler: Handler,
}

/// A stream whose end gives back what it brought.
struct Stream {
    end: ShutdownToken,
    task: JoinHandle<()>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Member {
    inner: Arc<Inner>,
    group: String,
    topics: Vec<String>,
    streams: Vec<Stream>,
    // What is dropped is given back, so the earlier messages of a key come first.
    held: Unfinished<Message>,
    /// What was given back, in the order in which it must come again.
    again: VecDeque<Message>,
    incoming: mpsc::UnboundedReceiver<Result<Message, ReceiveError>>,
    /// Offsets are numbers of deliveries: a message that comes again has another.
    next: i64,
    /// Why a stream ended: said to whoever asks next.
    failed: Option<ReceiveError>,
    /// When the service last gave a sign of life, or was asked for one.
    heard: Instant,
}

#[async_trait]
impl Subscription for Member {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let mut deliveries = Vec::new();
        while deliveries.len() < max {
            let message = match (self.again.pop_front(), deliveries.is_empty()) {
                (Some(message), _) => message,
                // The only point at which this can be dropped: nothing has been taken by then.
                (None, true) => self.incoming().await?,
                (None, false) => match self.incoming.try_recv() {
                    Ok(Ok(message)) => message,
                    // What came before it comes first.
                    Ok(Err(error)) => {
                        self.failed = Some(error);
                        break;
                    }
                    Err(_) => break,
                },
            };
            deliveries.push(self.deliver(message));
        }
        Ok(deliveries)
    }

    async fn acknowledge(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        let mut confirmations = Vec::new();
        for message in positions.iter().flat_map(|position| self.held.up_to(*position)) {
            match message.handler {
                Handler::ExactlyOnce(handler) => confirmations.push(handler.confirmed_ack()),
                handler => handler.ack(),
            }
        }
        // The client itself would wait for ten minutes.
        let confirmed = timeout(self.inner.config.timeout, join_all(confirmations)).await;
        let late = |_| ReceiveError::Unreachable("no acknowledgement was confirmed in time".to_owned());
        for confirmed in confirmed.map_err(late)? {
            confirmed.or_else(|error| error::acknowledged(&error))?;
        }
        Ok(())
    }

    async fn give_back(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        for position in positions {
            // Whatever of its partition waits there already comes after it.
            for message in self.held.from(*position).into_iter().rev() {
                self.again.push_front(message);
            }
        }
        Ok(())
    }

    async fn close(mut self: Box<Self>) {
        // What is under way would stay leased to nobody. It is let in, up to the window, and not dropped one by one:
        // that would ask for more.
        let let_in = async {
            while let Ok(Some(Ok(message))) = timeout(UNDER_WAY, self.incoming.recv()).await {
                self.again.push_back(message);
            }
        };
        let _ = timeout(FAREWELL, let_in).await;
        let Self { streams, held, mut again, mut incoming, .. } = *self;
        let hang_up = join_all(streams.iter().map(|stream| stream.end.shutdown()));
        // Acknowledgements that were not sent yet are sent. Everything else is given back by being dropped, once the
        // service knows that all readers have hung up: before that it could be sent to us again.
        let give_back = async {
            while let Some(last) = incoming.recv().await {
                again.extend(last);
            }
            sleep(ON_ITS_WAY).await;
            drop(held);
            drop(again);
        };
        if timeout(FAREWELL, join(hang_up, give_back)).await.is_err() {
            tracing::debug!("Pub/Sub did not hear that a member left");
        }
    }
}

impl Member {
    /// The next message that comes from the service.
    async fn incoming(&mut self) -> Result<Message, ReceiveError> {
        loop {
            let came = timeout_at(self.heard + SILENCE, self.incoming.recv()).await;
            self.heard = Instant::now();
            match came {
                Ok(Some(message)) => return message,
                Ok(None) => return Err(ReceiveError::Unreachable("the stream has ended".to_owned())),
                Err(_) => self.ask().await?,
            }
        }
    }

    /// Whether the service is there, and has what we wait for.
    async fn ask(&self) -> Result<(), ReceiveError> {
        let all = self.topics.iter().map(|topic| self.inner.prepare_subscription(&self.group, topic));
        let all = timeout(self.inner.config.timeout, try_join_all(all)).await;
        all.unwrap_or(Err(Unfit::Late)).map(drop).map_err(Unfit::receive)
    }

    fn deliver(&mut self, message: Message) -> Delivery {
        let topic = &self.topics[message.topic];
        let model::Message { data, attributes, message_id, publish_time, ordering_key, .. } =
            message.content.clone();
        let partition = match ordering_key.is_empty() {
            true => format!("{topic}/{message_id}"),
            false => format!("{topic}//{ordering_key}"),
        };
        let position = Position { partition: fnv1a(partition.as_bytes()), offset: self.next };
        self.next += 1;
        let stored_at = publish_time
            .and_then(|time| DateTime::from_timestamp(time.seconds(), u32::try_from(time.nanos()).ok()?));
        let arrived = Arrived {
            topic,
            payload: data,
            content_type: None,
            key: Some(ordering_key).filter(|key| !key.is_empty()),
            fields: attributes.into_iter().collect(),
            place: message_id,
            stored_at,
        };
        let delivery = read(arrived, EVENT_PREFIX, position);
        self.held.insert(position, message);
        delivery
    }
}
