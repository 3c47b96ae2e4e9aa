//! One consumer group's way of handling messages.
//!
//! The consumer's loop, the retries of parked messages and a person who tries a message by hand all come through
//! here, so that each of them recognises duplicates and keeps order in the same way.

use std::sync::Arc;
use std::time::Duration;

use fail::fail_point;
use message::MessageId;
use store::{Arrival, Error, Inbox, InboxRules, Latency, Receipt};
use tracing::{debug, error, info, warn};

use crate::acknowledge::{Acknowledge, Ear, Received, Untold};
use crate::breaker::Backoff;
use crate::cost::{Cost, Step};
use crate::handler::Handler;
use crate::in_store;
use crate::reserved;
use crate::shares::Sharing;
use crate::suspect::Suspects;

/// Messages handled at the same time outside the store, when nothing else is said.
const CONCURRENCY: usize = 16;

/// How long a handler of one's own may take with a message, when nothing else is said.
const CUSTOM_LIMIT: Duration = Duration::from_secs(30);

/// Messages that the store does in one transaction at first; more while they are quick.
const IN_STORE_BATCH: usize = 250;

/// Ids are kept this long, when nothing else is said.
const KEEP_IDS: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Times that [`Group::process`] tells the producer before it says that it could not.
const TELLINGS: usize = 5;

/// A consumer group: its name, where it remembers, what it does with a message and who hears of it.
pub struct Group {
    name: Arc<str>,
    store: Arc<dyn Inbox>,
    handler: Handler,
    rules: InboxRules,
    ear: Ear,
    concurrency: usize,
    lease: Option<Duration>,
    keep_ids: Duration,
    once: bool,
    suspects: Arc<Suspects>,
    sharing: Arc<Sharing>,
    cost: Cost,
}

impl Group {
    /// A group that acknowledges in the store if `rules` say so, and to nobody else.
    pub fn new(name: impl Into<String>, store: Arc<dyn Inbox>, handler: Handler, rules: InboxRules) -> Self {
        Self {
            name: name.into().into(),
            store,
            handler,
            rules,
            ear: Ear::Nobody,
            concurrency: CONCURRENCY,
            lease: None,
            keep_ids: KEEP_IDS,
            once: false,
            suspects: Arc::default(),
            sharing: Arc::default(),
            cost: Cost::default(),
        }
    }

    /// Who hears that a message is done.
    #[must_use]
    pub fn acknowledge(mut self, acknowledge: Acknowledge) -> Self {
        self.rules.acknowledge = matches!(acknowledge, Acknowledge::InStore);
        self.ear = Ear::of(&acknowledge);
        self
    }

    /// How many messages are handled at the same time outside the store.
    #[must_use]
    pub fn concurrency(mut self, concurrency: usize) -> Self {
        self.concurrency = concurrency.max(1);
        self
    }

    /// How long a message is reserved for a handler outside the store. A handler of one's own may take half of it.
    ///
    /// After a crash, messages in its hands wait until the lease is over; so it should not be much longer than
    /// needed. It is never shorter than twice the time that the handler may take.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// How long the ids of messages are kept to recognise duplicates.
    #[must_use]
    pub fn keep_ids(mut self, keep: Duration) -> Self {
        self.keep_ids = keep;
        self
    }

    /// A message is handled once at most: the broker may forget it before its work begins. What is not done then is lost,
    /// and counted; a failure is not tried again and waits for a person.
    #[must_use]
    pub fn at_most_once(mut self) -> Self {
        self.once = true;
        self.rules.retry.max_attempts = 1;
        // What waits behind another would be begun later, and again after a crash.
        self.rules.ordered = false;
        self.rules.hold_dead = false;
        self
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kind of its handler: `log`, `sql`, `http`, `command` or `closure`.
    pub fn handler_kind(&self) -> &'static str {
        self.handler.kind()
    }

    /// How long the store took to tell what is new from what is not, for a batch, since the group was made. `reserve` is
    /// that question and `conclude` writes the marks of what is done; where the store does the work too there is only
    /// `process`, which has the time of the work in it.
    pub fn deduplication(&self) -> Vec<(&'static str, Latency)> {
        match self.handler.in_store() {
            Some(_) => self.cost.known(&[Step::Process]),
            None => self.cost.known(&[Step::Reserve, Step::Conclude]),
        }
    }

    /// Does the work of each arrival that was not done before, and tells the producer. One receipt each, in order.
    ///
    /// # Errors
    /// When the store cannot be used, or the producer cannot be told. Work that was done stays done: the same call
    /// again answers [`Receipt::Duplicate`] for it and tells the producer again.
    ///
    /// # Cancel safety
    /// A call that is dropped may have done any part of the work; repeat it to find out.
    pub async fn process(&self, arrivals: Vec<Arrival>) -> Result<Vec<Receipt>, Error> {
        let received: Vec<_> = arrivals.iter().map(|arrival| Received::new(arrival, &self.name)).collect();
        let receipts = self.handle(arrivals).await?;
        let mut finished = done(received, &receipts);
        let mut backoff = Backoff::default();
        for telling in 1.. {
            let Err(untold) = self.tell(finished).await else { break };
            let wait = backoff.next();
            if telling == TELLINGS {
                let reason = format!(
                    "the work is done, but the producer does not take its acknowledgement: {}",
                    untold.error
                );
                return Err(Error::Unavailable { reason, retry_after: wait });
            }
            finished = untold.messages;
            tokio::time::sleep(wait).await;
        }
        Ok(receipts)
    }

