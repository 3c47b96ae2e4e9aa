//! Messages that share a transaction of a handler that makes their marks.
//!
//! A commit is dearer than most work. Messages of a topic and key wait for a worker together, and whoever gets one takes others
//! along that wait too: an even share, up to a number that doubles at first, grows by one after the first failure, and shrinks
//! by half whenever it was too large. What failed together is done one by one: then it is known whose fault it was.
//!
//! The more a transaction locks, the sooner two of them wait for each other in a circle, and a server may need a second to
//! see that. So after one that failed and was slow nobody shares for many times as long, twice as long if it happens again soon.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::group::Group;
use crate::handler::{Handler, Together, Transact};
use crate::reserved::{Runner, Turn};

/// Messages of a transaction at most.
const MOST: usize = 128;

/// Even where others are idle: a commit for fewer is dearer than the wait.
const FEW: usize = 16;

/// A transaction that takes longer holds its locks for too long: the next has fewer messages.
const LONG: Duration = Duration::from_millis(100);

/// How long nobody shares after a slow failure, in times of what it took, at first; and at most.
const REST: u32 = 20;
const LONGEST_REST: Duration = Duration::from_secs(600);

/// How many messages a transaction may have.
#[derive(Debug)]
pub(crate) struct Sharing(Mutex<State>);

#[derive(Debug)]
struct State {
    most: usize,
    /// Until the first setback it is found quickly how many that can be.
    doubles: bool,
    /// The last rest, and its end.
    rest: Option<(Duration, Instant)>,
}

impl Default for Sharing {
    fn default() -> Self {
        Self(Mutex::new(State { most: 1, doubles: true, rest: None }))
    }
}

impl Sharing {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("nothing panics while it holds the state")
    }

    fn most(&self, now: Instant) -> usize {
        let state = self.state();
        if state.rest.is_some_and(|(_, end)| now < end) { 1 } else { state.most }
    }

    /// So many shared a transaction, or could not.
    fn learn(&self, tried: usize, Together { done, open }: Together, now: Instant) {
        let mut state = self.state();
        if done && open <= LONG {
            if tried >= state.most {
                let grown = if state.doubles { state.most * 2 } else { state.most + 1 };
                state.most = grown.min(MOST);
            }
            return;
        }
        state.doubles = false;
        if done || open <= LONG {
            state.most = state.most.min(tried / 2).max(1);
        } else if state.rest.is_none_or(|(_, end)| end <= now) {
            // Not where others of the same circle have said so already. What comes soon after a rest would come again.
            let soon = state.rest.filter(|(rest, end)| now < *end + *rest);
            let last = soon.map_or(Duration::ZERO, |(rest, _)| rest);
            let rest = (open * REST).max(last * 2).min(LONGEST_REST);
            (state.most, state.rest) = (1, Some((rest, now + rest)));
        }
    }
}

/// The messages of a batch that wait for a transaction.
pub(crate) struct Shares {
    transact: Arc<dyn Transact>,
    sharing: Arc<Sharing>,
    workers: usize,
    waiting: Mutex<VecDeque<Waiting>>,
}

/// Messages of one topic and key.
struct Waiting {
    turns: Vec<Turn>,
    done: oneshot::Sender<bool>,
}

impl Shares {
    /// None where each message is by itself.
    pub(crate) fn of(group: &Group) -> Option<Arc<Self>> {
        let Handler::Transact(transact) = group.handler() else { return None };
        // What is handled at most once is never tried in vain.
        (!group.is_at_most_once()).then(|| {
            Arc::new(Self {
                transact: Arc::clone(transact),
                sharing: Arc::clone(group.sharing()),
                workers: group.workers(),
                waiting: Mutex::default(),
            })
        })
    }

    /// How many messages a transaction may have now.
    pub(crate) fn most(&self) -> usize {
        self.sharing.most(Instant::now())
    }

    /// Takes note of one that was done by itself.
    pub(crate) fn done_alone(&self) {
        self.learn(1, Together { done: true, open: Duration::ZERO });
    }

