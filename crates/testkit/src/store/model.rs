//! Random histories, played on a real store and on a model that knows nothing but [`message::step`].
//!
//! After every step each record must be what the model says and the counts must be those of the records; what
//! is claimed must be what may be claimed; and in the end nothing may be left behind.

mod known;

use std::time::Duration;

use message::{Event, Message};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use store::{Acknowledged, Batch, Left, NewMessage, TopicRule, Verdict};

use super::{Fixture, Relay, Sabotage, World, holding};
use known::{Known, Model};

/// The topic on which messages in trouble hold their key.
const ORDERED: &str = "ordered";

/// The group that must acknowledge.
const GROUP: &str = "billing";

/// Relays that live at the same time.
const RELAYS: usize = 2;

/// Histories that are played on a store that is right, and the steps of the longest.
const HISTORIES: u32 = 40;
const LENGTH: usize = 80;

/// Histories in which a saboteur must be found. The first that finds it ends the search: one in seven does
/// where holds are forgotten, so 40 would let that saboteur pass once in 800 runs.
const SEARCH: u32 = 1_000;

/// One thing that happens.
#[derive(Clone, Debug)]
enum Step {
    Append {
        ordered: bool,
        key: Option<u8>,
        count: usize,
    },
    Beat(usize),
    Leave(usize),
    /// `only`: of the ordered topic, or of the other; else of both.
    Claim {
        relay: usize,
        limit: usize,
        only: Option<bool>,
    },
    /// `which` of the relay's batches.
    Settle {
        relay: usize,
        which: usize,
        fates: Vec<Fate>,
    },
    Requeue(usize),
    Discard(usize),
    Delete(usize),
    Acknowledge(usize),
    Redeliver(usize),
}

/// What becomes of one message of a batch.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Sent,
    Failed { later: bool },
    Dead { attempted: bool },
    Released { error: bool },
    Postponed { later: bool },
}

/// Plays random histories.
///
/// # Panics
/// When the store and the model disagree, with the shortest history found in which they do.
pub fn histories_agree<F: Fixture>() {
    if let Err(difference) = play::<F>(None) {
        panic!("{difference}");
    }
}

/// Shows that the histories would find a store that forgets who waits for whom, and one that miscounts.
///
/// # Panics
/// When they do not.
pub fn histories_reject_saboteurs<F: Fixture>() {
    for sabotage in [Sabotage::ForgetsHolds, Sabotage::ForgetsCrashes, Sabotage::Miscounts] {
        assert!(play::<F>(Some(sabotage)).is_err(), "the histories do not notice a store that {sabotage:?}");
    }
}

fn play<F: Fixture>(sabotage: Option<Sabotage>) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    // A saboteur need only be found, not explained.
    let (cases, shrinks) = if sabotage.is_some() { (SEARCH, 0) } else { (HISTORIES, 300) };
    let config = Config { cases, max_shrink_iters: shrinks, failure_persistence: None, ..Config::default() };
    let history = prop::collection::vec(step(), 1..LENGTH);
    TestRunner::new(config)
        .run(&history, |steps| {
            runtime.block_on(async {
                let mut history = History::begin(World::fresh::<F>(sabotage).await).await;
                history.beat(0).await.map_err(TestCaseError::fail)?;
                for step in &steps {
                    history.take(step).await.map_err(|error| wrong(step, &error))?;
                    history.model.compare(&history.store).await.map_err(|error| wrong(step, &error))?;
                }
                history.end().await.map_err(TestCaseError::fail)
            })
        })
        .map_err(|error| error.to_string())
}

fn wrong(step: &Step, error: &str) -> TestCaseError {
    TestCaseError::fail(format!("at {step:?}: {error}"))
}

fn step() -> impl Strategy<Value = Step> {
    let fate = prop_oneof![
        3 => Just(Fate::Sent),
        2 => any::<bool>().prop_map(|later| Fate::Failed { later }),
        2 => any::<bool>().prop_map(|attempted| Fate::Dead { attempted }),
        1 => any::<bool>().prop_map(|error| Fate::Released { error }),
        1 => any::<bool>().prop_map(|later| Fate::Postponed { later }),
    ];
    let fates = prop::collection::vec(fate, 1..5);
    let key = prop::option::weighted(0.9, 0_u8..2);
    prop_oneof![
        6 => (any::<bool>(), key, 1_usize..5)
            .prop_map(|(ordered, key, count)| Step::Append { ordered, key, count }),
        3 => (0..RELAYS).prop_map(Step::Beat),
        1 => (0..RELAYS).prop_map(Step::Leave),
        8 => (0..RELAYS, 1_usize..6, any::<Option<bool>>())
            .prop_map(|(relay, limit, only)| Step::Claim { relay, limit, only }),
        8 => (0..RELAYS, any::<usize>(), fates)
            .prop_map(|(relay, which, fates)| Step::Settle { relay, which, fates }),
        3 => any::<usize>().prop_map(Step::Requeue),
        2 => any::<usize>().prop_map(Step::Discard),
        1 => any::<usize>().prop_map(Step::Delete),
        2 => any::<usize>().prop_map(Step::Acknowledge),
        2 => any::<usize>().prop_map(Step::Redeliver),
    ]
}

