//! Work outside the store: reserve, run the handler, conclude.
//!
//! Messages of one topic and key run one after another; others at the same time. A message never starts unless
//! its reservation lasts for as long as the handler may take, so that no other worker can be at it meanwhile. What
//! could not start in time, or waited behind one of its key that failed, is given up and reserved again: the store
//! then says whether it may run or is parked behind the other.
//!
//! Handlers that make the marks themselves get several messages at a time: see [`shares`](crate::shares).

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fail::fail_point;
use futures::FutureExt;
use store::{Arrival, Error, Handled, Receipt, Reservation};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tokio::task::JoinSet;
use tracing::{debug, warn};
use uuid::Uuid;

use crate::cost::Step;
use crate::group::Group;
use crate::handler::{Handler, Ran, Together, Transact};
use crate::shares::Shares;
use crate::suspect::Suspects;

/// The wait between tries to write conclusions while the store is busy.
const STORE_BUSY: Duration = Duration::from_millis(100);

/// What has ended waits so long for company while other handlers of its batch are at work: many marks are one transaction.
pub(crate) const COMPANY: Duration = Duration::from_millis(20);

/// A batch of at least so many is reserved in two parts: handlers work on the first while the rest is reserved.
const LARGE: usize = 256;
/// The first is one of so many equal parts.
const PARTS: usize = 4;

/// A reserved message, by its place in the batch.
#[derive(Clone, Copy)]
pub(crate) struct Turn {
    place: usize,
    token: Uuid,
}

/// What became of a turn.
#[derive(Clone)]
enum Ended {
    /// The handler ran.
    Ran(Handled),
    /// It waits for the outcome of an earlier one of its key, or its lease would have been too short.
    Held,
    /// The handler is down.
    Down(String),
}

impl Ended {
    /// What becomes of those behind it, if they are not to be run.
    fn of_followers(&self) -> Option<Self> {
        match self {
            Self::Ran(Handled::Done) => None,
            Self::Ran(Handled::Unavailable { error }) | Self::Down(error) => Some(Self::Down(error.clone())),
            Self::Ran(_) | Self::Held => Some(Self::Held),
        }
    }
}

/// What is known of a place in the batch.
enum Outcome {
    /// The store knows what becomes of it, or somebody else has it.
    Settled(usize, Receipt),
    /// It had its turn, and the store must hear how that ended.
    Ended(Turn, Ended),
}

/// Handles `arrivals`. One receipt each, in order.
pub(crate) async fn handle(group: &Group, arrivals: Vec<Arrival>) -> Result<Vec<Receipt>, Error> {
    let mut batch = Batch::new(group, arrivals);
    while !batch.waiting.is_empty() {
        batch.round().await?;
    }
    Ok(batch.receipts.into_iter().map(|receipt| receipt.unwrap_or(Receipt::Busy)).collect())
}

struct Batch<'a> {
    group: &'a Group,
    arrivals: Arc<Vec<Arrival>>,
    receipts: Vec<Option<Receipt>>,
    /// Places that have no receipt yet, in order.
    waiting: Vec<usize>,
}

impl<'a> Batch<'a> {
    fn new(group: &'a Group, arrivals: Vec<Arrival>) -> Self {
        let waiting = (0..arrivals.len()).collect();
        Self { group, receipts: vec![None; arrivals.len()], arrivals: Arc::new(arrivals), waiting }
    }

    /// Reserves what waits, runs it, and leaves in `waiting` what must be reserved again.
    async fn round(&mut self) -> Result<(), Error> {
        let (now, later) = self.without_repetitions();
        let until = Instant::now() + self.group.reservation();
        let (outcomes, heard) = mpsc::unbounded_channel();
        // Dropping it stops the handlers.
        let mut tasks = JoinSet::new();
        let runner = Runner::new(self.group, Arc::clone(&self.arrivals), until, outcomes.clone());
        let reserving =
            Reserving { group: self.group, runner, outcomes, tasks: &mut tasks, lanes: HashMap::new() };
        let ((), mut held) = tokio::try_join!(reserving.run(now), self.collect(Heard(heard), until))?;
        held.extend(later);
        held.sort_unstable();
        let stuck = self.stuck();
        for place in held {
            // Behind one whose fate is open nothing of its key may pass.
            match self.lane(place).and_then(|lane| stuck.get(&lane)) {
                Some(receipt) => self.receipts[place] = Some(receipt.clone()),
                None => self.waiting.push(place),
            }
        }
        Ok(())
    }