    /// Does the work of messages of one topic and key, perhaps together with others. `false`: nothing was done.
    pub(crate) async fn run(&self, runner: &Runner, turns: &[Turn]) -> bool {
        let (done, mut heard) = oneshot::channel();
        self.waiting().push_back(Waiting { turns: turns.to_vec(), done });
        loop {
            let worker = tokio::select! {
                biased;
                done = &mut heard => return done.unwrap_or(false),
                worker = runner.worker() => worker,
            };
            // Others that were reserved with these are about to wait too.
            tokio::task::yield_now().await;
            let share = self.take();
            if share.is_empty() {
                // Another has taken these along.
                drop(worker);
                return heard.await.unwrap_or(false);
            }
            let done = self.share(runner, &share).await;
            for waiting in share {
                // Whoever waits for it may be gone with the batch.
                let _ = waiting.done.send(done);
            }
        }
    }

    async fn share(&self, runner: &Runner, share: &[Waiting]) -> bool {
        let turns: Vec<Turn> = share.iter().flat_map(|waiting| &waiting.turns).copied().collect();
        // Alone it need not be tried twice to know whose fault it is.
        if turns.len() == 1 || !runner.may_begin() {
            return false;
        }
        let together = runner.together(self.transact.as_ref(), &turns).await;
        self.learn(turns.len(), together);
        together.done
    }

    /// As many for each worker, or a few, and no more than may share a transaction.
    fn take(&self) -> Vec<Waiting> {
        let mut waiting = self.waiting();
        let all: usize = waiting.iter().map(|waiting| waiting.turns.len()).sum();
        let most = all.div_ceil(self.workers).max(FEW).min(self.most());
        let mut share: Vec<Waiting> = waiting.pop_front().into_iter().collect();
        let mut messages: usize = share.iter().map(|waiting| waiting.turns.len()).sum();
        while let Some(next) = waiting.pop_front_if(|next| messages + next.turns.len() <= most) {
            messages += next.turns.len();
            share.push(next);
        }
        share
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Waiting>> {
        self.waiting.lock().expect("nothing panics while it holds those that wait")
    }

    fn learn(&self, tried: usize, together: Together) {
        self.sharing.learn(tried, together, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_millis(5);
    const SLOW: Duration = Duration::from_secs(1);

    fn went(done: bool, open: Duration) -> Together {
        Together { done, open }
    }

    #[test]
    fn a_share_doubles_until_a_setback_and_grows_by_one_from_then_on() {
        let (sharing, now) = (Sharing::default(), Instant::now());
        for most in [1, 2, 4, 8, 16, 32, 64, MOST, MOST] {
            assert_eq!(sharing.most(now), most);
            sharing.learn(most, went(true, QUICK), now);
        }
        sharing.learn(100, went(false, QUICK), now);
        assert_eq!(sharing.most(now), 50);
        sharing.learn(49, went(true, QUICK), now);
        assert_eq!(sharing.most(now), 50, "nobody tried so many");
        sharing.learn(50, went(true, QUICK), now);
        assert_eq!(sharing.most(now), 51);
        sharing.learn(51, went(true, SLOW), now);
        assert_eq!(sharing.most(now), 25, "it went well, and held its locks for too long");
        for _ in 0..2 * MOST {
            sharing.learn(MOST, went(true, QUICK), now);
        }
        assert_eq!(sharing.most(now), MOST);
        sharing.learn(1, went(false, QUICK), now);
        assert_eq!(sharing.most(now), 1);
    }

    #[test]
    fn after_a_slow_failure_nobody_shares_for_a_while_and_longer_if_it_comes_again_soon() {
        let (sharing, mut now) = (Sharing::default(), Instant::now());
        for rest in [20, 40, 80, 160, 320, 600, 600].map(Duration::from_secs) {
            sharing.learn(10, went(false, SLOW), now);
            // Another of the same circle.
            sharing.learn(10, went(false, SLOW), now + QUICK);
            assert_eq!(sharing.most(now + rest - QUICK), 1, "{rest:?}");
            now += rest;
            sharing.learn(1, went(true, QUICK), now);
            assert_eq!(sharing.most(now), 2, "{rest:?}");
        }
        // A row of them that comes later begins anew.
        now += Duration::from_secs(600);
        sharing.learn(10, went(false, SLOW), now);
        now += Duration::from_secs(20);
        sharing.learn(1, went(true, QUICK), now);
        assert_eq!(sharing.most(now), 2);
    }
}
