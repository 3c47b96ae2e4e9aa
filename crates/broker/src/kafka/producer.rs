//! One producer of librdkafka, and the calls that wait for its reports.
//!
//! A report comes for every message that was handed over, whatever happens: stored, refused, given up, or thrown away.
//! Nothing is `Confirmed` by anything else.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::DeliveryResult;
use rdkafka::producer::{BaseRecord, Producer, ProducerContext, PurgeConfig, ThreadedProducer};
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::client::{Aside, Ear, log};
use super::config::{Config, millis};
use super::error;
use super::partition::{Acquainted, Spot};
use super::topics::rest;

/// How long a full queue is left alone before the next try.
const PAUSE: Duration = Duration::from_millis(1);

/// Between two looks whether a report is still counted.
const COUNTED_OUT: Duration = Duration::from_micros(50);

/// How long after a purge the reports of what was purged may take.
const PURGED_WITHIN: Duration = Duration::from_secs(1);

/// A record on its way to librdkafka.
pub(super) type Record<'a> = BaseRecord<'a, [u8], [u8], Box<Ticket>>;

/// Settings of a producer that keeps the promises of [`Guarantees`](crate::Guarantees); several of librdkafka's own defaults would not.
fn settings(config: &Config, batch: usize) -> rdkafka::ClientConfig {
    let mut client = config.client();
    client.set("acks", "all").set("max.in.flight.requests.per.connection", "5");
    if config.once {
        client.set("enable.idempotence", "false").set("message.send.max.retries", retries_of_once());
    } else {
        // What follows a message that failed for good is not sent: see the rule on order.
        client.set("enable.idempotence", "true").set("enable.gapless.guarantee", "true");
    }
    // The call gives up first and throws the producer away: librdkafka alone would go on with the next message.
    client.set("message.timeout.ms", millis(config.timeout * 2 + Duration::from_secs(30)));
    client.set("request.timeout.ms", millis(config.timeout));
    client.set("topic.metadata.propagation.max.ms", millis(config.timeout / 2));
    client.set("linger.ms", millis(config.linger)).set("compression.type", &config.compression);
    client.set("message.max.bytes", largest(config).to_string());
    client.set("batch.size", batch.to_string()).set("batch.num.messages", "10000");
    client
}

/// How often a client that sends once tries again. The proof of it plants another number, and must find what comes twice.
fn retries_of_once() -> &'static str {
    fail::fail_point!("kafka::retrying", |_| "5");
    "0"
}

/// Bytes of the largest record that may be sent: payload, key and headers.
pub(super) fn largest(config: &Config) -> usize {
    (config.max_payload + (64 << 10)).max(1_000_000)
}

/// One producer. Once it failed it is of no use.
pub(super) struct Line {
    producer: Aside<ThreadedProducer<Reports>>,
    /// Bytes of a batch at most.
    pub(super) batch: usize,
    /// Who knows it; nobody has to where nothing is sent again.
    known: Option<Acquainted>,
    /// One call at a time makes it known.
    introducing: tokio::sync::Mutex<()>,
    /// What was on its way was thrown away.
    spent: AtomicBool,
}

impl Line {
    pub(super) fn new(config: &Config, batch: usize) -> KafkaResult<Self> {
        let known = (!config.once).then(Acquainted::default);
        Self::make(&settings(config, batch), batch, known)
    }

    fn make(settings: &rdkafka::ClientConfig, batch: usize, known: Option<Acquainted>) -> KafkaResult<Self> {
        let producer = Aside::new(settings.create_with_context(Reports::default())?);
        let (introducing, spent) = (tokio::sync::Mutex::default(), AtomicBool::new(false));
        Ok(Self { producer, batch, known, introducing, spent })
    }

    /// A producer of transactions under this id: whoever had the id before can commit nothing any more.
    pub(super) fn transactional(config: &Config, batch: usize, id: &str) -> KafkaResult<Self> {
        Self::open_for(config.timeout * 2 + Duration::from_secs(5), config, batch, id)
    }