    /// Does the work of each arrival that was not done before. One receipt each, in order.
    pub(crate) async fn handle(&self, arrivals: Vec<Arrival>) -> Result<Vec<Receipt>, Error> {
        let ids: Vec<_> = arrivals.iter().map(|arrival| arrival.message.id).collect();
        let logged = matches!(self.handler, Handler::Log).then(|| arrivals.clone());
        let receipts = match self.handler.in_store() {
            Some(work) => {
                let receipts = in_store::handle(self, arrivals, &work).await?;
                fail_point!("inbox::handled");
                receipts
            }
            None => reserved::handle(self, arrivals).await?,
        };
        fail_point!("inbox::marked");
        if receipts.len() != ids.len() {
            let (asked, got) = (ids.len(), receipts.len());
            return Err(Error::Broken(format!("{got} receipts came for {asked} arrivals")));
        }
        for (Arrival { message, .. }, receipt) in logged.iter().flatten().zip(&receipts) {
            if *receipt == Receipt::Done {
                let (id, topic, key, bytes) =
                    (message.id, &message.topic, &message.key, message.payload.len());
                info!(message_id = %id, topic, key, group = self.name(), bytes, "handled");
            }
        }
        for (id, receipt) in ids.into_iter().zip(&receipts) {
            self.log(id, receipt);
        }
        Ok(receipts)
    }

    fn log(&self, id: MessageId, receipt: &Receipt) {
        let group = self.name();
        match receipt {
            Receipt::Done => debug!(message_id = %id, group, "done"),
            Receipt::Duplicate => debug!(message_id = %id, group, "done before; nothing was done again"),
            Receipt::Parked { error } => {
                warn!(message_id = %id, group, error, "kept in the inbox for a later try")
            }
            Receipt::Dead { error } => {
                warn!(message_id = %id, group, error, "dead: kept in the inbox for a person")
            }
            Receipt::Unavailable { error } => {
                debug!(message_id = %id, group, error, "not handled; it comes again")
            }
            Receipt::Busy => debug!(message_id = %id, group, "another worker has it; it comes again"),
            Receipt::Lost { error } => error!(message_id = %id, group, why = error, "lost: it is tried once"),
        }
    }

    /// Tells the producer once that these are done.
    pub(crate) async fn tell(&self, finished: Vec<Received>) -> Result<(), Untold> {
        if finished.is_empty() || !self.ear.listens() {
            return Ok(());
        }
        self.ear.tell(&self.name, finished).await
    }

    /// How many messages are worth receiving together at first.
    pub(crate) fn batch(&self) -> usize {
        // Reserved messages wait for their turn under their lease: a few for each worker are enough.
        if self.handler.in_store().is_some() { IN_STORE_BATCH } else { self.concurrency.saturating_mul(8) }
    }

    /// How long the handler may take with one message.
    pub(crate) fn limit(&self) -> Duration {
        let custom = || self.lease.map_or(CUSTOM_LIMIT, |lease| lease / 2);
        self.handler.limit().unwrap_or_else(custom)
    }

    /// How long a reservation lasts: long enough to work through some of the batch before it must be renewed.
    pub(crate) fn reservation(&self) -> Duration {
        let least = self.limit() * 2 + reserved::COMPANY;
        self.lease.unwrap_or(least).max(least)
    }

    pub(crate) fn shared_name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    pub(crate) fn store(&self) -> &dyn Inbox {
        self.store.as_ref()
    }

    pub(crate) fn handler(&self) -> &Handler {
        &self.handler
    }

    pub(crate) fn rules(&self) -> &InboxRules {
        &self.rules
    }

    pub(crate) fn cost(&self) -> &Cost {
        &self.cost
    }

    pub(crate) fn sharing(&self) -> &Arc<Sharing> {
        &self.sharing
    }

    pub(crate) fn suspects(&self) -> &Arc<Suspects> {
        &self.suspects
    }

    /// The topic and key within which order matters to this group.
    pub(crate) fn lane(&self, arrival: &Arrival) -> Option<(String, String)> {
        let message = &arrival.message;
        let key = message.key.as_ref().filter(|_| self.rules.ordered)?;
        Some((message.topic.clone(), key.clone()))
    }

    /// Whether the broker forgets a message before its work begins.
    pub(crate) fn is_at_most_once(&self) -> bool {
        self.once
    }

    pub(crate) fn workers(&self) -> usize {
        self.concurrency
    }

    pub(crate) fn id_retention(&self) -> Duration {
        self.keep_ids
    }
}

/// Those that the producer should hear of.
pub(crate) fn done(received: Vec<Received>, receipts: &[Receipt]) -> Vec<Received> {
    let is_done = |receipt: &Receipt| matches!(receipt, Receipt::Done | Receipt::Duplicate);
    let done = received.into_iter().zip(receipts).filter(|(_, receipt)| is_done(receipt));
    done.map(|(message, _)| message).collect()
}
