//! Transactions: a batch and the note of it, committed together.
//!
//! ```text
//!  take lanes ─► write claims ─► who claimed them before? ─► fence each ─► read its last note
//!                                read the claims             begin under    what is in the log and
//!                                up to one's own             its id         perhaps not settled
//! ```
//!
//! Each sender has transactional ids that nobody had before it and nobody but who fences it has after it. Fencing makes
//! Kafka end whatever was open under an id, one way or the other, and refuse the sender from then on. Of two that want
//! a lane, the later claim sees the earlier one, so one of them always stops the other.
//!
//! There are two ids, which take turns: after a commit Kafka still writes its marks, and a transaction that begins under
//! the same id before it is done has to wait for longer than most transactions take. What a note says stays true, so
//! whoever fences a sender reads the last notes of both.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use futures::future::try_join_all;
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::producer::Producer;
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio::time::Instant;
use uuid::Uuid;

use super::notes::{Claim, Notes, Other, unavailable};
use super::producer::{Call, Line as Sender, Record};
use super::topics::rest;
use super::{Broker, Inner, error};
use crate::{Line, Outcome, Outgoing, SendTogether, Transactions, WriteNote};

/// Those who had lanes of ours and were fenced, until what they sent is settled. Senders of one process often meet the same.
pub(super) type Fenced = HashMap<Uuid, Predecessor>;

/// How many are fenced at the same time.
const AT_ONCE: usize = 4;

/// One of them.
pub(super) struct Predecessor {
    /// What it claims, as far as that is not settled.
    other: Other,
    notes: Vec<Vec<u8>>,
}

#[async_trait]
impl Transactions for Broker {
    async fn sender(&self, line: &Line) -> Result<Arc<dyn SendTogether>, Outcome> {
        let inner = Arc::clone(&self.inner);
        let until = Instant::now() + inner.config.timeout;
        let notes = Notes::find(&inner, line, until).await?;
        let id = Uuid::new_v4();
        let halves = begin(&inner, &notes, id, until).await?;
        let (good, turn, book) = (AtomicBool::new(true), AtomicUsize::new(0), Mutex::default());
        Ok(Arc::new(Together { inner, halves, turn, notes, id, good, book }))
    }
}

/// Begins transactions as `id`: whoever did before can commit nothing any more, and what it had open is decided.
async fn begin(inner: &Inner, notes: &Notes, id: Uuid, until: Instant) -> Result<[Arc<Sender>; 2], Outcome> {
    let batch = inner.topics.batch().min(1_000_000);
    let half = async |half| -> KafkaResult<Arc<Sender>> {
        let sender = Sender::transactional(&inner.config, batch, &notes.transactional_id(id, half))?;
        let sender = Arc::new(sender);
        sender.step(move |producer| producer.init_transactions(rest(until)), until).await?;
        Ok(sender)
    };
    let halves = futures::try_join!(half(0), half(1));
    halves.map(|(first, second)| [first, second]).map_err(|failed| unavailable(&failed))
}

/// One that sends.
struct Together {
    inner: Arc<Inner>,
    halves: [Arc<Sender>; 2],
    /// Transactions that were begun.
    turn: AtomicUsize,
    notes: Notes,
    id: Uuid,
    good: AtomicBool,
    book: Mutex<Book>,
}

/// What a sender has to do with others.
#[derive(Default)]
struct Book {
    /// Its claims that have not ended.
    claims: Vec<Claim>,
    /// How many it made.
    made: u32,
    /// Those that it took lanes from.
    met: HashSet<Uuid>,
}