    /// An id that is twice in the batch is reserved once; by the next round the store knows what became of it.
    fn without_repetitions(&mut self) -> (Vec<usize>, Vec<usize>) {
        let mut seen = HashSet::new();
        std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|place| seen.insert(self.arrivals[*place].message.id))
    }

    /// The topic and key within which order matters.
    fn lane(&self, place: usize) -> Option<(String, String)> {
        self.group.lane(&self.arrivals[place])
    }

    /// Keys of which a message must come again from the broker, and what was said of it.
    fn stuck(&self) -> HashMap<(String, String), Receipt> {
        let mut stuck = HashMap::new();
        for (place, receipt) in self.receipts.iter().enumerate() {
            if let (Some(receipt @ (Receipt::Busy | Receipt::Unavailable { .. })), Some(lane)) =
                (receipt, self.lane(place))
            {
                stuck.entry(lane).or_insert_with(|| receipt.clone());
            }
        }
        stuck
    }

    /// Concludes as outcomes come in; answers what must be reserved again.
    async fn collect(&mut self, mut heard: Heard, until: Instant) -> Result<Vec<usize>, Error> {
        let mut held = Vec::new();
        let mut outcomes = Vec::new();
        while heard.some(&mut outcomes).await {
            let mut conclusions = Vec::with_capacity(outcomes.len());
            let mut places = Vec::with_capacity(outcomes.len());
            for outcome in outcomes.drain(..) {
                let (turn, ended) = match outcome {
                    Outcome::Ended(turn, ended) => (turn, ended),
                    Outcome::Settled(place, receipt) => {
                        self.receipts[place] = Some(receipt);
                        continue;
                    }
                };
                let released = |error: String| Handled::Unavailable { error };
                let is_held = matches!(ended, Ended::Held);
                let handled = match ended {
                    Ended::Ran(handled) => handled,
                    Ended::Down(error) => released(error),
                    Ended::Held => released("held behind another of its key".to_owned()),
                };
                places.push((turn.place, is_held));
                conclusions.push((self.arrivals[turn.place].clone(), turn.token, handled));
            }
            if conclusions.is_empty() {
                continue;
            }
            fail_point!("inbox::handled");
            let receipts = self.conclude(conclusions, until).await?;
            for ((place, is_held), receipt) in places.into_iter().zip(receipts) {
                // The store may know already what becomes of a held one; if not, the next round shows.
                if is_held && matches!(receipt, Receipt::Unavailable { .. } | Receipt::Busy) {
                    held.push(place);
                } else {
                    self.receipts[place] = Some(receipt);
                }
            }
        }
        Ok(held)
    }

    async fn conclude(
        &self,
        conclusions: Vec<(Arrival, Uuid, Handled)>,
        until: Instant,
    ) -> Result<Vec<Receipt>, Error> {
        let group = self.group;
        let expected = conclusions.len();
        loop {
            let call = group.store().conclude(group.name(), conclusions.clone(), group.rules());
            match group.cost().of(Step::Conclude, call).await {
                Ok(receipts) if receipts.len() == expected => return Ok(receipts),
                Ok(_) => return Err(Error::Broken("a receipt is missing in the store's answer".to_owned())),
                // The work is done and only the mark is missing: forgetting it now would do the work twice.
                Err(error) if error.is_transient() && Instant::now() < until => {
                    warn!(group = group.name(), %error, "marks cannot be written yet; trying again");
                    tokio::time::sleep(STORE_BUSY).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// What comes to be known, one after another.
struct Heard(mpsc::UnboundedReceiver<Outcome>);

impl Heard {
    /// Waits for some: they share a commit. `false`: all is known.
    async fn some(&mut self, outcomes: &mut Vec<Outcome>) -> bool {
        if self.0.recv_many(outcomes, usize::MAX).await == 0 {
            return false;
        }
        let company = tokio::time::sleep(COMPANY);
        tokio::pin!(company);
        loop {
            tokio::select! {
                more = self.0.recv_many(outcomes, usize::MAX) => if more == 0 { return true },
                () = &mut company => return true,
            }
        }
    }
}

/// Reserves what a round handles and gives it to handlers, in the order of each key.
struct Reserving<'a> {
    group: &'a Group,
    runner: Runner,
    outcomes: mpsc::UnboundedSender<Outcome>,
    tasks: &'a mut JoinSet<()>,
    /// The queue of each topic and key; none behind a message that another worker has.
    lanes: HashMap<(String, String), Option<mpsc::UnboundedSender<Turn>>>,
}

impl Reserving<'_> {
    /// # Errors
    /// When nothing could be reserved. If that befalls the rest of a batch, it comes again.
    async fn run(mut self, places: Vec<usize>) -> Result<(), Error> {
        let first = if places.len() < LARGE { places.len() } else { places.len() / PARTS };
        let (first, rest) = places.split_at(first);
        let answers = self.ask(first).await?;
        self.hand_over(first, answers);
        if rest.is_empty() {
            return Ok(());
        }
        match self.ask(rest).await {
            Ok(answers) => self.hand_over(rest, answers),
            Err(error) => {
                warn!(group = self.group.name(), %error, "part of a batch cannot be reserved; it comes again");
                for place in rest {
                    self.tell(Outcome::Settled(*place, Receipt::Busy));
                }
            }
        }
        Ok(())
    }

    async fn ask(&self, places: &[usize]) -> Result<Vec<Reservation>, Error> {
        let group = self.group;
        let arrivals = places.iter().map(|place| self.runner.arrivals[*place].clone()).collect();
        let call = group.store().reserve(group.name(), arrivals, group.reservation(), group.rules());
        let answers = group.cost().of(Step::Reserve, call).await?;
        if answers.len() != places.len() {
            return Err(Error::Broken("a reservation is missing in the store's answer".to_owned()));
        }
        Ok(answers)
    }

    fn hand_over(&mut self, places: &[usize], answers: Vec<Reservation>) {
        for (place, answer) in places.iter().copied().zip(answers) {
            let lane = self.group.lane(&self.runner.arrivals[place]);
            match answer {
                Reservation::Settled(receipt) => {
                    if let (Receipt::Busy | Receipt::Unavailable { .. }, Some(lane)) = (&receipt, lane) {
                        self.lanes.insert(lane, None);
                    }
                    self.tell(Outcome::Settled(place, receipt));
                }
                Reservation::Granted(token) => self.enqueue(Turn { place, token }, lane),
            }
        }
    }

    fn enqueue(&mut self, turn: Turn, lane: Option<(String, String)>) {
        let Self { runner, tasks, lanes, .. } = self;
        let mut start = || {
            let (queue, turns) = mpsc::unbounded_channel();
            tasks.spawn(runner.clone().run(turns));
            Some(queue)
        };
        let alone;
        let queue = match lane {
            Some(lane) => &*lanes.entry(lane).or_insert_with(start),
            None => {
                alone = start();
                &alone
            }
        };
        match queue {
            // Its task listens until this end is dropped.
            Some(queue) => drop(queue.send(turn)),
            None => self.tell(Outcome::Ended(turn, Ended::Held)),
        }
    }

    fn tell(&self, outcome: Outcome) {
        // Nobody listens when the conclusions failed; reservations then end by themselves.
        let _ = self.outcomes.send(outcome);
    }
}

/// Runs the messages of a queue one after another.
#[derive(Clone)]
pub(crate) struct Runner {
    group: Arc<str>,
    handler: Handler,
    limit: Duration,
    suspects: Arc<Suspects>,
    give_up_after: Duration,
    until: Instant,
    arrivals: Arc<Vec<Arrival>>,
    workers: Arc<Semaphore>,
    /// None where each message is by itself.
    shares: Option<Arc<Shares>>,
    down: Arc<AtomicBool>,
    outcomes: mpsc::UnboundedSender<Outcome>,
}

impl Runner {
    fn new(
        group: &Group,
        arrivals: Arc<Vec<Arrival>>,
        until: Instant,
        outcomes: mpsc::UnboundedSender<Outcome>,
    ) -> Self {
        Self {
            group: group.shared_name(),
            handler: group.handler().clone(),
            limit: group.limit(),
            suspects: Arc::clone(group.suspects()),
            give_up_after: group.rules().retry.give_up_after,
            until,
            arrivals,
            workers: Arc::new(Semaphore::new(group.workers())),
            shares: Shares::of(group),
            down: Arc::new(AtomicBool::new(false)),
            outcomes,
        }
    }

    async fn run(self, mut turns: mpsc::UnboundedReceiver<Turn>) {
        // How those end that follow one after which none is run.
        let mut rest: Option<Ended> = None;
        let mut some = Vec::new();
        while turns.recv_many(&mut some, self.shares.as_ref().map_or(1, |shares| shares.most())).await > 0 {
            let done = rest.is_none() && self.shared(&some).await;
            for turn in some.drain(..) {
                let ended = match &rest {
                    None if done => Ended::Ran(Handled::Done),
                    None => self.alone(turn).await,
                    Some(ended) => ended.clone(),
                };
                rest = rest.or_else(|| ended.of_followers());
                // Nobody listens when the whole batch was dropped; the reservation then ends by itself.
                let _ = self.outcomes.send(Outcome::Ended(turn, ended));
            }
        }
    }

    /// Whether all of it was done in a transaction.
    async fn shared(&self, turns: &[Turn]) -> bool {
        match &self.shares {
            Some(shares) if shares.most() > 1 => shares.run(self, turns).await,
            _ => false,
        }
    }

    async fn alone(&self, turn: Turn) -> Ended {
        let _worker = self.worker().await;
        let ended = self.turn(turn).await;
        if let (Some(shares), Ended::Ran(Handled::Done)) = (&self.shares, &ended) {
            shares.done_alone();
        }
        ended
    }

    /// One of those that may work at the same time.
    pub(crate) async fn worker(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.workers.acquire().await.ok()
    }

    fn arrival(&self, turn: Turn) -> &Arrival {
        &self.arrivals[turn.place]
    }

    /// Whether a handler may still begin: its mark may have to wait for company.
    fn has_time(&self) -> bool {
        Instant::now() + self.limit + COMPANY <= self.until
    }

    /// Whether there is anything to be had of a handler.
    pub(crate) fn may_begin(&self) -> bool {
        !self.down.load(Ordering::Relaxed) && self.has_time()
    }

    /// Does the work of several messages in one transaction that marks them, if it can be done so.
    pub(crate) async fn together(&self, transact: &dyn Transact, turns: &[Turn]) -> Together {
        let arrivals: Vec<&Arrival> = turns.iter().map(|turn| self.arrival(*turn)).collect();
        for arrival in &arrivals {
            debug!(message_id = %arrival.message.id, group = %self.group, "handing over, with others");
        }
        let work = AssertUnwindSafe(transact.all(&self.group, &arrivals)).catch_unwind();
        let together = match tokio::time::timeout(self.limit, work).await {
            Ok(Ok(together)) => together,
            Ok(Err(_panic)) => Together { done: false, open: Duration::ZERO },
            Err(_elapsed) => Together { done: false, open: self.limit },
        };
        for arrival in arrivals.into_iter().filter(|_| together.done) {
            let done = Ran { handled: Handled::Done, reached: true };
            self.suspects.weigh(arrival.message.id, done, self.give_up_after);
        }
        together
    }

    async fn turn(&self, turn: Turn) -> Ended {
        if self.down.load(Ordering::Relaxed) {
            return Ended::Down("not tried: the handler is down".to_owned());
        }
        if !self.has_time() {
            return Ended::Held;
        }
        let arrival = self.arrival(turn);
        debug!(message_id = %arrival.message.id, group = %self.group, "handing over");
        let ran = self.handler.run(&self.group, arrival, self.limit).await;
        let handled = self.suspects.weigh(arrival.message.id, ran, self.give_up_after);
        if matches!(handled, Handled::Unavailable { .. }) {
            self.down.store(true, Ordering::Relaxed);
        }
        Ended::Ran(handled)
    }
}
