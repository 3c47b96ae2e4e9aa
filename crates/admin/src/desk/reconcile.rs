//! Reading the sides of a comparison, a bounded number of messages at a time, and putting them side by side.

use std::collections::{BTreeMap, BTreeSet};

use broker::{Browse, ReceiveError, Seen, Span};
use chrono::{DateTime, TimeDelta, Utc};
use futures::{StreamExt, TryStreamExt};
use message::{MessageId, Order, Semantics, Status};
use store::{Filter, Inbox, Page};

use super::Desk;
use crate::reconcile::ledger::{Ledger, Line};
use crate::reconcile::{SKEW, judge};
use crate::{
    BrokerComparison, BrokerSide, ConsumerView, Difference, DifferenceView, GroupComparison, OutboxCounts,
    Problem, ProblemKind, ReconcileRequest, ReconcileView, Sides, TopicComparison,
};

/// Records of the first page, before anything is known of their size.
const FIRST: usize = 16;

/// Records of a page at most, and bytes of it, near enough: they come with their payloads.
const MOST: usize = 1_000;
const BYTES: usize = 16 << 20;

/// Records stand in the order in which they were written, and their times nearly so: transactions overlap.
const DISORDER: TimeDelta = TimeDelta::minutes(10);

/// Questions to the store at a time.
const ASKED: usize = 16;

/// A message in a broker that is not in the ledger.
#[derive(Clone, Copy, Debug)]
struct Stray {
    seen: Seen,
    topic: u32,
}

impl Desk {
    /// Compares what was written with what lies in the brokers and with what the groups have done. Changes nothing.
    ///
    /// # Errors
    /// When the request makes no sense, or a side cannot be read.
    ///
    /// # Cancel safety
    /// Safe: nothing is changed.
    pub async fn reconcile(
        &self,
        request: &ReconcileRequest,
        sides: &Sides,
    ) -> Result<ReconcileView, Problem> {
        self.check_request(request)?;
        let now = Utc::now();
        let (mut ledger, outbox) = self.read_outbox(request).await?;
        let mut view = ReconcileView {
            since: request.since,
            until: request.until,
            agrees: true,
            outbox,
            brokers: Vec::new(),
            groups: Vec::new(),
        };
        for (name, side) in &sides.brokers {
            let topics = self.topics_of(name, request, &ledger);
            if !topics.is_empty() {
                let compared = self.read_broker(name, side, topics, request, sides, now, &mut ledger).await?;
                view.brokers.push(compared);
            }
        }
        for (number, consumer) in self.topology.consumers.iter().enumerate() {
            let heard = request.topic.as_ref().is_none_or(|topic| consumer.topics.contains(topic));
            if heard && consumer.semantics.leaves_marks() {
                view.groups.push(self.read_group(number, consumer, request, sides, now, &ledger).await?);
            }
        }
        view.agrees = view.differences() == [0; 3] && view.uncompared().is_empty();
        Ok(view)
    }

    fn check_request(&self, request: &ReconcileRequest) -> Result<(), Problem> {
        if request.since >= request.until {
            return Err(Problem::bad_request(
                "bad-span",
                "The time has no length",
                format!(
                    "The time begins at {} and ends at {}: let it begin before it ends.",
                    request.since.to_rfc3339(),
                    request.until.to_rfc3339()
                ),
            ));
        }
        match &request.topic {
            Some(topic) => {
                message::check_topic(topic)?;
                self.topology.check_route(topic)
            }
            None => Ok(()),
        }
    }

