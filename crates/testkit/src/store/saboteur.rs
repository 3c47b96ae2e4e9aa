//! A store that breaks one rule on purpose, on top of a real one.
//!
//! Everything but the broken rule works, as it would in a backend with a bug. The saboteur notes when it has
//! struck: a case that fails before that fails for another reason and proves nothing.

mod amend;
mod append;
mod claim;
mod inbox;
mod inspect;
mod lanes;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use store::{Batch, BatchId, Instance, Lease, NewMessage, Settlement, Store, Verdict};

/// How a saboteur breaks a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// An append is written when the next one comes.
    WritesLater,
    /// One message that is turned away takes the others of its call with it.
    TurnsAwayTheWholeCall,
    /// Results come in the wrong order.
    ReversesResults,
    /// A key under which a write happens once is not looked at.
    ForgetsOnceKeys,
    /// Another request under a known key is taken for the same one.
    IgnoresFingerprints,
    /// The last message of a call gets the lowest number.
    AppendsBackwards,
    /// Nobody is woken.
    NeverRings,

    /// A lane goes to a second owner.
    HandsOutLanesTwice,
    /// Every lease has the same epoch.
    RepeatsEpochs,
    /// Any lease that is asked for is renewed.
    RenewsAnything,
    /// What a dead relay left is given back as if it had said so.
    ForgetsCrashes,
    /// A newcomer takes lanes from the living.
    StealsLanes,
    /// Nobody is told to give lanes up.
    HidesSurplus,
    /// A release does nothing.
    ReleasesNothing,
    /// What was left untouched counts as left by a crash.
    BlamesLostAnswers,
    /// A lease lasts forever.
    NeverEndsLeases,
    /// A change of the number of lanes is said to be in force.
    ResizesInWords,

    /// Batches are handed out again.
    ClaimsTwice,
    /// A claim works under any lease.
    ClaimsForAnybody,
    /// A relay is not told that it came too late.
    HidesFenced,
    /// A settlement that lacks verdicts gets some.
    CompletesSettlements,
    /// What a settlement carries is not written.
    ForgetsWhatIsBeside,
    /// What a settlement carries is written although it comes too late.
    WritesBesideInAnyCase,
    /// The last message of a batch comes first.
    ReversesBatches,
    /// The store forgets a claim as soon as it is answered.
    ClaimsInWords,
    /// A failed message is due at once.
    ShortensWaits,
    /// A topic's `take` is not looked at.
    IgnoresTake,
    /// The last try in vain is not in the history.
    LosesAttempts,
    /// Limits are not looked at.
    IgnoresLimits,
    /// Messages of all channels are in one batch.
    MixesChannels,
    /// A lane with an open batch yields nothing.
    ShutsLanes,
    /// A message in trouble holds nobody back.
    ForgetsHolds,
    /// A message in trouble always holds its key.
    HoldsAlways,

    /// A duplicate is called done.
    CallsDuplicatesDone,
    /// Ids are forgotten at once.
    ForgetsIdsEarly,
    /// No id is ever forgotten.
    ForgetsNothing,
    /// Ids that were forgotten are still counted.
    RemembersForEver,
    /// The acknowledgement is left out.
    AcknowledgesNothing,
    /// The mark is made whether or not the work succeeds.
    MarksBeforeTheWork,
    /// Parked messages do not wait.
    IsAlwaysDue,
    /// No message is ever Dead in the inbox.
    NeverBuries,
    /// A handler that is down costs its message an attempt.
    BlamesTheMessage,
    /// Finds no fault with any work.
    ChecksNothing,
    /// Is named like every other store.
    HasNoIdentity,
    /// Says of no message that it is not Sent.
    TakesAllForSent,
    /// An arrival that another worker has holds up nobody.
    PassesTheBusy,
    /// After one `Unavailable` the others are done nevertheless.
    TriesTheRest,
    /// A reserved message is reserved again.
    GrantsTwice,
    /// A reservation never ends.
    EndlessReservations,
    /// Any token will do.
    AcceptsOldTokens,
    /// Work that was done outside is not believed.
    DistrustsConclusions,
    /// Other content under a known id is a duplicate.
    ComparesIdsOnly,
    /// The inbox keeps no order.
    IgnoresInboxOrder,
    /// A Dead message in the inbox lets the later ones of its key pass.
    LetsInboxFollowersPass,
    /// A drop does nothing.
    DropsInWords,
    /// An unpark does nothing.
    UnparksInWords,
    /// The inbox counts one too many.
    MiscountsInbox,

    /// A page repeats the last item of the one before.
    RepeatsPages,
    /// A filter is not looked at.
    IgnoresFilters,
    /// InFlight is not shown.
    ShowsRestingStatus,
    /// One too many is Pending.
    Miscounts,
    /// The last error is not shown.
    HidesErrors,

    /// What is refused is said to be done.
    AllowsAnything,
    /// A message is taken out of its relay's hands.
    AmendsInFlight,
    /// A requeued message goes to the end.
    RequeuesAtTheEnd,
    /// A discard does nothing.
    DiscardsInWords,
    /// An edit sends the message as it was.
    EditsInWords,
    /// A redelivery does nothing.
    RedeliversInWords,
    /// A second acknowledgement is called the first.
    CallsRepeatedNew,
    /// An acknowledgement before the settle is not kept.
    AcknowledgesLater,
    /// What rests cannot be acknowledged.
    ForgetsWhatWasTried,
    /// Anything can be acknowledged.
    AcceptsAnyAcknowledgement,
    /// The audit is empty.
    HidesAudit,
    /// Retention removes whatever it can.
    CleansEverything,
}

