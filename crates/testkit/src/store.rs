//! One suite for every store: each numbered rule of the store's contracts is a case.
//!
//! Cases use nothing but the contracts, so that a new backend joins them unchanged: it gives a [`Fixture`] and
//! writes `testkit::store_conformance!(ItsFixture);` in a test file.

pub mod cases;
pub mod model;
mod pass_on;
mod relay;
mod saboteur;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use store::{Store, Work};

pub use relay::{Relay, dead, failed, free, holding, released, sent};
pub use saboteur::Sabotage;
use saboteur::{Memory, Saboteur};

/// How the suite gets at a backend.
#[async_trait]
pub trait Fixture: Send + Sync + 'static {
    /// A place where no store has been yet.
    async fn fresh() -> Self
    where
        Self: Sized;

    /// Opens the store in that place. Every call gives another handle, such as another process would have.
    async fn open(&self) -> Arc<dyn Store>;

    /// Work that writes a message on the topic `effects` with the arrival's payload as its id, and so fails
    /// while that id is taken.
    fn work(&self) -> Work;

    /// Work that cannot be done for any message: no message is to blame.
    fn impossible_work(&self) -> Work;
}

/// A fixture that is being made.
type Arriving = Pin<Box<dyn Future<Output = Arc<dyn Fixture>> + Send>>;

/// Where a case takes place: a fresh store, perhaps with a saboteur in front of it.
#[derive(Clone)]
pub struct World {
    fixture: Arc<dyn Fixture>,
    another: fn() -> Arriving,
    sabotage: Option<(Sabotage, Arc<Memory>)>,
}

impl World {
    async fn fresh<F: Fixture>(sabotage: Option<Sabotage>) -> Self {
        Self {
            fixture: Arc::new(F::fresh().await),
            another: || Box::pin(async { Arc::new(F::fresh().await) as Arc<dyn Fixture> }),
            sabotage: sabotage.map(|sabotage| (sabotage, Arc::default())),
        }
    }

    /// Another handle on the same store.
    pub async fn open(&self) -> Arc<dyn Store> {
        let store = self.fixture.open().await;
        match &self.sabotage {
            None => store,
            Some((sabotage, memory)) => Arc::new(Saboteur::new(store, *sabotage, Arc::clone(memory))),
        }
    }

    /// A place of the same kind where no store has been yet.
    pub async fn another(&self) -> Self {
        Self { fixture: (self.another)().await, ..self.clone() }
    }

    /// See [`Fixture::work`].
    pub fn work(&self) -> Work {
        self.fixture.work()
    }

    /// See [`Fixture::impossible_work`].
    pub fn impossible_work(&self) -> Work {
        self.fixture.impossible_work()
    }
}

type Running = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs one case on a fresh store.
///
/// # Panics
/// When the store breaks the rule.
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
            crate::rejection::sabotaged(case(world), || false, move || memory.struck()).await
        })
    });
    crate::rejection::all_must_fail(cases.collect());
}

/// Makes a test of every case, and one that each case rejects its saboteur:
/// `testkit::store_conformance!(Fixture);`
#[macro_export]
macro_rules! store_conformance {
    ($fixture:ty) => {
        $crate::store_cases! { store_tests ($fixture) }

        #[test]
        fn random_histories_agree_with_the_model() {
            $crate::store::model::histories_agree::<$fixture>();
        }

        #[test]
        fn random_histories_reject_their_saboteurs() {
            $crate::store::model::histories_reject_saboteurs::<$fixture>();
        }
    };
}

/// The tests of one fixture.
#[doc(hidden)]
#[macro_export]
macro_rules! store_tests {
    (($fixture:ty) $($module:ident :: $case:ident => $sabotage:ident;)*) => {
        $(
            #[test]
            fn $case() {
                $crate::store::conform::<$fixture, _>($crate::store::cases::$module::$case);
            }
        )*

        #[test]
        fn every_case_rejects_its_saboteur() {
            $crate::store::reject::<$fixture>(vec![$((
                stringify!($case),
                $crate::store::Sabotage::$sabotage,
                |world| Box::pin($crate::store::cases::$module::$case(world)),
            )),*]);
        }
    };
}