    /// What was written, newest first, until what was written before.
    async fn read_outbox(&self, request: &ReconcileRequest) -> Result<(Ledger, OutboxCounts), Problem> {
        let filter = Filter { topic: request.topic.clone(), ..Filter::default() };
        let groups: Vec<String> = self.topology.consumers.iter().map(|group| group.group.clone()).collect();
        let span = request.since..request.until;
        let (mut ledger, mut counts) = (Ledger::default(), OutboxCounts::default());
        let (mut after, mut limit) = (None, FIRST);
        loop {
            let page = self.store.list(&filter, Page { after, limit, newest_first: true }).await?;
            let records = page.items.iter().filter(|record| span.contains(&record.written_at));
            for record in records {
                counts.written += 1;
                match record.state.status {
                    Status::Sent => counts.sent += 1,
                    Status::Dead => counts.dead += 1,
                    Status::Pending | Status::InFlight | Status::Failed => counts.unsent += 1,
                }
                let topic = ledger.topic(&record.message.topic);
                ledger.push(Line::of(record, topic, &groups));
            }
            let latest = page.items.iter().map(|record| record.written_at).max();
            let over = latest.is_some_and(|latest| latest < request.since - DISORDER);
            let largest = page.items.iter().map(|record| record.message.size()).max();
            limit = largest.map_or(limit, |largest| (BYTES / largest.max(1)).clamp(1, MOST));
            after = page.next;
            if over || after.is_none() {
                break;
            }
        }
        ledger.sort();
        Ok((ledger, counts))
    }

    /// The topics that go to a broker: those that were written, those that somebody listens to, and those that a route
    /// names.
    fn topics_of(&self, broker: &str, request: &ReconcileRequest, ledger: &Ledger) -> BTreeSet<String> {
        let named = self.topology.routes.iter().flat_map(|route| &route.topics);
        let named = named.map(|pattern| pattern.as_str()).filter(|pattern| !pattern.contains('*'));
        let heard = self.topology.consumers.iter().flat_map(|group| &group.topics).map(String::as_str);
        let written = ledger.topics().iter().map(String::as_str);
        let asked = |topic: &&str| request.topic.as_ref().is_none_or(|asked| asked == topic);
        let goes = |topic: &&str| self.goes_to(topic, broker);
        named.chain(heard).chain(written).filter(asked).filter(goes).map(str::to_owned).collect()
    }

    /// Whether a topic is in a broker: a route sends it there, or none does, and somebody who listens there hopes that a group
    /// makes it.
    fn goes_to(&self, topic: &str, broker: &str) -> bool {
        match self.topology.route_of(topic) {
            Some(route) => route.broker == broker,
            None => self
                .topology
                .consumers
                .iter()
                .any(|group| group.broker == broker && group.topics.iter().any(|heard| heard == topic)),
        }
    }

    #[allow(clippy::too_many_arguments, reason = "each is a side of the comparison, and there is one caller")]
    async fn read_broker(
        &self,
        name: &str,
        side: &BrokerSide,
        topics: BTreeSet<String>,
        request: &ReconcileRequest,
        sides: &Sides,
        now: DateTime<Utc>,
        ledger: &mut Ledger,
    ) -> Result<BrokerComparison, Problem> {
        let mut found = BrokerComparison {
            broker: name.to_owned(),
            url: side.url.clone(),
            notes: Vec::new(),
            topics: Vec::new(),
            stored: 0,
            missing: Difference::default(),
            extra: Difference::default(),
            duplicate: Difference::default(),
        };
        let Some(reader) = &side.reader else {
            found.notes.push("cannot be read: outbox and inbox compared alone".to_owned());
            return Ok(found);
        };
        let (mut strays, mut starts) = (Vec::new(), BTreeMap::new());
        let in_store = kept_from(request, sides, now);
        for topic in topics {
            let number = ledger.topic(&topic);
            let read = browse(&**reader, &topic, number, request, ledger, &mut strays).await;
            let (stored, kept_since) = read.map_err(|error| unread(name, &error))?;
            found.stored += stored;
            let from = kept_since.map_or(in_store, |since| in_store.max(since + SKEW));
            starts.insert(number, from);
            let sent = || ledger.lines().iter().any(|line| line.topic == number && line.sent_at().is_some());
            let compared = is_compared(request, now, from, in_store, || stored > 0 || sent());
            found.topics.push(TopicComparison { topic, from, compared });
        }
        strays.retain(|stray| starts[&stray.topic] <= stray.seen.stored_at);
        self.place_strays(strays, request, sides, ledger, &mut found).await?;
        judge::broker(ledger, &starts, request.until, request.show, &mut found);
        Ok(found)
    }