#[async_trait]
impl SendTogether for Together {
    async fn take(&self, lanes: &[u16]) -> Result<Vec<Vec<u8>>, Outcome> {
        let until = Instant::now() + self.inner.config.timeout;
        let claims = self.book().claim(lanes);
        let written: Vec<_> = claims.iter().map(|claim| self.notes.claim(*claim, self.id)).collect();
        self.notes.keep(&self.inner, &written, until).await?;
        fail::fail_point!("kafka::claimed");
        let others = self.notes.others(self.id, &claims, until).await?;
        let mut fenced = self.inner.fenced.lock().await;
        let until = Instant::now() + self.inner.config.timeout;
        let strangers: Vec<Uuid> =
            others.keys().filter(|other| !fenced.contains_key(other)).copied().collect();
        // A few at a time: however many there are, what was done stays done if the time runs out.
        for strangers in strangers.chunks(AT_ONCE) {
            try_join_all(strangers.iter().map(|other| begin(&self.inner, &self.notes, *other, until)))
                .await?;
            // They may have claimed and sent more before they were fenced.
            let claimed = self.notes.others(self.id, &claims, until).await?;
            let claimed = claimed.into_iter().filter(|(id, _)| strangers.contains(id));
            let read = claimed.map(async |(id, other)| {
                let notes = self.notes.last(id, &other, until).await?;
                Ok::<_, Outcome>((id, Predecessor { other, notes }))
            });
            fenced.extend(try_join_all(read).await?);
        }
        self.book().met.extend(others.keys());
        let known = others.keys().filter_map(|other| fenced.get(other));
        Ok(known.flat_map(|other| other.notes.clone()).collect())
    }

    fn resolve(&self, lanes: &[u16]) {
        let (inner, notes, lanes) = (Arc::clone(&self.inner), self.notes.clone(), lanes.to_vec());
        let met = self.book().met.clone();
        if met.is_empty() {
            return;
        }
        // Where this fails, the next who takes the lanes finds that everything is settled.
        tokio::spawn(async move {
            let mut fenced = inner.fenced.lock().await;
            let mut entries = Vec::new();
            for id in met {
                let Some(Predecessor { other, .. }) = fenced.get_mut(&id) else { continue };
                let settled = other.claims.extract_if(.., |(lane, _)| lanes.contains(lane));
                entries.extend(settled.map(|claim| notes.no_claim(claim, id)));
                if other.claims.is_empty() {
                    entries.extend(notes.no_notes(id, other));
                    fenced.remove(&id);
                }
            }
            drop(fenced);
            if !entries.is_empty() {
                let until = Instant::now() + inner.config.timeout;
                drop(notes.keep(&inner, &entries, until).await);
            }
        });
    }

    async fn give_back(&self, lanes: &[u16]) {
        let until = Instant::now() + self.inner.config.timeout;
        let ended: Vec<Claim> = self.book().claims.extract_if(.., |(lane, _)| lanes.contains(lane)).collect();
        let ends: Vec<_> = ended.into_iter().map(|claim| self.notes.no_claim(claim, self.id)).collect();
        drop(self.notes.keep(&self.inner, &ends, until).await);
    }

    async fn publish(&self, batch: Vec<Outgoing>, note: WriteNote<'_>) -> Vec<Outcome> {
        let until = Instant::now() + self.inner.config.timeout;
        let inner = Arc::clone(&self.inner);
        let (mut book, ready) = inner.prepare(&batch, until).await;
        if ready.is_empty() {
            return book.close();
        }
        let half = self.turn.fetch_add(1, Ordering::SeqCst) % self.halves.len();
        let sender = &self.halves[half];
        if inner.topics.batch() < sender.batch {
            // A topic takes only smaller batches than this producer makes: another is made.
            self.good.store(false, Ordering::SeqCst);
            for ready in ready {
                book.settle(ready.place, Outcome::Held);
            }
            return book.close();
        }
        let places: Vec<usize> = ready.iter().map(|ready| ready.place).collect();
        let note = note(&places);
        // Until it is known how this ends, nothing else may begin.
        self.good.store(false, Ordering::SeqCst);
        if let Err(failed) = sender.step(|producer| producer.begin_transaction(), until).await {
            let error = format!("no transaction can be begun: {}", error::text(&failed));
            let outcome = if sender.is_fenced() { Outcome::Held } else { Outcome::Unreachable { error } };
            for place in places {
                book.settle(place, outcome.clone());
            }
            return book.close();
        }
        fail::fail_point!("kafka::begun");
        // The note is the last of the call.
        let call = Call::new(ready.len() + 1);
        inner.hand_over(sender, &call, &batch, &ready, until).await;
        let key = self.notes.key(self.id, half);
        let record = Record::with_opaque_to(&self.notes.topic, call.ticket(ready.len()))
            .partition(self.notes.partition(self.id))
            .key(key.as_bytes())
            .payload(&note);
        if let Err(code) = sender.hand_over(record, until).await {
            call.settle(ready.len(), Err(code));
        }
        fail::fail_point!("kafka::sent");
        let whole = sender.finish(&call, until).await;
        let reports = call.reported();
        let ended = match whole && reports.iter().all(Result::is_ok) {
            true => self.commit(sender, until).await,
            false => Ok(self.abort(sender, until, sender.said()).await),
        };
        let ended = match ended {
            Ok(End::Committed) => Ok(End::Committed),
            // Who took the lanes knows by now how it ended.
            _ if sender.is_fenced() => Ok(End::Fenced),
            ended => ended,
        };
        if sender.is_fenced() {
            self.good.store(false, Ordering::SeqCst);
        }
        let noted = reports[ready.len()].map_err(|code| failed(code, &self.notes.topic));
        if noted.is_err() {
            inner.topics.forget(&self.notes.topic);
        }
        let blamed = error::blamed(&reports);
        for (place, report) in places.iter().zip(&reports) {
            let topic = || inner.topic(&batch[*place].message.topic);
            if report.is_err_and(|code| !error::of_the_producer(code) || code == Code::UnknownPartition) {
                inner.topics.forget(&topic());
            }
            book.settle(*place, outcome(*report, blamed, &ended, &noted, topic));
        }
        book.close()
    }