fn rule(topic: &str) -> TopicRule {
    if topic == ORDERED { TopicRule { channel: 1, ..holding(topic) } } else { super::free(topic) }
}

fn ordered_only(topic: &str) -> TopicRule {
    let all = rule(topic);
    TopicRule { take: if topic == ORDERED { all.take } else { 0 }, ..all }
}

fn free_only(topic: &str) -> TopicRule {
    let all = rule(topic);
    TopicRule { take: if topic == ORDERED { 0 } else { all.take }, ..all }
}

/// A batch in somebody's hands.
struct Held {
    relay: usize,
    batch: Batch,
    /// Its relay has left, or another has its lane: it can be settled no more.
    lost: bool,
    /// Somebody has resolved it.
    resolved: bool,
}

/// A store, the relays that work on it, and what the model says.
struct History {
    /// Keeps the place where the store is.
    _world: World,
    store: std::sync::Arc<dyn store::Store>,
    relays: Vec<Relay>,
    held: Vec<Held>,
    model: Model,
}

impl History {
    async fn begin(world: World) -> Self {
        let store = world.open().await;
        let relays = (0..RELAYS).map(|_| Relay::new(store.clone()).by(rule)).collect();
        Self { _world: world, store, relays, held: Vec::new(), model: Model::default() }
    }