    /// What lies in the broker and is not in the ledger: made by a group, sent past the store, written earlier, or extra.
    async fn place_strays(
        &self,
        strays: Vec<Stray>,
        request: &ReconcileRequest,
        sides: &Sides,
        ledger: &mut Ledger,
        found: &mut BrokerComparison,
    ) -> Result<(), Problem> {
        let past = |stray: &Stray, ledger: &Ledger| {
            stray.seen.made || self.topology.bypasses_store(ledger.name(stray.topic))
        };
        let (direct, strays): (Vec<_>, Vec<_>) = strays.into_iter().partition(|stray| past(stray, ledger));
        // What others write to a topic that no route takes is not ours to judge.
        let routed = |stray: &Stray| self.topology.route_of(ledger.name(stray.topic)).is_some();
        let strays: Vec<_> = strays.into_iter().filter(routed).collect();
        ledger.add(
            direct.iter().map(|stray| Line::past_the_store(stray.seen.id, stray.seen.stored_at, stray.topic)),
        );
        for Stray { seen, topic } in direct {
            if !ledger.is_elsewhere(seen.id, topic) {
                ledger.meet(seen.id, seen.delivery);
            }
        }
        if sides.keep_sent.is_none() {
            found.notes.push("sent records are deleted at once: what is extra cannot be told".to_owned());
            return Ok(());
        }
        for (stray, repeated) in self.unknown(strays).await? {
            let view = || DifferenceView {
                message_id: stray.seen.id,
                topic: ledger.name(stray.topic).to_owned(),
                written_at: None,
                sent_at: None,
                stored_at: Some(stray.seen.stored_at),
                why: stray.seen.seq.is_none().then_some("somebody else produced it"),
            };
            found.extra.note(request.show, view);
            if repeated {
                found.duplicate.note(request.show, view);
            }
        }
        Ok(())
    }

    /// Those that the store does not know, once each, and whether they lie there more than once.
    async fn unknown(&self, mut strays: Vec<Stray>) -> Result<Vec<(Stray, bool)>, Problem> {
        strays.sort_by_key(|stray| (stray.seen.id.0, stray.seen.delivery));
        let same = |a: &Stray, b: &Stray| a.seen.id == b.seen.id;
        let groups = strays.chunk_by(same).map(|copies| {
            let twice = copies.windows(2).any(|two| two[0].seen.delivery == two[1].seen.delivery);
            (copies[0], twice)
        });
        let asked = futures::stream::iter(groups.map(|(stray, repeated)| async move {
            // Only a relay numbers messages: what has no number was never in the store.
            let known = stray.seen.seq.is_some() && self.store.record(stray.seen.id).await?.is_some();
            Ok::<_, Problem>((!known).then_some((stray, repeated)))
        }));
        asked.buffered(ASKED).try_filter_map(|found| async move { Ok(found) }).try_collect().await
    }

    async fn read_group(
        &self,
        number: usize,
        consumer: &ConsumerView,
        request: &ReconcileRequest,
        sides: &Sides,
        now: DateTime<Utc>,
        ledger: &Ledger,
    ) -> Result<GroupComparison, Problem> {
        let group = consumer.group.as_str();
        let marks_from = before(now, consumer.keep_ids) + SKEW;
        let in_store = kept_from(request, sides, now);
        let mut found = GroupComparison {
            group: group.to_owned(),
            broker: consumer.broker.clone(),
            from: in_store.max(marks_from),
            compared: true,
            sent: 0,
            processed: 0,
            kept: 0,
            waiting: 0,
            missing: Difference::default(),
            straggling: Difference::default(),
        };
        let inbox = self.inbox(group);
        let mut kept = vec![false; ledger.lines().len()];
        let mut done = kept.clone();
        // Before the marks and after them: a message goes from one to the other meanwhile.
        read_kept(inbox, group, ledger, &mut kept).await?;
        read_marks(inbox, group, found.from, ledger, &mut done).await?;
        read_kept(inbox, group, ledger, &mut kept).await?;
        let takes = |topic: u32| {
            let name = ledger.name(topic);
            consumer.topics.iter().any(|heard| heard == name) && self.goes_to(name, &consumer.broker)
        };
        let owes = |line: &Line| takes(line.topic) && line.asks(number) && line.sent_at().is_some();
        found.compared = is_compared(request, now, found.from, in_store, || ledger.lines().iter().any(owes));
        let side = sides.brokers.get(&consumer.broker);
        let mut routes = consumer.topics.iter().filter_map(|topic| self.topology.route_of(topic));
        let in_order = routes.all(|route| route.order == Order::Key);
        let expected = judge::Expected {
            number,
            takes: &takes,
            done: &done,
            kept: &kept,
            readable: side.is_some_and(|side| side.reader.is_some()),
            once: consumer.semantics == Semantics::AtMostOnce,
            ordered: in_order && sides.ordered.contains(group) && side.is_some_and(|side| side.key_order),
            due: before(now, request.patience),
        };
        judge::group(ledger, &expected, request.until, request.show, &mut found);
        Ok(found)
    }
}

