//! One suite for every broker: each numbered rule of its contracts is a case.
//!
//! A backend gives a [`Fixture`] and writes `testkit::broker_conformance!(ItsFixture);` in a test file.

pub mod cases;
mod saboteur;

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use broker::{Guarantees, Publisher, Subscriber, Transactions};

pub use saboteur::Sabotage;
use saboteur::{Memory, Saboteur};

/// Both sides of a broker.
pub trait Broker: Publisher + Subscriber {}

impl<T: Publisher + Subscriber> Broker for T {}

/// How the suite gets at a backend.
#[async_trait]
pub trait Fixture: Send + Sync + 'static {
    /// A broker that has no messages yet, whose payloads are limited to a few kilobytes and whose members
    /// are missed after about half a second of silence, or after as little as the broker allows. Cases may share a server:
    /// then each has names of its own.
    async fn fresh() -> Self
    where
        Self: Sized;

    /// The same on a server that no other case uses, so that it may be stalled and restarted.
    async fn alone() -> Self
    where
        Self: Sized;

    /// A client of it. Every call gives another one, such as another process would have.
    async fn open(&self) -> Arc<dyn Broker>;

    /// A client that makes no destination that is missing; nothing where the broker makes every destination by itself.
    async fn open_strict(&self) -> Option<Arc<dyn Broker>>;

    /// A client whose members fall silent: they are taken for dead at the next [`expire`](Self::expire)
    /// although they still believe to be alive. No wrapper can do that to a real broker.
    async fn open_silent(&self) -> Arc<dyn Broker>;

    /// Makes the leases of all members that fell silent end now, or waits until they have.
    async fn expire(&self);

    /// Makes the broker accept connections and answer nothing until the guard is dropped. Asked of a broker
    /// that is [`alone`](Self::alone). No wrapper can do that to a real broker either.
    async fn stall(&self) -> Box<dyn Any + Send>;

    /// Stops the broker as its operator would, and starts it again with what it had stored. Asked of a broker that is
    /// [`alone`](Self::alone).
    async fn restart(&self);

    /// The publisher's own time limit, with a margin.
    fn time_limit(&self) -> Duration;

    /// How long the broker leaves a message with a member that does not say that it is still at work.
    fn patience(&self) -> Duration;
}

/// Whether a case may share its server with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// Its server must be its own: it stalls or restarts it.
    Alone,
    /// Others may use the same server under other names.
    Shared,
}

/// Where a case takes place: a fresh broker, perhaps with a saboteur in front of it.
#[derive(Clone)]
pub struct World {
    fixture: Arc<dyn Fixture>,
    sabotage: Option<(Sabotage, Arc<Memory>)>,
    waived: Arc<AtomicBool>,
}

impl World {
    async fn new<F: Fixture>(company: Company, sabotage: Option<Sabotage>) -> Self {
        let fixture: Arc<dyn Fixture> = match company {
            Company::Alone => Arc::new(F::alone().await),
            Company::Shared => Arc::new(F::fresh().await),
        };
        let sabotage = sabotage.map(|sabotage| (sabotage, Arc::default()));
        Self { fixture, sabotage, waived: Arc::default() }
    }

    /// Whether the broker claims something. If not, the case has nothing to prove, and its saboteur nothing to break.
    pub async fn claimed(&self, what: fn(&Guarantees) -> bool) -> bool {
        let claimed = what(&self.fixture.open().await.guarantees());
        self.waived.fetch_or(!claimed, Ordering::SeqCst);
        claimed
    }

    /// The transactions of another client, or nothing to prove.
    pub async fn transactions(&self) -> Option<Arc<dyn Transactions>> {
        let transactions = self.open().await.transactions();
        self.waived.fetch_or(transactions.is_none(), Ordering::SeqCst);
        transactions
    }

    /// A client that makes no destination, or nothing to prove: see [`Fixture::open_strict`].
    pub async fn open_strict(&self) -> Option<Arc<dyn Broker>> {
        let strict = self.fixture.open_strict().await;
        self.waived.fetch_or(strict.is_none(), Ordering::SeqCst);
        strict.map(|broker| self.behind(broker))
    }

    /// Another client.
    pub async fn open(&self) -> Arc<dyn Broker> {
        self.behind(self.fixture.open().await)
    }

    /// See [`Fixture::open_silent`].
    pub async fn open_silent(&self) -> Arc<dyn Broker> {
        self.behind(self.fixture.open_silent().await)
    }

    fn behind(&self, broker: Arc<dyn Broker>) -> Arc<dyn Broker> {
        match &self.sabotage {
            None => broker,
            Some((sabotage, memory)) => Arc::new(Saboteur::new(broker, *sabotage, Arc::clone(memory))),
        }
    }

    /// See [`Fixture`].
    pub fn fixture(&self) -> &dyn Fixture {
        &*self.fixture
    }
}