    async fn take(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::Append { ordered, key, count } => self.append(*ordered, *key, *count).await,
            Step::Beat(relay) => self.beat(*relay).await,
            Step::Leave(relay) => {
                self.leave(*relay).await;
                Ok(())
            }
            Step::Claim { relay, limit, only } => self.claim(*relay, *limit, *only).await.map(drop),
            Step::Settle { relay, which, fates } => self.settle(*relay, *which, fates).await,
            Step::Requeue(number) => self.amend(*number, Event::Requeued).await,
            Step::Discard(number) => self.amend(*number, Event::Discarded).await,
            Step::Delete(number) => self.amend(*number, Event::Deleted).await,
            Step::Acknowledge(number) => self.acknowledge(*number).await,
            Step::Redeliver(number) => self.redeliver(*number).await,
        }
    }

    async fn append(&mut self, ordered: bool, key: Option<u8>, count: usize) -> Result<(), String> {
        let mut messages = Vec::with_capacity(count);
        for _ in 0..count {
            let mut message = Message::new(if ordered { ORDERED } else { "free" }, "{}");
            message.key = key.map(|key| key.to_string());
            self.model.known.push(Known::new(&message));
            messages.push(NewMessage::from(message));
        }
        let results = self.store.append(messages).await;
        results.map(drop).map_err(|error| error.to_string())
    }

    async fn beat(&mut self, number: usize) -> Result<(), String> {
        let relay = &mut self.relays[number];
        let beaten = relay.beat().await;
        let mut orphans = 0;
        for held in self.held.iter_mut().filter(|held| !held.resolved) {
            let taken = beaten
                .held
                .iter()
                .any(|lease| lease.lane == held.batch.lease.lane && lease.epoch != held.batch.lease.epoch);
            if taken {
                (held.lost, held.resolved) = (true, true);
                for claimed in &held.batch.messages {
                    self.model.happen(claimed.message.id, Event::Orphaned)?;
                    orphans += 1;
                }
            }
        }
        if orphans != beaten.orphans {
            return Err(format!("{} orphans were reported and there were {orphans}", beaten.orphans));
        }
        // Gives back what it should and can, so that lanes go around.
        let open: Vec<u16> =
            self.held.iter().filter(|held| !held.resolved).map(|held| held.batch.lease.lane).collect();
        let idle = relay.held.iter().filter(|lease| !open.contains(&lease.lane));
        let back: Vec<_> = idle.take(beaten.surplus).copied().collect();
        relay.held.retain(|lease| !back.contains(lease));
        relay.store.release(&back, Left::Untouched).await.map_err(|error| error.to_string())
    }

    async fn leave(&mut self, number: usize) {
        self.relays[number].leave().await;
        self.relays[number] = Relay::new(self.store.clone()).by(rule);
        for held in self.held.iter_mut().filter(|held| held.relay == number) {
            held.lost = true;
        }
    }

    /// Answers whether anything was or may still be there to claim.
    async fn claim(&mut self, number: usize, limit: usize, only: Option<bool>) -> Result<bool, String> {
        let by = match only {
            None => rule,
            Some(true) => ordered_only,
            Some(false) => free_only,
        };
        let turn = self.relays[number].look_by(by, limit).await;
        let some = turn.more || !turn.batches.is_empty();
        for batch in turn.batches {
            self.model.claimed(&batch)?;
            self.held.push(Held { relay: number, batch, lost: false, resolved: false });
        }
        Ok(some)
    }

    /// Settles one of the relay's batches; one that it has lost must be refused.
    async fn settle(&mut self, number: usize, which: usize, fates: &[Fate]) -> Result<(), String> {
        let mut own: Vec<usize> =
            (0..self.held.len()).filter(|place| self.held[*place].relay == number).collect();
        if own.is_empty() {
            return Ok(());
        }
        let place = own.swap_remove(which % own.len());
        let lost = self.held[place].lost;
        let batch = &self.held[place].batch;
        let fate = |claimed: &store::Claimed| {
            let place = batch.messages.iter().position(|other| other.seq == claimed.seq).unwrap_or(0);
            fates[place % fates.len()]
        };
        let verdict = |claimed: &store::Claimed| verdict(fate(claimed), claimed.message.topic == ORDERED);
        let turn = self.relays[number].settle(batch, verdict).await;
        if turn.fenced.is_empty() == lost {
            return Err(format!("the settlement of a batch with lost = {lost} answered {:?}", turn.fenced));
        }
        if lost {
            if self.held[place].resolved {
                self.held.remove(place);
            }
            return Ok(());
        }
        for claimed in &batch.messages {
            self.model.settled(claimed.message.id, fate(claimed))?;
        }
        self.held.remove(place);
        Ok(())
    }

    async fn amend(&mut self, number: usize, event: Event) -> Result<(), String> {
        let Some(id) = self.model.pick(number) else { return Ok(()) };
        let answer = match event {
            Event::Requeued => self.store.requeue(id, "model").await,
            Event::Discarded => self.store.discard(id, "model").await,
            _ => self.store.delete(id, "model").await,
        };
        let expected = self.model.happen(id, event);
        if answer.is_ok() != expected.is_ok() {
            return Err(format!("{event:?} answered {answer:?} and the model {expected:?}"));
        }
        Ok(())
    }

    async fn acknowledge(&mut self, number: usize) -> Result<(), String> {
        let Some(id) = self.model.pick(number) else { return Ok(()) };
        let answers = self.store.acknowledge(vec![(id, GROUP.to_owned())]).await;
        let expected = self.model.acknowledge(id);
        match answers {
            Ok(answers) if answers == [expected.clone()] => Ok(()),
            other => Err(format!("an acknowledgement answered {other:?} and the model {expected:?}")),
        }
    }

    async fn redeliver(&mut self, number: usize) -> Result<(), String> {
        let Some(id) = self.model.pick(number) else { return Ok(()) };
        let answer = self.store.redeliver(id, GROUP, "nobody answered").await;
        let expected = self.model.redeliver(id)?;
        match answer {
            Ok(answer) if answer == expected => Ok(()),
            other => Err(format!("a redelivery answered {other:?} and the model {expected}")),
        }
    }

    /// Everybody leaves, somebody new comes, what is Dead is requeued, and all that can be sent is sent.
    async fn end(mut self) -> Result<(), String> {
        for number in 0..RELAYS {
            self.leave(number).await;
        }
        self.beat(0).await?;
        self.held.clear();
        for number in 0..self.model.known.len() {
            if self.model.is_dead(number) {
                self.amend(number, Event::Requeued).await?;
            }
        }
        while self.claim(0, 3, None).await? {
            while self.held.iter().any(|held| held.relay == 0) {
                self.settle(0, 0, &[Fate::Sent]).await?;
            }
            self.model.compare(&self.store).await?;
        }
        self.model.nothing_is_left_behind()
    }
}

fn wait(later: bool) -> Duration {
    if later { Duration::from_secs(3_600) } else { Duration::ZERO }
}

fn verdict(fate: Fate, hold: bool) -> Verdict {
    let error = "no luck".to_owned();
    match fate {
        Fate::Sent => Verdict::Sent { ack_groups: vec![GROUP.to_owned()] },
        Fate::Failed { later } => Verdict::Failed { error, retry_after: wait(later), hold },
        Fate::Postponed { later } => Verdict::Postponed { wait: wait(later) },
        Fate::Dead { attempted } => Verdict::Dead { reason: "the model".to_owned(), error, attempted, hold },
        Fate::Released { error: told } => Verdict::Released { error: told.then_some(error) },
    }
}

/// What the model expects of an acknowledgement.
fn acknowledged(first: bool) -> Acknowledged {
    if first { Acknowledged::New } else { Acknowledged::Repeated }
}