/// From when on the store keeps all that was asked for.
fn kept_from(request: &ReconcileRequest, sides: &Sides, now: DateTime<Utc>) -> DateTime<Utc> {
    let kept = sides.keep_sent.map(|keep| before(now, keep) + SKEW);
    kept.map_or(request.since, |kept| kept.max(request.since))
}

/// Whether a comparison that begins at `from` says anything of the time. Where nothing was sent and nothing is there, both
/// sides agree on that, as long as the store would know.
fn is_compared(
    request: &ReconcileRequest,
    now: DateTime<Utc>,
    from: DateTime<Utc>,
    in_store: DateTime<Utc>,
    something: impl FnOnce() -> bool,
) -> bool {
    let until = request.until.min(now);
    from < until || (in_store < until && !something())
}

fn before(now: DateTime<Utc>, age: std::time::Duration) -> DateTime<Utc> {
    let age = TimeDelta::from_std(age).unwrap_or(TimeDelta::MAX);
    now.checked_sub_signed(age).unwrap_or(DateTime::UNIX_EPOCH)
}

/// Reads a topic of a broker. Answers how many copies lie there, and since when it keeps everything.
async fn browse(
    reader: &dyn Browse,
    topic: &str,
    number: u32,
    request: &ReconcileRequest,
    ledger: &mut Ledger,
    strays: &mut Vec<Stray>,
) -> Result<(u64, Option<DateTime<Utc>>), ReceiveError> {
    let sent = ledger.lines().iter().filter(|line| line.topic == number).filter_map(Line::sent_at).max();
    let until = sent.map_or(request.until, |sent| sent.max(request.until));
    let span = Span { since: request.since - SKEW, until: until + SKEW };
    let asked = request.since..request.until;
    let mut stored = 0;
    let mut see = |seen: Seen| {
        let within = asked.contains(&seen.stored_at);
        stored += u64::from(within);
        if !met(ledger, &seen, number) && within {
            strays.push(Stray { seen, topic: number });
        }
    };
    let kept_since = reader.browse(topic, span, &mut see).await?;
    Ok((stored, kept_since))
}

/// Notes a copy in the ledger. Answers whether nothing more need be known of it.
fn met(ledger: &mut Ledger, seen: &Seen, topic: u32) -> bool {
    // What was made may have the id of what it was made of, which lies elsewhere.
    (seen.made && ledger.is_elsewhere(seen.id, topic)) || ledger.meet(seen.id, seen.delivery)
}

fn unread(broker: &str, error: &ReceiveError) -> Problem {
    let (kind, code) = match error {
        ReceiveError::Unreachable(_) => (ProblemKind::Unavailable, "broker-unavailable"),
        ReceiveError::Misconfigured(_) => (ProblemKind::Conflict, "broker-refuses"),
    };
    let detail = format!("The broker `{broker}` could not be read: {error}. Nothing was changed; try again.");
    Problem::new(kind, code, "A broker could not be read", detail)
}

/// Notes what the inbox of a group keeps.
async fn read_kept(
    inbox: &dyn Inbox,
    group: &str,
    ledger: &Ledger,
    kept: &mut [bool],
) -> Result<(), Problem> {
    let (mut after, mut limit) = (None, FIRST);
    loop {
        let page = inbox.parked(group, Page { after, limit, newest_first: false }).await?;
        page.items.iter().for_each(|parked| note(ledger, parked.arrival.message.id, kept));
        let largest = page.items.iter().map(|parked| parked.arrival.message.size()).max();
        limit = largest.map_or(limit, |largest| (BYTES / largest.max(1)).clamp(1, MOST));
        after = page.next;
        if after.is_none() {
            return Ok(());
        }
    }
}