type Running = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs one case on a fresh broker.
///
/// # Panics
/// When the broker breaks the rule.
pub fn conform<F: Fixture, C>(company: Company, case: fn(World) -> C)
where
    C: Future<Output = ()> + Send + 'static,
{
    crate::rejection::run(async move { case(World::new::<F>(company, None).await).await });
}

/// A case, its name, its company and what it must notice.
pub type Rejection = (&'static str, Company, Sabotage, fn(World) -> Running);

/// Runs every case against the saboteur that breaks its rule.
///
/// # Panics
/// When a case does not notice.
pub fn reject<F: Fixture>(cases: Vec<Rejection>) {
    let cases = cases.into_iter().map(|(name, company, sabotage, case)| {
        (name, async move {
            let world = World::new::<F>(company, Some(sabotage)).await;
            let memory = world.sabotage.clone().map(|(_, memory)| memory).unwrap_or_default();
            let waived = Arc::clone(&world.waived);
            let waived = move || waived.load(Ordering::SeqCst);
            crate::rejection::sabotaged(case(world), waived, move || memory.struck()).await
        })
    });
    crate::rejection::all_must_fail(cases.collect());
}

/// Makes a test of every case, and one that each case rejects its saboteur:
/// `testkit::broker_conformance!(Fixture);`
#[macro_export]
macro_rules! broker_conformance {
    ($fixture:ty) => {
        $crate::broker_cases! { broker_tests ($fixture) }
    };
}

/// The tests of one fixture.
#[doc(hidden)]
#[macro_export]
macro_rules! broker_tests {
    (($fixture:ty) $($company:ident $module:ident :: $case:ident => $sabotage:ident;)*) => {
        $(
            #[test]
            fn $case() {
                let company = $crate::broker::Company::$company;
                $crate::broker::conform::<$fixture, _>(company, $crate::broker::cases::$module::$case);
            }
        )*

        #[test]
        fn every_case_rejects_its_saboteur() {
            $crate::broker::reject::<$fixture>(vec![$((
                stringify!($case),
                $crate::broker::Company::$company,
                $crate::broker::Sabotage::$sabotage,
                |world| Box::pin($crate::broker::cases::$module::$case(world)),
            )),*]);
        }
    };
}

/// Every case and the saboteur that it must reject.
#[doc(hidden)]
#[macro_export]
macro_rules! broker_cases {
    ($then:ident $context:tt) => {
        $crate::$then! { $context
            Shared publish::every_message_has_one_outcome_in_its_place => ReversesOutcomes;
            Shared publish::what_was_confirmed_is_there_after_everybody_has_gone => ConfirmsInWords;
            Shared publish::messages_of_a_key_are_stored_in_the_order_given => StoresBackwards;
            Shared publish::after_one_that_was_not_confirmed_none_of_its_key_is_stored => StoresTheHeld;
            Shared publish::an_impossible_message_is_rejected_alone => RejectsTheBatch;
            Shared publish::every_part_of_a_message_arrives_as_it_was_sent => LosesHeaders;
            Alone publish::publish_ends_within_its_time_limit => WaitsForever;
            Shared publish::a_destination_that_is_missing_is_misconfigured_alone => BlamesTheMessage;
            Alone publish::a_publisher_goes_on_after_the_broker_was_restarted => NeverComesBack;
            Shared publish::what_is_sent_twice_while_it_is_recognised_is_stored_once => RecognisesNothing;

            Shared receive::each_group_gets_each_message => OneGroupForAll;
            Shared receive::what_was_not_acknowledged_comes_again_after_a_crash => AcknowledgesOnReceipt;
            Shared receive::messages_of_a_key_arrive_in_order_from_one_partition => ReversesDeliveries;
            Shared receive::members_of_a_group_never_get_the_same_message => EachMemberItsOwnGroup;
            Shared receive::acknowledging_finishes_all_before_it => AcknowledgesNothing;
            Shared receive::a_member_that_lost_its_partitions_acknowledges_nothing => AcknowledgesForOthers;
            Shared receive::what_was_given_back_comes_again_with_all_after_it => GivesBackNothing;
            Shared receive::a_new_group_starts_at_the_oldest_message => StartsAtTheEnd;
            Shared receive::a_receive_that_was_dropped_loses_nothing => LosesOnCancel;
            Shared receive::a_closed_member_leaves_its_partitions_to_others => ClosesInWords;
            Shared receive::what_a_slow_member_has_received_stays_with_it => LetsOthersHaveIt;
            Alone receive::nothing_is_lost_when_the_broker_is_restarted => LosesOnRestart;

            Shared transact::who_lost_a_lane_stores_nothing_any_more => LeavesTheFormerOwner;
            Shared transact::the_last_notes_of_all_who_had_a_lane_are_answered => AnswersOneNote;
            Shared transact::a_batch_is_stored_with_its_note => SendsWithoutTheNote;
        }
    };
}
