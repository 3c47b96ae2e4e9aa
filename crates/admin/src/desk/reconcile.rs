//! Reading the sides of a comparison, a bounded number of messages at a time, and putting them side by side.

use std::collections::BTreeSet;

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
    Problem, ProblemKind, ReconcileRequest, ReconcileView, Sides,
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
            // Work that is a transaction of the broker leaves no marks to compare.
            if heard && consumer.semantics != Semantics::ExactlyOnce {
                view.groups.push(self.read_group(number, consumer, request, sides, now, &ledger).await?);
            }
        }
        view.agrees = view.differences() == [0; 3];
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
        let (mut ledger, mut counts, mut lines) = (Ledger::default(), OutboxCounts::default(), Vec::new());
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
                lines.push(Line::of(record, topic, &groups));
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
        ledger.add(lines);
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

    fn goes_to(&self, topic: &str, broker: &str) -> bool {
        self.topology.route_of(topic).is_some_and(|route| route.broker == broker)
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
            from: kept_from(request, sides, now),
            notes: Vec::new(),
            topics: topics.into_iter().collect(),
            stored: 0,
            missing: Difference::default(),
            extra: Difference::default(),
            duplicate: Difference::default(),
        };
        let Some(reader) = &side.reader else {
            found.notes.push("cannot be read: outbox and inbox compared alone".to_owned());
            return Ok(found);
        };
        let mut strays = Vec::new();
        for topic in &found.topics {
            let number = ledger.topic(topic);
            let read = browse(&**reader, topic, number, request, ledger, &mut strays).await;
            let (stored, kept_since) = read.map_err(|error| unread(name, &error))?;
            found.stored += stored;
            found.from = found.from.max(kept_since.map_or(found.from, |since| since + SKEW));
        }
        if found.from >= request.until {
            found.notes.push("one side keeps nothing of that time any more".to_owned());
        }
        let span = found.from..request.until;
        strays.retain(|stray| span.contains(&stray.seen.stored_at));
        self.place_strays(strays, request, sides, ledger, &mut found).await?;
        let numbers: BTreeSet<u32> = found.topics.iter().map(|topic| ledger.topic(topic)).collect();
        let ours = |topic: u32| numbers.contains(&topic);
        judge::broker(ledger, &ours, request.until, request.show, &mut found);
        Ok(found)
    }

    /// What lies in the broker and is not in the ledger: sent past the store, written earlier, or extra.
    async fn place_strays(
        &self,
        strays: Vec<Stray>,
        request: &ReconcileRequest,
        sides: &Sides,
        ledger: &mut Ledger,
        found: &mut BrokerComparison,
    ) -> Result<(), Problem> {
        let past = |stray: &Stray, ledger: &Ledger| self.topology.bypasses_store(ledger.name(stray.topic));
        let (direct, strays): (Vec<_>, Vec<_>) = strays.into_iter().partition(|stray| past(stray, ledger));
        ledger.add(
            direct.iter().map(|stray| Line::past_the_store(stray.seen.id, stray.seen.stored_at, stray.topic)),
        );
        for stray in &direct {
            ledger.meet(stray.seen.id, stray.seen.delivery);
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
        let mut found = GroupComparison {
            group: group.to_owned(),
            broker: consumer.broker.clone(),
            from: kept_from(request, sides, now).max(marks_from),
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
        let side = sides.brokers.get(&consumer.broker);
        let mut routes = consumer.topics.iter().filter_map(|topic| self.topology.route_of(topic));
        let in_order = routes.all(|route| route.order == Order::Key);
        let expected = judge::Expected {
            number,
            takes: &takes,
            done: &done,
            kept: &kept,
            readable: side.is_some_and(|side| side.reader.is_some()),
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
    let mut stored = 0;
    let mut see = |seen: Seen| {
        stored += u64::from((request.since..request.until).contains(&seen.stored_at));
        if !ledger.meet(seen.id, seen.delivery) {
            strays.push(Stray { seen, topic: number });
        }
    };
    let kept_since = reader.browse(topic, span, &mut see).await?;
    Ok((stored, kept_since))
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
