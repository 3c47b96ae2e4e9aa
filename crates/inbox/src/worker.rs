//! What the tasks of a consumer share: handling messages, noticing what is down, and telling the producer.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use store::{Arrival, Error, Receipt};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::acknowledge::Received;
use crate::breaker::{Backoff, Breaker};
use crate::group::{Group, done};
use crate::status::{Board, Need};

/// Hears when a consumer is asked to stop, or was dropped.
#[derive(Clone)]
pub(crate) struct Stop(pub(crate) watch::Receiver<bool>);

impl Stop {
    pub(crate) fn is_asked(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Waits until it is asked.
    pub(crate) async fn asked(&mut self) {
        // An error means that the consumer was dropped, which asks just the same.
        let _ = self.0.wait_for(|asked| *asked).await;
    }

    /// Waits for `wait`. `false`: it was asked meanwhile.
    pub(crate) async fn wait(&mut self, wait: Duration) -> bool {
        tokio::select! {
            () = self.asked() => false,
            () = tokio::time::sleep(wait) => true,
        }
    }
}

pub(crate) struct Worker {
    pub(crate) group: Arc<Group>,
    pub(crate) board: Arc<Board>,
    pub(crate) breaker: Breaker,
}

/// How many messages may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Take {
    pub(crate) max: usize,
    /// Only to see whether the handler is back: most of them are not handled.
    probing: bool,
}

impl Worker {
    /// Waits until messages may be handled and answers how many of at most `max`; `None` when asked to stop.
    pub(crate) async fn ready(&self, max: usize, stop: &mut Stop) -> Option<Take> {
        let probing = tokio::select! {
            biased;
            () = stop.asked() => return None,
            probing = self.breaker.ready() => probing,
        };
        let max = match probing {
            // The others of the batch in which a suspect struck may be done by now: look past them for a witness.
            true if self.group.suspects().any() && !self.group.is_at_most_once() => 2 * max,
            true => 1,
            false => max,
        };
        Some(Take { max, probing })
    }

    /// Handles `arrivals` and tells the producer. `None`: nothing is known to be finished, the broker must
    /// deliver them again.
    pub(crate) async fn work(
        &self,
        arrivals: Vec<Arrival>,
        take: Take,
        stop: &mut Stop,
    ) -> Option<Vec<Receipt>> {
        if take.probing && arrivals.len() > 1 {
            self.probe(&arrivals, stop).await
        } else {
            self.work_all(arrivals, stop).await
        }
    }

    /// Tries one message after another until one shows whether the handler is down; those that may be to blame
    /// themselves only if no other can tell.
    async fn probe(&self, arrivals: &[Arrival], stop: &mut Stop) -> Option<Vec<Receipt>> {
        let not_tried = Receipt::Unavailable { error: "not tried: the handler is down".to_owned() };
        let mut receipts = vec![not_tried; arrivals.len()];
        let is_suspect = |place: &usize| self.group.suspects().is_suspect(&arrivals[*place]);
        let (suspects, others): (Vec<usize>, Vec<usize>) = (0..arrivals.len()).partition(is_suspect);
        // Nothing passes an earlier one of its key.
        let mut stuck: HashMap<_, usize> = HashMap::new();
        for place in &suspects {
            self.group.lane(&arrivals[*place]).map(|lane| stuck.entry(lane).or_insert(*place));
        }
        for place in others.into_iter().chain(suspects) {
            let lane = self.group.lane(&arrivals[place]);
            if lane.as_ref().and_then(|lane| stuck.get(lane)).is_some_and(|earlier| *earlier < place) {
                continue;
            }
            let runs = self.group.suspects().runs();
            let receipt = self.work_all(vec![arrivals[place].clone()], stop).await?.pop()?;
            if !matches!(receipt, Receipt::Done | Receipt::Duplicate) {
                lane.map(|lane| stuck.insert(lane, place));
            }
            receipts[place] = receipt;
            // One that was done before, or waits, never came to the handler and tells nothing.
            if self.group.suspects().runs() > runs {
                break;
            }
        }
        Some(receipts)
    }

    async fn work_all(&self, arrivals: Vec<Arrival>, stop: &mut Stop) -> Option<Vec<Receipt>> {
        let name = self.group.name();
        let received: Vec<_> = arrivals.iter().map(|arrival| Received::new(arrival, name)).collect();
        let receipts = match self.group.handle(arrivals).await {
            Ok(receipts) => receipts,
            Err(error) => {
                self.store_failed(&error);
                return None;
            }
        };
        self.board.well(Need::Store);
        self.board.count(&receipts);
        self.judge(&receipts);
        self.tell(done(received, &receipts), stop).await.then_some(receipts)
    }

    pub(crate) fn store_failed(&self, error: &Error) {
        let group = self.group.name();
        if error.is_transient() {
            self.board.paused(Need::Store, error.to_string());
            warn!(group, %error, "the consumer pauses and tries again by itself");
        } else {
            self.board.broken(Need::Store, error.to_string());
            warn!(group, %error, "the consumer cannot work until this is mended; it tries again by itself");
        }
        self.breaker.trip();
    }

    /// Opens or closes the breaker by what was seen of the handler.
    fn judge(&self, receipts: &[Receipt]) {
        let down = receipts.iter().find_map(|receipt| match receipt {
            Receipt::Unavailable { error } => Some(error),
            _ => None,
        });
        let group = self.group.name();
        if let Some(error) = down {
            self.board.paused(Need::Handler, error.clone());
            self.breaker.trip();
            warn!(group, error, "the handler is down; the consumer pauses and tries one message at a time");
        } else if receipts
            .iter()
            .any(|receipt| matches!(receipt, Receipt::Done | Receipt::Dead { .. } | Receipt::Lost { .. }))
        {
            // Duplicates and messages parked behind another never reached the handler: they prove nothing.
            if self.board.well(Need::Handler) {
                info!(group, "the handler works again");
            }
            self.breaker.close();
        }
    }

    /// Tells the producer, for as long as that takes. `false`: asked to stop before it was told.
    async fn tell(&self, mut finished: Vec<Received>, stop: &mut Stop) -> bool {
        let group = self.group.name();
        let mut backoff = Backoff::default();
        while let Err(untold) = self.group.tell(finished).await {
            let wait = backoff.next();
            let (count, error) = (untold.messages.len(), untold.error);
            warn!(group, count, error, ?wait, "the producer cannot be told what is done; telling it again");
            self.board.paused(Need::Producer, error);
            if !stop.wait(wait).await {
                return false;
            }
            finished = untold.messages;
        }
        if self.board.well(Need::Producer) {
            info!(group, "the producer takes acknowledgements again");
        }
        true
    }
}
