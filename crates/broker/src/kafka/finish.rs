//! Offsets and messages in one transaction: what was received is finished together with what was made of it.
//!
//! ```text
//!  begin ─► send what was made ─► offsets, as this member of the group ─► commit
//!             a failure of any of them: abort, nothing is seen             no answer: the subscription is over
//! ```
//!
//! Each subscription has a transactional id of its own that nobody had before and nobody has after it: two members are kept
//! apart by the generation of the group, not by their ids. Of a commit without an answer nobody here can say how it ended.
//! Kafka can: it tells the next member where a partition stands only when the transaction that moves it has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{Consumer, ConsumerGroupMetadata};
use rdkafka::producer::Producer;
use tokio::time::Instant;
use uuid::Uuid;

use super::error::{self, Commit};
use super::member::TAKEN_FOR_DEAD;
use super::producer::{Call, Line, Report};
use super::receive::{Reader, offsets};
use super::topics::rest;
use super::{Broker, Inner};
use crate::{
    Beside, Delivery, FinishTogether, Outcome, Outgoing, Position, ReceiveError, SubscribeTogether,
    Subscription, Unfinished,
};

/// How long what a dead member left open keeps its partitions from the next one.
const OPEN_FOR: Duration = Duration::from_secs(10);

#[async_trait]
impl SubscribeTogether for Broker {
    async fn subscribe(
        &self,
        group: &str,
        topics: &[String],
    ) -> Result<Box<dyn FinishTogether>, ReceiveError> {
        let reader = self.join(group, topics).await?;
        let id = format!("postrider.{}{group}.{}", self.inner.config.prefix, Uuid::new_v4());
        Ok(Box::new(Finisher { inner: Arc::clone(&self.inner), reader, id, line: None }))
    }
}

/// A subscription that sends.
struct Finisher {
    inner: Arc<Inner>,
    reader: Reader,
    /// Its transactional id. A producer that takes another's place has the same, and what that left behind is over.
    id: String,
    /// The producer of the next transaction; none before the first and after one that failed.
    line: Option<Arc<Line>>,
}

#[async_trait]
impl Subscription for Finisher {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError> {
        self.reader.receive(max).await
    }

    async fn acknowledge(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        self.reader.acknowledge(positions).await
    }

    async fn give_back(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        self.reader.give_back(positions).await
    }

    async fn close(self: Box<Self>) {
        Box::new(self.reader).close().await;
    }
}

#[async_trait]
impl FinishTogether for Finisher {
    async fn receive_beside(&mut self, held: &BTreeSet<u64>, max: usize) -> Result<Beside, ReceiveError> {
        let bell = Arc::clone(&self.reader.member.bell);
        loop {
            let deliveries = self.reader.look(max.max(1), held)?;
            if !deliveries.is_empty() {
                return Ok(Beside::Messages(deliveries));
            }
            let wanted = self.reader.member.wanted(held);
            if !wanted.is_empty() {
                return Ok(Beside::Wanted(wanted));
            }
            // A ring between the look and this is kept for it.
            bell.notified().await;
        }
    }

    async fn finish(&mut self, positions: &[Position], made: Vec<Outgoing>) -> Result<(), Unfinished> {
        let until = Instant::now() + self.inner.config.timeout;
        let inner = Arc::clone(&self.inner);
        let (mut book, ready) = inner.prepare(&made, until).await;
        if ready.len() < made.len() {
            for ready in ready {
                book.settle(ready.place, Outcome::Held);
            }
            return Err(unfinished(book.close()));
        }
        let line = self.line(until).await?;
        let stake = self.stake(positions).await?;
        let begun = line.step(|producer| producer.begin_transaction(), until).await;
        begun.map_err(|failed| {
            Unfinished::Undone(format!("no transaction can be begun: {}", error::text(&failed)))
        })?;
        fail::fail_point!("kafka::finish_begun");
        let call = Call::new(ready.len());
        inner.hand_over(&line, &call, &made, &ready, until).await;
        let whole = line.finish(&call, until).await;
        fail::fail_point!("kafka::finish_sent");
        let reports = call.reported();
        if !whole || reports.iter().any(Result::is_err) {
            let said = line.said();
            self.abort(line, until).await;
            return Err(unfinished(inner.outcomes(&made, &reports, &said)));
        }
        let (list, metadata) = (stake.offsets, stake.metadata);
        let stored = line
            .step(move |producer| producer.send_offsets_to_transaction(&list, &metadata, rest(until)), until)
            .await;
        if let Err(failed) = stored {
            self.abort(line, until).await;
            let text = error::text(&failed);
            return Err(match error::commit(Err(failed)) {
                Commit::Lost => self.over(TAKEN_FOR_DEAD.to_owned()),
                Commit::Failed(error @ ReceiveError::Misconfigured(_)) => Unfinished::Over(error),
                _ => Unfinished::Undone(format!("the group does not take its offsets: {text}")),
            });
        }
        fail::fail_point!("kafka::finish_offsets");
        if let Err(failed) = line.commit(until).await {
            let text = error::text(&failed);
            return Err(self.over(format!("whether Kafka committed is not known here: {text}")));
        }
        fail::fail_point!("kafka::finish_committed");
        self.line = Some(line);
        self.reader.member.finished(&stake.commits);
        Ok(())
    }
}