/// Notes what a group has done since `from`.
async fn read_marks(
    inbox: &dyn Inbox,
    group: &str,
    from: DateTime<Utc>,
    ledger: &Ledger,
    done: &mut [bool],
) -> Result<(), Problem> {
    let mut after = None;
    loop {
        let page = inbox.processed(group, Page { after, limit: MOST, newest_first: true }).await?;
        page.items.iter().for_each(|mark| note(ledger, mark.id, done));
        let latest = page.items.iter().map(|mark| mark.processed_at).max();
        after = page.next;
        if after.is_none() || latest.is_some_and(|latest| latest < from - DISORDER) {
            return Ok(());
        }
    }
}

fn note(ledger: &Ledger, id: MessageId, noted: &mut [bool]) {
    if let Some(place) = ledger.find(id) {
        noted[place] = true;
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    /// Minutes after a beginning.
    fn at(minutes: i64) -> DateTime<Utc> {
        DateTime::UNIX_EPOCH + TimeDelta::minutes(1_000_000 + minutes)
    }

    fn seen(id: MessageId, minutes: i64) -> Seen {
        Seen { id, seq: Some(1), delivery: 0, stored_at: at(minutes), made: false }
    }

    fn request() -> ReconcileRequest {
        let patience = std::time::Duration::ZERO;
        ReconcileRequest { since: at(0), until: at(60), topic: None, patience, show: 10 }
    }

    /// A broker in which these lie, and which keeps everything.
    struct Lying(Vec<Seen>);

    impl Browse for Lying {
        // As `async_trait` writes it, which this crate does not need otherwise.
        fn browse<'a, 'b, 'c, 'f>(
            &'a self,
            _: &'b str,
            _: Span,
            see: broker::See<'c>,
        ) -> futures::future::BoxFuture<'f, Result<Option<DateTime<Utc>>, ReceiveError>>
        where
            'a: 'f,
            'b: 'f,
            'c: 'f,
            Self: 'f,
        {
            Box::pin(async move {
                self.0.iter().copied().for_each(see);
                Ok(None)
            })
        }
    }

    #[test]
    fn what_was_stored_outside_of_the_time_takes_no_room() {
        let [before, within, after] = [-1, 30, 60].map(|minutes| seen(MessageId::new(), minutes));
        let (mut ledger, mut strays) = (Ledger::default(), Vec::new());
        let topic = ledger.topic("orders");
        let (reader, request) = (Lying(vec![before, within, after]), request());
        let read = browse(&reader, "orders", topic, &request, &mut ledger, &mut strays);
        let read = read.now_or_never().expect("it waits for nobody");
        assert_eq!(read.expect("it can be read"), (1, None));
        assert_eq!(strays.iter().map(|stray| stray.seen).collect::<Vec<_>>(), [within]);
    }

    #[test]
    fn what_was_made_with_the_id_of_another_is_no_copy_of_it() {
        let mut ledger = Ledger::default();
        let (orders, dead) = (ledger.topic("orders"), ledger.topic("billing-dead"));
        let order = seen(MessageId::new(), 1);
        ledger.add([Line::past_the_store(order.id, order.stored_at, orders)]);
        assert!(met(&mut ledger, &Seen { made: true, ..order }, dead));
        assert!(!ledger.lines()[0].is_there(), "the order itself was not met");
        assert!(met(&mut ledger, &order, orders));
        assert!(ledger.lines()[0].is_there() && !ledger.lines()[0].repeated);
    }

    #[test]
    fn a_time_of_which_nothing_is_kept_is_not_compared_unless_nothing_happened_in_it() {
        let (request, now) = (request(), at(61));
        let compared =
            |from, in_store, something| is_compared(&request, now, at(from), at(in_store), || something);
        assert!(compared(0, 0, true), "all of it is kept");
        assert!(compared(59, 0, true), "a part of it is kept");
        assert!(!compared(60, 0, true), "the broker has forgotten");
        assert!(compared(60, 0, false), "nothing was sent, and the store would know");
        assert!(!compared(60, 60, false), "the store has forgotten");
        let ahead = ReconcileRequest { until: at(90), ..request.clone() };
        assert!(!is_compared(&ahead, now, at(62), at(0), || true), "what is not yet is not compared");
    }
}