/// What saboteurs on several handles of one store know together.
#[derive(Default)]
pub(super) struct Memory {
    struck: AtomicBool,
    open: Mutex<HashMap<BatchId, Batch>>,
    leases: Mutex<Vec<(Instance, Vec<Lease>)>>,
    late: Mutex<Vec<NewMessage>>,
}

impl Memory {
    /// Whether the rule was broken at least once.
    pub(super) fn struck(&self) -> bool {
        self.struck.load(Ordering::SeqCst)
    }

    fn open(&self) -> MutexGuard<'_, HashMap<BatchId, Batch>> {
        self.open.lock().expect("nobody panics while holding the batches")
    }

    fn leases(&self) -> MutexGuard<'_, Vec<(Instance, Vec<Lease>)>> {
        self.leases.lock().expect("nobody panics while holding the leases")
    }

    fn late(&self) -> MutexGuard<'_, Vec<NewMessage>> {
        self.late.lock().expect("nobody panics while holding the messages")
    }
}

/// The store that breaks a rule.
pub(super) struct Saboteur {
    store: Arc<dyn Store>,
    sabotage: Sabotage,
    memory: Arc<Memory>,
}

impl Saboteur {
    pub(super) fn new(store: Arc<dyn Store>, sabotage: Sabotage, memory: Arc<Memory>) -> Self {
        Self { store, sabotage, memory }
    }

    /// Whether this is the rule to break; if so it counts as broken.
    fn breaks(&self, sabotage: Sabotage) -> bool {
        let breaks = self.sabotage == sabotage;
        if breaks {
            self.memory.struck.store(true, Ordering::SeqCst);
        }
        breaks
    }

    /// Gives back every open batch behind its relay's back.
    async fn release_open(&self) -> Result<(), store::Error> {
        let open: Vec<Batch> = self.memory.open().drain().map(|(_, batch)| batch).collect();
        for batch in open {
            let released = Verdict::Released { error: None };
            let verdicts = batch.messages.iter().map(|claimed| (claimed.seq, released.clone())).collect();
            let settlement = Settlement { batch: batch.id, lease: batch.lease, verdicts, beside: Vec::new() };
            self.store.turn(vec![settlement], None).await?;
        }
        Ok(())
    }
}
