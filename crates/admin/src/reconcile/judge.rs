//! What the sides mean: pure functions of what was read.

use std::collections::{BTreeMap, HashMap};

use chrono::{DateTime, Utc};

use super::ledger::{Ledger, Line};
use super::view::{BrokerComparison, DifferenceView, GroupComparison};

const GONE: &str = "it is not in the broker any more";
const PASSED: &str = "a later one of its key was done";
const LOST: &str = "later ones were done, and the group handles one at most once";
const OVERTAKEN: &str = "later ones were done";
const LATE: &str = "it takes long";

/// A message of the ledger, as it is shown.
pub(crate) fn shown(ledger: &Ledger, line: &Line, why: Option<&'static str>) -> DifferenceView {
    DifferenceView {
        message_id: line.id(),
        topic: ledger.name(line.topic).to_owned(),
        written_at: Some(line.written_at()),
        sent_at: line.sent_at(),
        stored_at: None,
        why,
    }
}

/// What the ledger says of a broker: which were sent and are not there, and which are there twice. Of each of its topics
/// what was written since `kept_from` is judged.
pub(crate) fn broker(
    ledger: &Ledger,
    kept_from: &BTreeMap<u32, DateTime<Utc>>,
    until: DateTime<Utc>,
    show: usize,
    found: &mut BrokerComparison,
) {
    let within = |line: &&Line| {
        kept_from.get(&line.topic).is_some_and(|from| (*from..until).contains(&line.written_at()))
    };
    for line in ledger.lines().iter().filter(within) {
        if line.sent_at().is_some() && !line.is_there() {
            found.missing.note(show, || shown(ledger, line, None));
        }
        if line.repeated {
            found.duplicate.note(show, || shown(ledger, line, None));
        }
    }
}

/// What a group is expected to have done.
pub(crate) struct Expected<'a> {
    /// Its number among the groups.
    pub(crate) number: usize,
    /// The topics that it takes.
    pub(crate) takes: &'a dyn Fn(u32) -> bool,
    /// Messages that it marked as done, by their place in the ledger.
    pub(crate) done: &'a [bool],
    /// Messages that its inbox keeps, in the same way.
    pub(crate) kept: &'a [bool],
    /// The broker was read: what was not seen there is not there.
    pub(crate) readable: bool,
    /// The messages of a key come, and are done, one after another.
    pub(crate) ordered: bool,
    /// It forgets a message before it handles it: what it did not do in its time it never does.
    pub(crate) once: bool,
    /// What was sent before this has had its time.
    pub(crate) due: DateTime<Utc>,
}

