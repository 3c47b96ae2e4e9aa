//! Work outside the store: reserve, run the handler, conclude.
//!
//! Messages of one topic and key run one after another; others at the same time. A message never starts unless
//! its reservation lasts for as long as the handler may take, so that no other worker can be at it meanwhile. What
//! could not start in time, or waited behind one of its key that failed, is given up and reserved again: the store
//! then says whether it may run or is parked behind the other.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fail::fail_point;
use store::{Arrival, Error, Handled, Receipt, Reservation};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tracing::{debug, warn};
use uuid::Uuid;

use crate::cost::Step;
use crate::group::Group;
use crate::handler::Handler;
use crate::suspect::Suspects;

/// The wait between tries to write conclusions while the store is busy.
const STORE_BUSY: Duration = Duration::from_millis(100);

/// What has ended waits so long for company while other handlers of its batch are at work: many marks are one transaction.
const COMPANY: Duration = Duration::from_millis(10);

/// A reserved message, by its place in the batch.
#[derive(Clone, Copy)]
struct Turn {
    place: usize,
    token: Uuid,
}

/// What became of a turn.
enum Ended {
    /// The handler ran.
    Ran(Handled),
    /// It waits for the outcome of an earlier one of its key, or its lease would have been too short.
    Held,
    /// The handler is down.
    Down(String),
}

/// Messages that run one after another.
type Queue = Vec<Turn>;

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
        let reserved_at = Instant::now();
        let (queues, blocked) = self.reserve(now).await?;
        let started = self.start(queues, reserved_at + self.group.reservation());
        let mut held = self.collect(started, blocked).await?;
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

    /// Answers the queues to run, and what was granted behind a message that another worker has.
    async fn reserve(&mut self, places: Vec<usize>) -> Result<(Vec<Queue>, Vec<Turn>), Error> {
        let group = self.group;
        let arrivals = places.iter().map(|place| self.arrivals[*place].clone()).collect();
        let call = group.store().reserve(group.name(), arrivals, group.reservation(), group.rules());
        let answers = group.cost().of(Step::Reserve, call).await?;
        if answers.len() != places.len() {
            return Err(Error::Broken("a reservation is missing in the store's answer".to_owned()));
        }
        let mut queues: Vec<Queue> = Vec::new();
        let mut blocked = Vec::new();
        let mut of_lane: HashMap<(String, String), Option<usize>> = HashMap::new();
        for (place, answer) in places.into_iter().zip(answers) {
            let lane = self.lane(place);
            match answer {
                Reservation::Settled(receipt) => {
                    if let (Receipt::Busy | Receipt::Unavailable { .. }, Some(lane)) = (&receipt, lane) {
                        of_lane.insert(lane, None);
                    }
                    self.receipts[place] = Some(receipt);
                }
                Reservation::Granted(token) => {
                    let turn = Turn { place, token };
                    match lane.map(|lane| of_lane.entry(lane)) {
                        Some(entry) => match entry.or_insert_with(|| Some(queues.len())) {
                            Some(queue) if *queue < queues.len() => queues[*queue].push(turn),
                            Some(_) => queues.push(vec![turn]),
                            None => blocked.push(turn),
                        },
                        None => queues.push(vec![turn]),
                    }
                }
            }
        }
        Ok((queues, blocked))
    }

    fn start(&self, queues: Vec<Queue>, until: Instant) -> Started {
        let (ended, outcomes) = mpsc::unbounded_channel();
        let runner = Runner {
            group: self.group.shared_name(),
            handler: self.group.handler().clone(),
            limit: self.group.limit(),
            suspects: Arc::clone(self.group.suspects()),
            give_up_after: self.group.rules().retry.give_up_after,
            until,
            arrivals: Arc::clone(&self.arrivals),
            workers: Arc::new(Semaphore::new(self.group.workers())),
            down: Arc::new(AtomicBool::new(false)),
            ended,
        };
        let mut tasks = JoinSet::new();
        for queue in queues {
            tasks.spawn(runner.clone().run(queue));
        }
        Started { outcomes, until, _tasks: tasks }
    }

    /// Concludes as outcomes come in; answers what must be reserved again.
    async fn collect(&mut self, mut started: Started, blocked: Vec<Turn>) -> Result<Vec<usize>, Error> {
        let until = started.until;
        let mut held = Vec::new();
        let mut outcomes: Vec<_> = blocked.into_iter().map(|turn| (turn, Ended::Held)).collect();
        loop {
            let mut conclusions = Vec::with_capacity(outcomes.len());
            let mut places = Vec::with_capacity(outcomes.len());
            for (turn, ended) in outcomes.drain(..) {
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
            if !conclusions.is_empty() {
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
            if !started.ended(&mut outcomes).await {
                return Ok(held);
            }
            fail_point!("inbox::handled");
        }
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

/// Handlers at work. Dropping it stops them.
struct Started {
    outcomes: mpsc::UnboundedReceiver<(Turn, Ended)>,
    until: Instant,
    _tasks: JoinSet<()>,
}

impl Started {
    /// Waits for some that have ended: they share a commit. `false`: all have.
    async fn ended(&mut self, outcomes: &mut Vec<(Turn, Ended)>) -> bool {
        if self.outcomes.recv_many(outcomes, usize::MAX).await == 0 {
            return false;
        }
        let company = tokio::time::sleep(COMPANY);
        tokio::pin!(company);
        loop {
            tokio::select! {
                more = self.outcomes.recv_many(outcomes, usize::MAX) => if more == 0 { return true },
                () = &mut company => return true,
            }
        }
    }
}

#[derive(Clone)]
struct Runner {
    group: Arc<str>,
    handler: Handler,
    limit: Duration,
    suspects: Arc<Suspects>,
    give_up_after: Duration,
    until: Instant,
    arrivals: Arc<Vec<Arrival>>,
    workers: Arc<Semaphore>,
    down: Arc<AtomicBool>,
    ended: mpsc::UnboundedSender<(Turn, Ended)>,
}

impl Runner {
    async fn run(self, queue: Queue) {
        let mut rest = queue.into_iter();
        let mut stopped: Option<String> = None;
        for turn in rest.by_ref() {
            let Ok(_worker) = self.workers.acquire().await else { return };
            if self.down.load(Ordering::Relaxed) {
                stopped = Some("not tried: the handler is down".to_owned());
                self.end(turn, Ended::Down("not tried: the handler is down".to_owned()));
                break;
            }
            if Instant::now() + self.limit > self.until {
                self.end(turn, Ended::Held);
                break;
            }
            let arrival = &self.arrivals[turn.place];
            debug!(message_id = %arrival.message.id, group = %self.group, "handing over");
            let ran = self.handler.run(&self.group, arrival, self.limit).await;
            let handled = self.suspects.weigh(arrival.message.id, ran, self.give_up_after);
            if let Handled::Unavailable { error } = &handled {
                self.down.store(true, Ordering::Relaxed);
                stopped = Some(error.clone());
            }
            let done = handled == Handled::Done;
            self.end(turn, Ended::Ran(handled));
            if !done {
                break;
            }
        }
        for turn in rest {
            let ended = stopped.clone().map_or(Ended::Held, Ended::Down);
            self.end(turn, ended);
        }
    }

    fn end(&self, turn: Turn, ended: Ended) {
        // Nobody listens when the whole batch was dropped; the reservation then ends by itself.
        let _ = self.ended.send((turn, ended));
    }
}