/// Every case and the saboteur that it must reject.
#[doc(hidden)]
#[macro_export]
macro_rules! store_cases {
    ($then:ident $context:tt) => {
        $crate::$then! { $context
            append::what_was_appended_is_there_for_another_process => WritesLater;
            append::each_message_is_stored_or_turned_away_by_itself => TurnsAwayTheWholeCall;
            append::results_come_in_the_order_of_the_messages => ReversesResults;
            append::of_many_appends_with_one_key_one_stores => ForgetsOnceKeys;
            append::a_key_that_was_used_for_another_request_is_turned_away => IgnoresFingerprints;
            append::messages_of_one_call_get_rising_numbers => AppendsBackwards;
            append::an_append_wakes_a_relay_of_its_process => NeverRings;

            lanes::a_lane_has_one_owner => HandsOutLanesTwice;
            lanes::every_change_of_hands_raises_the_epoch => RepeatsEpochs;
            lanes::a_lease_is_renewed_only_for_its_own_epoch_and_id => RenewsAnything;
            lanes::taking_a_lane_makes_what_its_owner_left_sendable_with_one_crash_more => ForgetsCrashes;
            lanes::taking_a_lane_resolves_every_batch_that_its_owner_left => ForgetsCrashes;
            lanes::a_message_that_was_left_too_often_is_dead => ForgetsCrashes;
            lanes::nothing_is_taken_from_a_living_owner => StealsLanes;
            lanes::who_holds_more_than_its_share_is_told_the_surplus => HidesSurplus;
            lanes::a_released_lane_is_free_at_once => ReleasesNothing;
            lanes::what_a_releasing_owner_left_untouched_is_what_it_was => BlamesLostAnswers;
            lanes::what_a_releasing_owner_fell_over_has_one_crash_more => ForgetsCrashes;
            lanes::a_dead_owners_lanes_are_free_when_its_lease_runs_out => NeverEndsLeases;
            lanes::the_number_of_lanes_changes_only_while_none_is_leased => ResizesInWords;
            lanes::an_open_batch_keeps_the_number_of_lanes => ForgetsCrashes;

            claim::a_message_is_in_one_open_batch_at_most => ClaimsTwice;
            claim::a_claim_under_a_lost_lease_takes_nothing => ClaimsForAnybody;
            claim::a_second_relay_cannot_settle_a_lost_lane => HidesFenced;
            claim::a_batch_is_settled_once => HidesFenced;
            claim::a_settlement_that_does_not_name_its_whole_batch_changes_nothing => CompletesSettlements;
            claim::what_a_settlement_carries_is_written_with_it => ForgetsWhatIsBeside;
            claim::what_a_late_settlement_carries_is_not_written => WritesBesideInAnyCase;
            claim::a_lane_is_claimed_in_the_order_of_writing => ReversesBatches;
            claim::a_later_message_of_a_key_waits_until_the_earlier_one_is_settled => ClaimsInWords;
            claim::a_failed_message_is_not_claimed_before_its_wait_is_over => ShortensWaits;
            claim::a_postponed_message_is_not_claimed_before_its_time_and_nobody_waits_for_it => ShortensWaits;
            claim::a_topic_that_may_not_be_taken_hides_nobody => IgnoresTake;
            claim::no_more_of_a_topic_is_taken_than_its_rule_says => IgnoresTake;
            claim::a_message_that_brings_relays_down_travels_alone => ForgetsCrashes;
            claim::a_claim_is_known_to_every_process_before_it_is_answered => ClaimsInWords;
            claim::every_try_in_vain_is_in_the_history => LosesAttempts;
            claim::a_claim_keeps_to_its_limits => IgnoresLimits;
            claim::messages_of_different_channels_are_in_different_batches => MixesChannels;
            claim::an_open_batch_keeps_back_its_own_topics_only => ShutsLanes;
            claim::a_topic_that_changes_its_channel_is_not_claimed_past_its_open_batch => ClaimsTwice;

            order::followers_of_a_failed_message_wait_until_it_is_sent => ForgetsHolds;
            order::followers_of_a_dead_message_wait_while_it_is_dead => ForgetsHolds;
            order::followers_that_were_let_go_come_before_newer_ones => ReversesBatches;
            order::when_several_of_a_key_fail_together_the_earliest_goes_first => ForgetsHolds;
            order::without_a_hold_followers_pass => HoldsAlways;

            inbox::of_many_arrivals_of_an_id_one_is_done => CallsDuplicatesDone;
            inbox::ids_are_known_for_as_long_as_they_are_kept => ForgetsIdsEarly;
            inbox::ids_are_forgotten_whatever_another_group_keeps => ForgetsNothing;
            inbox::ids_of_a_group_without_a_consumer_are_forgotten_too => ForgetsNothing;
            inbox::what_is_remembered_is_counted_until_it_is_forgotten => RemembersForEver;
            inbox::work_mark_and_acknowledgement_are_one => AcknowledgesNothing;
            inbox::a_message_that_failed_leaves_no_trace_and_is_tried_again => MarksBeforeTheWork;
            inbox::a_parked_message_is_not_due_before_its_wait_is_over => IsAlwaysDue;
            inbox::at_the_limit_of_its_attempts_a_message_is_dead => NeverBuries;
            inbox::a_message_that_its_handler_gives_up_is_dead_with_its_error => NeverBuries;
            inbox::an_unavailable_handler_changes_nothing => BlamesTheMessage;
            inbox::after_the_first_unavailable_the_rest_are_not_tried => TriesTheRest;
            inbox::a_reserved_message_is_nobody_elses => GrantsTwice;
            inbox::of_many_who_reserve_an_id_at_once_one_has_it => GrantsTwice;
            inbox::what_was_reserved_together_may_end_apart => GrantsTwice;
            inbox::a_reservation_ends_with_its_lease => EndlessReservations;
            inbox::a_conclusion_with_an_old_token_changes_nothing => AcceptsOldTokens;
            inbox::work_done_under_a_valid_token_is_done => DistrustsConclusions;
            inbox::an_id_that_returns_with_other_content_is_dead => ComparesIdsOnly;
            inbox::work_that_cannot_be_done_is_refused_beforehand => ChecksNothing;

            parked::later_messages_of_a_parked_key_are_done_after_it_in_order => IgnoresInboxOrder;
            parked::what_follows_a_busy_message_of_its_key_is_busy => PassesTheBusy;
            parked::a_message_is_kept_whatever_the_length_of_its_texts => IgnoresInboxOrder;
            parked::followers_of_a_dead_message_wait_where_the_rules_say_so => LetsInboxFollowersPass;
            parked::dropping_a_message_lets_its_followers_go => DropsInWords;
            parked::a_message_unparked_has_a_fresh_start => UnparksInWords;
            parked::a_follower_unparked_waits_for_its_turn => IsAlwaysDue;
            parked::dead_messages_of_a_key_unparked_together_keep_their_order => IgnoresInboxOrder;
            parked::other_content_under_a_parked_id_is_refused => ComparesIdsOnly;
            parked::inbox_counts_agree_with_what_is_kept => MiscountsInbox;

            inspect::pages_have_no_gap_and_no_repeat => RepeatsPages;
            inspect::a_filter_shows_what_it_names => IgnoresFilters;
            inspect::a_message_in_an_open_batch_is_in_flight_in_every_answer => ShowsRestingStatus;
            inspect::counts_agree_with_the_records => Miscounts;
            inspect::a_record_says_all_that_is_known => HidesErrors;
            inspect::a_store_has_an_identity_of_its_own => HasNoIdentity;
            inspect::what_is_not_sent_is_told_and_nothing_else => TakesAllForSent;

            amend::what_the_transition_function_refuses_changes_nothing => AllowsAnything;
            amend::no_action_touches_a_message_in_an_open_batch => AmendsInFlight;
            amend::a_requeued_message_goes_before_those_it_held => RequeuesAtTheEnd;
            amend::discarding_a_dead_message_lets_those_behind_it_go => DiscardsInWords;
            amend::an_edited_message_is_sent_as_mended => EditsInWords;
            amend::acknowledging_twice_is_once => CallsRepeatedNew;
            amend::an_acknowledgement_before_the_settle_is_not_lost => AcknowledgesLater;
            amend::what_was_sent_without_an_answer_can_be_acknowledged => ForgetsWhatWasTried;
            amend::only_what_was_sent_can_be_acknowledged_and_only_by_those_asked => AcceptsAnyAcknowledgement;
            amend::what_a_group_did_not_acknowledge_is_sent_again_as_a_new_delivery => RedeliversInWords;
            amend::what_is_acknowledged_or_not_sent_is_not_redelivered => RedeliversInWords;
            amend::what_is_sent_again_can_be_acknowledged_meanwhile => ForgetsWhatWasTried;
            amend::every_action_is_audited => HidesAudit;
            amend::retention_keeps_what_somebody_still_needs => CleansEverything;
        }
    };
}