    fn is_good(&self) -> bool {
        self.good.load(Ordering::SeqCst)
    }
}

/// How a transaction ended, where that is known.
enum End {
    Committed,
    Aborted(String),
    /// Another took lanes of this sender.
    Fenced,
}

/// What failed was not stored, or will not be seen.
fn failed(code: Code, topic: &str) -> Outcome {
    error::outcome(code, format!("topic `{topic}`: {code}")).before_sending()
}

/// What a message of a transaction is told, whose note was stored or not. `blamed`: some failed by themselves.
fn outcome(
    report: Result<(), Code>,
    blamed: bool,
    ended: &Result<End, String>,
    noted: &Result<(), Outcome>,
    topic: impl Fn() -> String,
) -> Outcome {
    match (ended, report, noted) {
        (Ok(End::Committed), ..) => Outcome::Confirmed,
        (Ok(End::Fenced), ..) => Outcome::Held,
        (Ok(End::Aborted(_)), Err(code), _) if !error::of_the_producer(code) => failed(code, &topic()),
        (Ok(End::Aborted(_)), Err(_), _) if blamed => Outcome::Held,
        (Ok(End::Aborted(said)), Err(_), _) => {
            Outcome::Unreachable { error: format!("Kafka did not take the transaction{said}") }
        }
        (Ok(End::Aborted(_)), Ok(()), Err(note)) => note.clone(),
        // It is for another that failed that it is sent again.
        (Ok(End::Aborted(_)), Ok(()), Ok(())) => Outcome::Held,
        (Err(error), ..) => Outcome::Unconfirmed { error: error.clone() },
    }
}

impl Book {
    fn claim(&mut self, lanes: &[u16]) -> Vec<Claim> {
        let first = self.made;
        self.made += lanes.len() as u32;
        let claims: Vec<Claim> = lanes.iter().copied().zip(first..).collect();
        self.claims.extend(&claims);
        claims
    }
}

impl Together {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("nobody panics while holding it")
    }

    async fn commit(&self, sender: &Arc<Sender>, until: Instant) -> Result<End, String> {
        fail::fail_point!("kafka::committing");
        match sender.commit(until).await {
            Ok(()) => {
                fail::fail_point!("kafka::committed");
                self.good.store(true, Ordering::SeqCst);
                Ok(End::Committed)
            }
            Err(KafkaError::Transaction(error)) if error.txn_requires_abort() => {
                Ok(self.abort(sender, until, format!(": {error}")).await)
            }
            Err(failed) => Err(format!("whether Kafka committed is not known: {}", error::text(&failed))),
        }
    }

    /// What was never committed is not in the log, whether Kafka hears of the end or not.
    async fn abort(&self, sender: &Arc<Sender>, until: Instant, why: String) -> End {
        // What is left of the call may be nothing.
        let until = until.max(Instant::now() + self.inner.config.timeout / 4);
        self.good.store(sender.abort(until).await, Ordering::SeqCst);
        End::Aborted(why)
    }
}