/// What the ledger says of a group.
pub(crate) fn group(
    ledger: &Ledger,
    expected: &Expected<'_>,
    until: DateTime<Utc>,
    show: usize,
    found: &mut GroupComparison,
) {
    let Expected { number, takes, done, kept, readable, ordered, once, due } = *expected;
    let done = |place: usize, line: &Line| done[place] || line.acknowledged_by(number);
    let lines = || {
        let ours = ledger.lines().iter().enumerate();
        ours.filter_map(|(place, line)| Some((place, line, line.sent_at()?)))
            .filter(|(_, line, _)| takes(line.topic) && line.asks(number))
    };
    // When the latest was sent that is done: of each topic, and of each key.
    let (mut by_topic, mut by_key) = (HashMap::<u32, _>::new(), HashMap::<u64, _>::new());
    for (place, line, sent_at) in lines() {
        if done(place, line) {
            let latest = by_topic.entry(line.topic).or_insert(sent_at);
            *latest = sent_at.max(*latest);
            if ordered && line.key != 0 {
                let latest = by_key.entry(line.key).or_insert(sent_at);
                *latest = sent_at.max(*latest);
            }
        }
    }
    let span = found.from..until;
    for (place, line, sent_at) in lines().filter(|(_, line, _)| span.contains(&line.written_at())) {
        found.sent += 1;
        let later = |latest: Option<&DateTime<Utc>>| latest.is_some_and(|latest| *latest > sent_at);
        let late = sent_at < due;
        if done(place, line) {
            found.processed += 1;
        } else if kept[place] {
            found.kept += 1;
        } else if readable && !line.is_there() {
            found.missing.note(show, || shown(ledger, line, Some(GONE)));
        } else if late && later(by_key.get(&line.key)) {
            found.missing.note(show, || shown(ledger, line, Some(PASSED)));
        } else if once && late && later(by_topic.get(&line.topic)) {
            found.missing.note(show, || shown(ledger, line, Some(LOST)));
        } else if later(by_topic.get(&line.topic)) {
            found.straggling.note(show, || shown(ledger, line, Some(OVERTAKEN)));
        } else if late {
            found.straggling.note(show, || shown(ledger, line, Some(LATE)));
        } else {
            found.waiting += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;
    use message::{Message, MessageId, State, Status};
    use store::Record;
    use uuid::Uuid;

    use super::*;
    use crate::Difference;

    /// Seconds after a beginning.
    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::UNIX_EPOCH + TimeDelta::seconds(1_000_000 + seconds)
    }

    fn id(number: i64) -> MessageId {
        MessageId(Uuid::from_u128(number.unsigned_abs().into()))
    }

    /// Message `number` of a key, written in that second and sent in the next.
    fn record(number: i64, key: &str) -> Record {
        Record {
            seq: number,
            message: Message { id: id(number), ..Message::new("orders", "1").key(key) },
            state: State { status: Status::Sent, rest: Status::Sent, attempts: 0, crashes: 0, delivery: 0 },
            written_at: at(number),
            next_attempt_at: None,
            locked_until: None,
            last_error: None,
            sent_at: Some(at(number + 1)),
            dead_reason: None,
            held: false,
            ack_groups: None,
            acknowledgements: Vec::new(),
        }
    }

    fn ledger(records: impl IntoIterator<Item = Record>) -> Ledger {
        let mut ledger = Ledger::default();
        let topic = ledger.topic("orders");
        ledger.add(records.into_iter().map(|record| Line::of(&record, topic, &["billing".to_owned()])));
        ledger
    }

    fn ids(found: &Difference) -> Vec<MessageId> {
        assert_eq!(found.count, found.messages.len() as u64);
        found.messages.iter().map(|message| message.message_id).collect()
    }

    fn empty() -> BrokerComparison {
        BrokerComparison {
            broker: "main".to_owned(),
            url: String::new(),
            notes: Vec::new(),
            topics: Vec::new(),
            stored: 0,
            missing: Difference::default(),
            extra: Difference::default(),
            duplicate: Difference::default(),
        }
    }

    /// What is said of a group that has done `done` and keeps `kept`, a minute after all of it.
    fn judged(ledger: &Ledger, done: &[i64], kept: &[i64], readable: bool, ordered: bool) -> GroupComparison {
        judged_if(ledger, done, kept, readable, ordered, false)
    }

    /// The same of one that may handle a message `once` only.
    fn judged_if(
        ledger: &Ledger,
        done: &[i64],
        kept: &[i64],
        readable: bool,
        ordered: bool,
        once: bool,
    ) -> GroupComparison {
        let noted = |numbers: &[i64]| {
            let mut noted = vec![false; ledger.lines().len()];
            numbers.iter().for_each(|number| noted[ledger.find(id(*number)).expect("it is there")] = true);
            noted
        };
        let mut found = GroupComparison {
            group: "billing".to_owned(),
            broker: "main".to_owned(),
            from: at(0),
            compared: true,
            sent: 0,
            processed: 0,
            kept: 0,
            waiting: 0,
            missing: Difference::default(),
            straggling: Difference::default(),
        };
        let (done, kept) = (noted(done), noted(kept));
        let takes = |_| true;
        let expected = Expected {
            number: 0,
            takes: &takes,
            done: &done,
            kept: &kept,
            readable,
            ordered,
            once,
            due: at(60),
        };
        group(ledger, &expected, at(1_000), 10, &mut found);
        found
    }

    #[test]
    fn what_was_sent_and_is_not_there_is_missing_and_what_is_there_twice_is_duplicate() {
        let mut ledger = ledger((1..=4).map(|number| record(number, "a")));
        for (number, delivery) in [(1, 0), (2, 0), (2, 0), (3, 0), (3, 1)] {
            ledger.meet(id(number), delivery);
        }
        let mut found = empty();
        let topic = ledger.topic("orders");
        broker(&ledger, &BTreeMap::from([(topic, at(0))]), at(1_000), 10, &mut found);
        assert_eq!((ids(&found.missing), ids(&found.duplicate)), (vec![id(4)], vec![id(2)]));
        // What was written before both sides keep everything is not judged.
        let mut later = empty();
        broker(&ledger, &BTreeMap::from([(topic, at(5))]), at(1_000), 10, &mut later);
        assert_eq!((later.missing.count, later.duplicate.count), (0, 0));
    }

    #[test]
    fn a_topic_that_is_kept_for_a_short_time_does_not_hide_what_another_lost() {
        let mut ledger = ledger([record(1, "a")]);
        let quick = ledger.topic("clicks");
        let orders = ledger.topic("orders");
        let click =
            Record { message: Message { id: id(2), ..Message::new("clicks", "1") }, ..record(2, "a") };
        ledger.add([Line::of(&click, quick, &[])]);
        let mut found = empty();
        broker(&ledger, &BTreeMap::from([(orders, at(0)), (quick, at(1_000))]), at(1_000), 10, &mut found);
        assert_eq!(ids(&found.missing), [id(1)]);
    }

    #[test]
    fn a_message_that_its_key_has_passed_is_missing_and_one_that_others_have_passed_straggles() {
        let mut ledger = ledger([record(1, "a"), record(2, "b"), record(3, "a"), record(4, "c")]);
        (1..=4).for_each(|number| assert!(ledger.meet(id(number), 0)));
        let found = judged(&ledger, &[3], &[4], true, true);
        assert_eq!((found.sent, found.processed, found.kept), (4, 1, 1));
        assert_eq!((ids(&found.missing), found.missing.messages[0].why), (vec![id(1)], Some(PASSED)));
        assert_eq!(
            (ids(&found.straggling), found.straggling.messages[0].why),
            (vec![id(2)], Some(OVERTAKEN))
        );
        // Without order, being passed means nothing.
        let found = judged(&ledger, &[3], &[4], true, false);
        assert_eq!((ids(&found.missing), ids(&found.straggling)), (vec![], vec![id(1), id(2)]));
    }

    #[test]
    fn what_a_group_that_handles_once_has_passed_is_missing() {
        let mut ledger =
            ledger((1..=3).map(|number| record(number, "a")).chain([record(100, "b"), record(101, "c")]));
        [1, 2, 3, 100, 101].into_iter().for_each(|number| assert!(ledger.meet(id(number), 0)));
        let found = judged_if(&ledger, &[3, 101], &[2], true, false, true);
        assert_eq!((ids(&found.missing), found.missing.messages[0].why), (vec![id(1)], Some(LOST)));
        assert_eq!(ids(&found.straggling), [id(100)], "it may still be at work");
    }

    #[test]
    fn what_nobody_need_acknowledge_is_for_all_who_listen() {
        let at_most_once = Record { ack_groups: Some(Vec::new()), ..record(1, "a") };
        let found = judged(&ledger([at_most_once]), &[1], &[], false, true);
        assert_eq!((found.sent, found.processed), (1, 1));
    }

    #[test]
    fn what_is_not_done_and_not_in_the_broker_any_more_is_missing() {
        let mut ledger = ledger([record(1, "a"), record(2, "b")]);
        ledger.meet(id(2), 0);
        let found = judged(&ledger, &[], &[], true, true);
        assert_eq!((ids(&found.missing), found.missing.messages[0].why), (vec![id(1)], Some(GONE)));
        assert_eq!((ids(&found.straggling), found.straggling.messages[0].why), (vec![id(2)], Some(LATE)));
        // Where the broker cannot be read, nobody knows.
        let found = judged(&ledger, &[], &[], false, true);
        assert_eq!((ids(&found.missing), ids(&found.straggling)), (vec![], vec![id(1), id(2)]));
    }

    #[test]
    fn what_was_sent_a_moment_ago_is_on_its_way() {
        let mut ledger = ledger([record(1, "a"), record(100, "b")]);
        assert!([1, 100].into_iter().all(|number| ledger.meet(id(number), 0)));
        let found = judged(&ledger, &[1], &[], true, true);
        assert_eq!((found.processed, found.waiting, found.straggling.count), (1, 1, 0));
    }

    #[test]
    fn an_acknowledgement_is_as_good_as_a_mark_and_who_was_not_asked_owes_nothing() {
        let done = store::Acknowledgement { group: "billing".to_owned(), at: at(9) };
        let acknowledged = Record { acknowledgements: vec![done], ..record(1, "a") };
        let for_others = Record { ack_groups: Some(vec!["mail".to_owned()]), ..record(2, "b") };
        let found = judged(&ledger([acknowledged, for_others]), &[], &[], false, true);
        assert_eq!((found.sent, found.processed, found.straggling.count), (1, 1, 0));
    }
}