    /// The same, and Kafka ends a transaction that is open for longer than `limit`.
    pub(super) fn open_for(limit: Duration, config: &Config, batch: usize, id: &str) -> KafkaResult<Self> {
        let mut client = settings(config, batch);
        // A gap ends the transaction, not the producer.
        client.set("enable.gapless.guarantee", "false").set("transactional.id", id);
        client.set("message.timeout.ms", millis(limit.min(config.timeout * 2)));
        client.set("transaction.timeout.ms", millis(limit));
        Self::make(&client, batch, Some(Acquainted::default()))
    }

    /// The steps of a transaction, which wait for the network: not for a thread of the runtime.
    pub(super) async fn step(
        self: &Arc<Self>,
        step: impl Fn(&ThreadedProducer<Reports>) -> KafkaResult<()> + Send + 'static,
        until: Instant,
    ) -> KafkaResult<()> {
        let line = Arc::clone(self);
        let stepped = tokio::task::spawn_blocking(move || {
            loop {
                match step(&line.producer) {
                    Err(KafkaError::Transaction(error)) if error.is_retriable() && Instant::now() < until => {
                    }
                    stepped => return stepped,
                }
            }
        });
        stepped.await.unwrap_or(Err(KafkaError::Canceled))
    }

    /// Hands the records of a call over: `record` makes each, and `spots` says where they go. What is not taken is settled.
    pub(super) async fn hand_over_all<'r>(
        &self,
        call: &Arc<Call>,
        spots: &[Spot<'_>],
        record: impl Fn(usize, Box<Ticket>) -> Record<'r>,
        until: Instant,
    ) {
        let mut done = vec![false; spots.len()];
        if let Some(known) = &self.known
            && !known.strangers(spots).is_empty()
        {
            self.introduce(known, call, spots, &record, until).await;
            done = call.settled();
        }
        let mut failed = None;
        for number in (0..spots.len()).filter(|number| !done[*number]) {
            // After one that could not be handed over, none is: it might be of the same key.
            let handed = match failed {
                Some(code) => Err(code),
                None => self.hand_over(record(number, call.ticket(number)), until).await,
            };
            if let Err(code) = handed {
                failed = failed.or((code == Code::PurgeQueue).then_some(code));
                call.settle(number, Err(code));
            }
        }
    }

    /// Sends the first message to each partition that does not know this producer, and waits for it. Where it is not
    /// stored, the others of that partition are not sent.
    async fn introduce<'r>(
        &self,
        known: &Acquainted,
        call: &Call,
        spots: &[Spot<'_>],
        record: impl Fn(usize, Box<Ticket>) -> Record<'r>,
        until: Instant,
    ) {
        // Another call may be at the same partitions.
        let alone = tokio::time::timeout_at(until, self.introducing.lock()).await;
        let firsts = known.strangers(spots);
        let vanguard = Call::new(firsts.len());
        for (n, number) in firsts.iter().enumerate() {
            let handed = match &alone {
                Ok(_) => self.hand_over(record(*number, vanguard.ticket(n)), until).await,
                Err(_) => Err(Code::PurgeQueue),
            };
            if let Err(code) = handed {
                vanguard.settle(n, Err(code));
            }
        }
        self.finish(&vanguard, until).await;
        for (number, report) in firsts.into_iter().zip(vanguard.reported()) {
            call.settle(number, report);
            if report.is_ok() {
                known.meet(spots[number]);
                continue;
            }
            let why = match report {
                // Nothing passes, whatever it is.
                Err(code) if error::of_the_topic(code) => code,
                _ => Code::PurgeQueue,
            };
            for later in (number + 1..spots.len()).filter(|later| spots[*later] == spots[number]) {
                call.settle(later, Err(why));
            }
        }
    }