/// What a transaction says of the group.
struct Stake {
    /// How far each partition is done, under the name that Kafka knows it by.
    commits: BTreeMap<u64, ((String, i32), i64)>,
    offsets: TopicPartitionList,
    /// Which member says so.
    metadata: ConsumerGroupMetadata,
}

impl Finisher {
    /// A producer whose transaction may begin. It is taken, so that one of which nobody heard the end is not used again.
    async fn line(&mut self, until: Instant) -> Result<Arc<Line>, Unfinished> {
        let (config, batch) = (&self.inner.config, self.inner.topics.batch().min(1_000_000));
        if let Some(line) = self.line.take().filter(|line| line.batch <= batch) {
            return Ok(line);
        }
        let failed = |failed| {
            let text = format!("no transactions can be had: {}", error::text(&failed));
            match error::receive(error::code(&failed), text) {
                ReceiveError::Unreachable(text) => Unfinished::Undone(text),
                misconfigured => Unfinished::Over(misconfigured),
            }
        };
        let line = Line::open_for(OPEN_FOR.max(config.timeout), config, batch, &self.id).map_err(failed)?;
        let line = Arc::new(line);
        line.step(move |producer| producer.init_transactions(rest(until)), until).await.map_err(failed)?;
        Ok(line)
    }

    /// Everything that Kafka has to know of the group, of partitions that this member has.
    async fn stake(&self, positions: &[Position]) -> Result<Stake, Unfinished> {
        let member = &self.reader.member;
        let consumer = member.consumer();
        // First who this is, then what it has: a partition that it has afterwards it had then, and Kafka refuses who is not
        // of the group any more by the time that it hears of it.
        let asked = tokio::task::spawn_blocking(move || {
            let consumer = consumer?;
            consumer.group_metadata().filter(|_| !consumer.assignment_lost())
        });
        let metadata = asked.await.ok().flatten();
        let commits = member.finishing(positions);
        let is_ours = |position: &Position| {
            commits.get(&position.partition).is_some_and(|(_, next)| position.offset < *next)
        };
        match (metadata, offsets(&commits)) {
            (Some(metadata), Ok(offsets)) if positions.iter().all(is_ours) => {
                Ok(Stake { commits, offsets, metadata })
            }
            _ => Err(self.over(TAKEN_FOR_DEAD.to_owned())),
        }
    }

    /// What was never committed is not seen, whether Kafka hears of the end or not.
    async fn abort(&mut self, line: Arc<Line>, until: Instant) {
        // What is left of the call may be nothing.
        let until = until.max(Instant::now() + self.inner.config.timeout / 4);
        let good = line.abort(until).await;
        self.line = Some(line).filter(|_| good);
    }

    /// Another subscription has to ask Kafka how far the partitions are done.
    fn over(&self, why: String) -> Unfinished {
        self.reader.member.end(&why);
        Unfinished::Over(ReceiveError::Unreachable(why))
    }
}

impl Inner {
    /// What became of messages whose transaction was aborted.
    fn outcomes(&self, made: &[Outgoing], reports: &[Report], said: &str) -> Vec<Outcome> {
        let blamed = error::blamed(reports);
        let outcome = |(outgoing, report): (&Outgoing, &Report)| match report {
            Ok(()) => Outcome::Held,
            Err(code) if blamed && error::of_the_producer(*code) => Outcome::Held,
            Err(code) if error::of_the_producer(*code) => {
                Outcome::Unreachable { error: format!("Kafka did not take the transaction{said}") }
            }
            Err(code) => {
                let topic = self.topic(&outgoing.message.topic);
                self.topics.forget(&topic);
                error::outcome(*code, format!("topic `{topic}`: {code}"))
            }
        };
        made.iter().zip(reports).map(outcome).collect()
    }
}

/// Whether messages are to blame, or the broker.
fn unfinished(outcomes: Vec<Outcome>) -> Unfinished {
    let blamed = |outcome: &Outcome| {
        matches!(outcome, Outcome::Rejected { .. } | Outcome::Misconfigured { .. } | Outcome::Deferred { .. })
    };
    if outcomes.iter().any(blamed) {
        return Unfinished::Refused(outcomes);
    }
    let held = |outcome: &&Outcome| **outcome != Outcome::Held;
    let error = outcomes.iter().find(held).and_then(Outcome::error);
    Unfinished::Undone(error.unwrap_or("Kafka did not take the transaction").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_message_that_is_to_blame_is_refused() {
        let away = || Outcome::Unreachable { error: "away".to_owned() };
        let unknown = || Outcome::Unconfirmed { error: "no answer".to_owned() };
        assert_eq!(unfinished(vec![Outcome::Held, away()]), Unfinished::Undone("away".to_owned()));
        assert_eq!(unfinished(vec![unknown()]), Unfinished::Undone("no answer".to_owned()));
        let refused = vec![away(), Outcome::Rejected { error: "too large".to_owned() }];
        assert_eq!(unfinished(refused.clone()), Unfinished::Refused(refused));
    }
}
