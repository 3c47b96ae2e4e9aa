//! One suite for every broker: each numbered rule of its contracts is a case.
//!
//! A backend gives a [`Fixture`] and writes `testkit::broker_conformance!(ItsFixture);` in a test file.

pub mod cases;
mod saboteur;

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use broker::{Publisher, Subscriber};

pub use saboteur::Sabotage;
use saboteur::{Memory, Saboteur};

/// Both sides of a broker.
pub trait Broker: Publisher + Subscriber {}

impl<T: Publisher + Subscriber> Broker for T {}

/// How the suite gets at a backend.
#[async_trait]
pub trait Fixture: Send + Sync + 'static {
    /// A broker that has no messages yet, whose payloads are limited to a few kilobytes and whose members
    /// are missed after about half a second of silence.
    async fn fresh() -> Self
    where
        Self: Sized;

    /// A client of it. Every call gives another one, such as another process would have.
    async fn open(&self) -> Arc<dyn Broker>;

    /// A client whose members fall silent: they are taken for dead at the next [`expire`](Self::expire)
    /// although they still believe to be alive. No wrapper can do that to a real broker.
    async fn open_silent(&self) -> Arc<dyn Broker>;

    /// Makes the leases of all members end now, as time would.
    async fn expire(&self);

    /// Makes the broker accept connections and answer nothing until the guard is dropped. No wrapper can do
    /// that to a real broker either.
    async fn stall(&self) -> Box<dyn Any + Send>;

    /// The publisher's own time limit, with a margin.
    fn time_limit(&self) -> Duration;
}

/// Where a case takes place: a fresh broker, perhaps with a saboteur in front of it.
#[derive(Clone)]
pub struct World {
    fixture: Arc<dyn Fixture>,
    sabotage: Option<(Sabotage, Arc<Memory>)>,
}

impl World {
    async fn fresh<F: Fixture>(sabotage: Option<Sabotage>) -> Self {
        Self {
            fixture: Arc::new(F::fresh().await),
            sabotage: sabotage.map(|sabotage| (sabotage, Arc::default())),
        }
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
pub fn conform<F: Fixture, C>(case: fn(World) -> C)
where
    C: Future<Output = ()> + Send + 'static,
{
    crate::rejection::run(async move { case(World::fresh::<F>(None).await).await });
}

/// A case, its name and what it must notice.
pub type Rejection = (&'static str, Sabotage, fn(World) -> Running);

/// Runs every case against the saboteur that breaks its rule.
///
/// # Panics
/// When a case does not notice.
pub fn reject<F: Fixture>(cases: Vec<Rejection>) {
    let cases = cases.into_iter().map(|(name, sabotage, case)| {
        (name, async move {
            let world = World::fresh::<F>(Some(sabotage)).await;
            let memory = world.sabotage.clone().map(|(_, memory)| memory).unwrap_or_default();
            crate::rejection::sabotaged(case(world), move || memory.struck()).await
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
    (($fixture:ty) $($module:ident :: $case:ident => $sabotage:ident;)*) => {
        $(
            #[test]
            fn $case() {
                $crate::broker::conform::<$fixture, _>($crate::broker::cases::$module::$case);
            }
        )*

        #[test]
        fn every_case_rejects_its_saboteur() {
            $crate::broker::reject::<$fixture>(vec![$((
                stringify!($case),
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
            publish::every_message_has_one_outcome_in_its_place => ReversesOutcomes;
            publish::what_was_confirmed_is_there_after_everybody_has_gone => ConfirmsInWords;
            publish::messages_of_a_key_are_stored_in_the_order_given => StoresBackwards;
            publish::after_one_that_was_not_confirmed_none_of_its_key_is_stored => StoresTheHeld;
            publish::an_impossible_message_is_rejected_alone => RejectsTheBatch;
            publish::every_part_of_a_message_arrives_as_it_was_sent => LosesHeaders;
            publish::publish_ends_within_its_time_limit => WaitsForever;

            receive::each_group_gets_each_message => OneGroupForAll;
            receive::what_was_not_acknowledged_comes_again_after_a_crash => AcknowledgesOnReceipt;
            receive::messages_of_a_key_arrive_in_order_from_one_partition => ReversesDeliveries;
            receive::members_of_a_group_never_get_the_same_message => EachMemberItsOwnGroup;
            receive::acknowledging_finishes_all_before_it => AcknowledgesNothing;
            receive::a_member_that_lost_its_partitions_acknowledges_nothing => AcknowledgesForOthers;
            receive::what_was_given_back_comes_again_with_all_after_it => GivesBackNothing;
            receive::a_new_group_starts_at_the_oldest_message => StartsAtTheEnd;
            receive::a_receive_that_was_dropped_loses_nothing => LosesOnCancel;
            receive::a_closed_member_leaves_its_partitions_to_others => ClosesInWords;
        }
    };
}