    /// Hands a record over. While the queue is full, it waits for room.
    ///
    /// # Errors
    /// `PurgeQueue` where it is the producer that cannot take it.
    pub(super) async fn hand_over(&self, mut record: Record<'_>, until: Instant) -> Result<(), Code> {
        loop {
            if self.spent.load(Ordering::SeqCst) {
                return Err(Code::PurgeQueue);
            }
            match self.producer.send(record) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(Code::QueueFull), back)) if Instant::now() < until => {
                    record = back;
                    tokio::time::sleep(PAUSE).await;
                }
                Err((failed, _)) => {
                    let code = error::code(&failed);
                    if code == Code::UnknownPartition {
                        // Partitions were added, or are fewer, and this producer does not know it.
                        self.spent.store(true, Ordering::SeqCst);
                        return Err(code);
                    }
                    let of_line = error::of_the_producer(code) || code == Code::QueueFull;
                    return Err(if of_line { Code::PurgeQueue } else { code });
                }
            }
        }
    }

    /// Waits for the last report of `call`. Whatever is not settled by `until`, or when the producer fails, is thrown
    /// away. Says whether the producer is still good.
    pub(super) async fn finish(&self, call: &Call, until: Instant) -> bool {
        let reports = self.producer.context();
        let settled = tokio::select! {
            () = call.finished() => true,
            () = reports.failed() => false,
            () = tokio::time::sleep_until(until) => false,
        };
        let dead = reports.dead.load(Ordering::SeqCst) || self.spent.load(Ordering::SeqCst);
        if settled && !dead && self.producer.client().fatal_error().is_none() {
            return true;
        }
        self.spent.store(true, Ordering::SeqCst);
        self.producer.purge(PurgeConfig::default().queue().inflight());
        drop(tokio::time::timeout(PURGED_WITHIN, call.finished()).await);
        false
    }

    /// Commits the transaction, all of whose messages are stored.
    pub(super) async fn commit(self: &Arc<Self>, until: Instant) -> KafkaResult<()> {
        let commit = move |producer: &ThreadedProducer<Reports>| {
            // The last report is counted for a moment after it was given, and the client's own wait for it lasts 100 ms.
            while producer.in_flight_count() > 0 && Instant::now() < until {
                std::thread::sleep(COUNTED_OUT);
            }
            producer.commit_transaction(rest(until))
        };
        self.step(commit, until).await
    }

    /// Ends the transaction: nothing of it is seen. Answers whether another may begin. Not after messages were thrown
    /// away: they may still reach a server, which would take them for the next one's.
    pub(super) async fn abort(self: &Arc<Self>, until: Instant) -> bool {
        let aborted = self.step(move |producer| producer.abort_transaction(rest(until)), until).await;
        aborted.is_ok() && !self.spent.load(Ordering::SeqCst)
    }

    /// Whether another has begun transactions under the same id.
    pub(super) fn is_fenced(&self) -> bool {
        let failed = self.producer.client().fatal_error().map(|(code, _)| code);
        matches!(failed, Some(Code::Fenced | Code::ProducerFenced | Code::InvalidProducerEpoch))
    }

    /// What librdkafka complained of last.
    pub(super) fn said(&self) -> String {
        self.producer.context().ear.said()
    }
}

/// Where the reports of a producer go.
#[derive(Default)]
pub(super) struct Reports {
    ear: Ear,
    dead: AtomicBool,
    died: Notify,
}

impl Reports {
    async fn failed(&self) {
        let died = self.died.notified();
        tokio::pin!(died);
        // Asked before looking, or a failure between the two would be missed.
        died.as_mut().enable();
        if !self.dead.load(Ordering::SeqCst) {
            died.await;
        }
    }
}

impl ClientContext for Reports {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        log(level, facility, text);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.ear.hear(&error, reason);
        if matches!(error, KafkaError::Global(Code::Fatal)) {
            self.dead.store(true, Ordering::SeqCst);
            self.died.notify_waiters();
        }
    }
}

impl ProducerContext for Reports {
    type DeliveryOpaque = Box<Ticket>;

    fn delivery(&self, result: &DeliveryResult<'_>, ticket: Box<Ticket>) {
        let report = match result {
            Ok(_) => Ok(()),
            Err((failed, _)) => Err(error::code(failed)),
        };
        ticket.call.settle(ticket.place, report);
    }
}

/// Which message of which call a report is about.
pub(super) struct Ticket {
    call: Arc<Call>,
    place: usize,
}

/// A report: stored, or why not.
pub(super) type Report = Result<(), Code>;

