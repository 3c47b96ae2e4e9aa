//! What each promise costs: throughput and latency of all six into one broker, as shares of at-least-once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use async_trait::async_trait;
use broker::{Guarantees, Outcome, Outgoing, Publisher, Surroundings, Transactions};
use message::{MessageId, Semantics};
use relay::{Direct, Relay, Route, Settings, Settle, Try};

use crate::watched::{TOGETHER, Watched};
use crate::{Size, arrow};

/// What the others are compared with.
const BASE: Semantics = Semantics::AtLeastOnce;

/// Of what a promise can carry, so much is offered while latency is measured.
const LOAD: f64 = 0.7;

/// A steady load.
#[derive(Clone, Copy)]
struct Load {
    /// Messages in a second.
    rate: f64,
    measured: Duration,
}

/// Before latency is measured, connections are made and claims grow.
const WARM: Duration = Duration::from_secs(2);

/// Between two portions of the steady load.
const TICK: Duration = Duration::from_millis(5);

/// Runs them `rounds` times and prints the medians: all six, or `only` some of them beside at-least-once. Every other round
/// goes through them backwards, so that none is always the one that comes after the others.
pub(crate) async fn run(
    url: &str,
    server: Option<&str>,
    only: &[Semantics],
    size: Size,
    rounds: usize,
    measured: Duration,
) -> Result<()> {
    let nowhere = Surroundings { file: "none.db".into(), max_payload: 1 << 20 };
    let name = format!("bench{:08x}", rand::random::<u32>());
    let joint = if url.contains('?') { '&' } else { '?' };
    let groups = if url.starts_with("amqp") { "&groups=bench" } else { "" };
    let broker = broker::open(&format!("{url}{joint}prefix={name}{groups}"), &nowhere)?.publisher;
    let able: Vec<Semantics> = Semantics::ALL
        .into_iter()
        .filter(|semantics| only.is_empty() || only.contains(semantics) || *semantics == BASE)
        .filter(|semantics| *semantics != Semantics::ExactlyOnce || broker.transactions().is_some())
        .collect();
    let first = broker.publish(vec![Outgoing::new(arrow::message(size, 0), 0)]).await;
    ensure!(first == [Outcome::Confirmed], "{first:?}");
    let order = |round: usize| -> Vec<Semantics> {
        let backwards = able.iter().rev().copied().collect();
        if round.is_multiple_of(2) { backwards } else { able.clone() }
    };

    // The rest of the URL may hold a password.
    println!("\ninto {}", url.split(':').next().unwrap_or_default());
    let mut rates = Rounds::default();
    for round in 1..=rounds {
        for semantics in order(round) {
            let rate = throughput(semantics, &broker, server, Written::Before, size).await?;
            println!("round {round}  {:<17} {rate:>9.0} /s", semantics.as_str());
            rates.add(semantics, rate);
        }
    }
    let slowest = able.iter().copied().min_by(|one, other| rates.of(*one).total_cmp(&rates.of(*other)));
    let slowest = slowest.expect("at-least-once is always among them");
    let rate = LOAD * throughput(slowest, &broker, server, Written::Meanwhile, size).await?;
    println!("\nlatency at {rate:.0} /s, {:.0} % of what {} carries", LOAD * 100.0, slowest.as_str());
    let (mut halves, mut nearly_all) = (Rounds::default(), Rounds::default());
    for round in 1..=rounds {
        for semantics in order(round) {
            let mut waits = latency(semantics, &broker, server, size, Load { rate, measured }).await?;
            waits.sort_unstable();
            let at = |share: f64| waits[((waits.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
            let (half, most) = (at(0.5), at(0.99));
            println!("round {round}  {:<17} p50 {half:>7.1} ms  p99 {most:>7.1} ms", semantics.as_str());
            halves.add(semantics, half);
            nearly_all.add(semantics, most);
        }
    }
    println!(
        "\n{:<17}  {:>12}  {:>6}  {:>10}  {:>10}  {:>8}",
        "semantics", "throughput", "share", "p50", "p99", "multiple"
    );
    for semantics in able {
        println!(
            "{:<17}  {:>9.0} /s  {:>6.2}  {:>7.1} ms  {:>7.1} ms  {:>8.2}",
            semantics.as_str(),
            rates.of(semantics),
            rates.beside_base(semantics),
            halves.of(semantics),
            nearly_all.of(semantics),
            nearly_all.beside_base(semantics),
        );
    }
    Ok(())
}

/// What was measured of each, round by round.
#[derive(Default)]
struct Rounds(HashMap<Semantics, Vec<f64>>);

impl Rounds {
    fn add(&mut self, semantics: Semantics, value: f64) {
        self.0.entry(semantics).or_default().push(value);
    }

    /// The median.
    fn of(&self, semantics: Semantics) -> f64 {
        median(self.0[&semantics].clone())
    }

    /// The median of what it is to at-least-once in the same round.
    fn beside_base(&self, semantics: Semantics) -> f64 {
        median(self.0[&semantics].iter().zip(&self.0[&BASE]).map(|(value, base)| value / base).collect())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A route as the program makes it for this promise, with a publisher that writes down what is confirmed.
fn route(semantics: Semantics, broker: &Arc<dyn Publisher>) -> (Route, Arc<Timed>) {
    let publisher = if semantics.sends_again() { None } else { broker.once() };
    let publisher = publisher.unwrap_or_else(|| Arc::clone(broker));
    let timed = Arc::new(Timed { publisher, confirmed: Mutex::default() });
    let settle = Settle::keeping(semantics, &*timed);
    (Route { settle, ..Route::new("main", &["*"], timed.clone()) }, timed)
}

fn attempt(semantics: Semantics) -> Try {
    if semantics == Semantics::None { Try::Unconfirmed } else { Try::Confirmed }
}

/// When messages are written, if they are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    /// All of them wait when the relay starts.
    Before,
    /// While it works.
    Meanwhile,
}

/// Messages in a second, once a tenth of them is through: then connections are made and claims have grown.
async fn throughput(
    semantics: Semantics,
    broker: &Arc<dyn Publisher>,
    server: Option<&str>,
    when: Written,
    size: Size,
) -> Result<f64> {
    let mut messages: Vec<_> = (0..size.messages).map(|number| arrow::message(size, number)).collect();
    let (route, timed) = route(semantics, broker);
    let first = size.messages / 10;
    if semantics.bypasses_store() {
        let direct = Direct::start(vec![(route, attempt(semantics))]);
        let mut begun = Instant::now();
        for (number, message) in messages.into_iter().enumerate() {
            if number == first {
                begun = Instant::now();
            }
            // A sender that does not want to lose what is not taken waits by itself.
            while direct.send("main", message.clone()).is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        direct.drain(Duration::from_secs(60)).await;
        ensure!(timed.count() == size.messages, "{} of {} were confirmed", timed.count(), size.messages);
        return Ok((size.messages - first) as f64 / begun.elapsed().as_secs_f64());
    }
    let store = Watched::new(server).await?;
    if when == Written::Before {
        store.write(std::mem::take(&mut messages)).await?;
    }
    let relay = Relay::start(store.clone(), vec![route], Settings::default());
    let writer = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.write(messages).await }
    });
    // In a transaction nothing is confirmed by itself.
    let done = || match semantics {
        Semantics::ExactlyOnce => store.sent().len(),
        _ => store.sent().len().min(timed.count()),
    };
    while done() < first {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (begun, already) = (Instant::now(), done());
    while done() < size.messages {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let rate = (size.messages - already) as f64 / begun.elapsed().as_secs_f64();
    writer.await??;
    relay.drain().await;
    store.forget().await?;
    Ok(rate)
}

/// The time of each message from the commit of its writer until the broker has it and, where it is kept, the store knows.
async fn latency(
    semantics: Semantics,
    broker: &Arc<dyn Publisher>,
    server: Option<&str>,
    size: Size,
    load: Load,
) -> Result<Vec<Duration>> {
    let (route, timed) = route(semantics, broker);
    let store = Watched::new(server).await?;
    let (mut relay, mut direct) = (None, None);
    if semantics.bypasses_store() {
        direct = Some(Direct::start(vec![(route, attempt(semantics))]));
    } else {
        relay = Some(Relay::start(store.clone(), vec![route], Settings::default()));
    }
    let mut written: HashMap<MessageId, Instant> = HashMap::new();
    let started = Instant::now();
    let mut number = 0;
    while started.elapsed() < WARM + load.measured {
        let due = (started.elapsed().as_secs_f64() * load.rate) as usize;
        ensure!(due < number + load.rate as usize, "so many messages cannot be written");
        let due = due.min(number + TOGETHER);
        let portion: Vec<_> = (number..due).map(|number| arrow::message(size, number)).collect();
        number = due.max(number);
        let counts = started.elapsed() > WARM;
        let mut taken: Vec<MessageId> = portion.iter().map(|message| message.id).collect();
        match &direct {
            Some(direct) => {
                // What is not taken is lost by choice, and has no latency.
                let sent = portion.into_iter().map(|message| direct.send("main", message).is_ok());
                let sent: Vec<bool> = sent.collect();
                taken = taken.into_iter().zip(sent).filter(|(_, sent)| *sent).map(|(id, _)| id).collect();
            }
            None => store.write(portion).await?,
        }
        let now = Instant::now();
        if counts {
            written.extend(taken.into_iter().map(|id| (id, now)));
        }
        tokio::time::sleep(TICK).await;
    }
    let seen = || match semantics.sends_again() {
        true => store.sent().clone(),
        false => timed.confirmed.lock().expect("nobody panics while it is held").clone(),
    };
    let waited = Instant::now();
    loop {
        let seen = seen();
        let waits: Vec<Duration> = seen
            .iter()
            .filter_map(|(id, at)| Some(at.saturating_duration_since(*written.get(id)?)))
            .collect();
        if waits.len() == written.len() {
            if let Some(relay) = relay {
                relay.drain().await;
            }
            store.forget().await?;
            return Ok(waits);
        }
        ensure!(waited.elapsed() < Duration::from_secs(60), "{} of {} came", waits.len(), written.len());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Writes down when each message was confirmed.
struct Timed {
    publisher: Arc<dyn Publisher>,
    confirmed: Mutex<Vec<(MessageId, Instant)>>,
}

impl Timed {
    fn count(&self) -> usize {
        self.confirmed.lock().expect("nobody panics while it is held").len()
    }
}

#[async_trait]
impl Publisher for Timed {
    fn guarantees(&self) -> Guarantees {
        self.publisher.guarantees()
    }

    fn transactions(&self) -> Option<Arc<dyn Transactions>> {
        self.publisher.transactions()
    }

    async fn recognises(&self, horizon: Duration) -> Result<(), Outcome> {
        self.publisher.recognises(horizon).await
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let ids: Vec<MessageId> = batch.iter().map(|outgoing| outgoing.message.id).collect();
        let outcomes = self.publisher.publish(batch).await;
        let now = Instant::now();
        let confirmed = ids.into_iter().zip(&outcomes).filter(|(_, outcome)| **outcome == Outcome::Confirmed);
        let mut all = self.confirmed.lock().expect("nobody panics while it is held");
        all.extend(confirmed.map(|(id, _)| (id, now)));
        outcomes
    }
}