/// The reports that a call waits for.
pub(super) struct Call {
    reports: Mutex<Vec<Option<Report>>>,
    open: AtomicUsize,
    last: Notify,
}

impl Call {
    pub(super) fn new(messages: usize) -> Arc<Self> {
        let (reports, open) = (Mutex::new(vec![None; messages]), AtomicUsize::new(messages));
        Arc::new(Self { reports, open, last: Notify::new() })
    }

    pub(super) fn ticket(self: &Arc<Self>, place: usize) -> Box<Ticket> {
        Box::new(Ticket { call: Arc::clone(self), place })
    }

    pub(super) fn settle(&self, place: usize, report: Report) {
        self.reports()[place] = Some(report);
        if self.open.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.last.notify_one();
        }
    }

    /// Which are settled.
    fn settled(&self) -> Vec<bool> {
        self.reports().iter().map(Option::is_some).collect()
    }

    /// What was reported. What was not is perhaps stored.
    pub(super) fn reported(&self) -> Vec<Report> {
        self.reports().iter().map(|report| report.unwrap_or(Err(Code::PurgeInflight))).collect()
    }

    async fn finished(&self) {
        while self.open.load(Ordering::SeqCst) > 0 {
            self.last.notified().await;
        }
    }

    fn reports(&self) -> MutexGuard<'_, Vec<Option<Report>>> {
        self.reports.lock().expect("nobody panics while holding it")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_that_promises_rest_on_are_not_left_to_defaults() {
        let settings = settings(&Config::new("127.0.0.1:9092"), 1_000_000);
        let expected = [
            ("enable.idempotence", "true"),
            ("enable.gapless.guarantee", "true"),
            ("acks", "all"),
            ("max.in.flight.requests.per.connection", "5"),
            ("allow.auto.create.topics", "false"),
            ("message.timeout.ms", "50000"),
            ("request.timeout.ms", "10000"),
        ];
        for (name, value) in expected {
            assert_eq!(settings.get(name), Some(value), "{name}");
        }
        settings.create_native_config().expect("librdkafka takes them");
    }

    #[test]
    fn a_producer_that_sends_once_has_no_retries() {
        let settings = settings(&Config { once: true, ..Config::new("127.0.0.1:9092") }, 1_000_000);
        assert_eq!(settings.get("message.send.max.retries"), Some("0"));
        assert_eq!(settings.get("enable.idempotence"), Some("false"));
        settings.create_native_config().expect("librdkafka takes them");
    }

    #[tokio::test]
    async fn a_call_is_finished_by_its_last_report_and_an_unreported_message_is_unconfirmed() {
        let call = Call::new(2);
        call.settle(1, Err(Code::PurgeQueue));
        assert_eq!(call.reported(), [Err(Code::PurgeInflight), Err(Code::PurgeQueue)]);
        call.settle(0, Ok(()));
        call.finished().await;
        assert_eq!(call.reported(), [Ok(()), Err(Code::PurgeQueue)]);
    }

    #[tokio::test]
    async fn a_producer_that_does_not_know_a_partition_is_of_no_use_any_more() {
        let cluster = rdkafka::mocking::MockCluster::new(1).expect("an imitation can be started");
        cluster.create_topic("orders", 1, 1).expect("a topic can be made");
        let config = Config::new(cluster.bootstrap_servers());
        let line = Line::new(&config, 1_000_000).expect("librdkafka can be used");
        let until = Instant::now() + Duration::from_secs(20);
        let send = async |partition: i32| {
            let call = Call::new(1);
            let record =
                |_, ticket| Record::with_opaque_to("orders", ticket).partition(partition).payload(&b"1"[..]);
            line.hand_over_all(&call, &[("orders", partition)], record, until).await;
            (line.finish(&call, until).await, call.reported().remove(0))
        };
        assert_eq!(send(0).await, (true, Ok(())));
        assert_eq!(send(7).await, (false, Err(Code::UnknownPartition)), "it was added a moment ago");
        assert_eq!(
            send(0).await,
            (false, Err(Code::PurgeQueue)),
            "the next one asks the servers what there is"
        );
    }
}
