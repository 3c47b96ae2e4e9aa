//! The inbox: the work of each message and its mark, in one script.
//!
//! Work that a script can do runs inside the marking one. Redis does not undo what a failing script wrote, so such
//! work must look before it writes; `postrider.send` does.

mod parked;
mod work;

use std::time::Duration;

use ::redis::Value;
use async_trait::async_trait;
use message::MessageId;
use uuid::Uuid;

use super::RedisStore;
use super::reply::{Reader, odd};
use super::script::{Call, script};
use super::settle::wait;
use crate::column::{BEHIND, OTHER_CONTENT, clip, digest, headers_json};
use crate::{
    Arrival, Error, Handled, Inbox, InboxCounts, InboxRules, Page, Paged, Parked, Processed, Receipt,
    Remembered, Reservation, Work,
};
use message::RetryPolicy;

/// Arrivals in one script.
const MOST: usize = 100;

/// Ids forgotten in one call.
const FORGET: usize = 1_000;

script!(RESERVE: "prelude.lua", "acknowledge.lua", "inbox/desk.lua", "inbox/reserve.lua");
script!(CONCLUDE: "prelude.lua", "acknowledge.lua", "inbox/desk.lua", "inbox/conclude.lua");
script!(FORGET_IDS: "prelude.lua", "acknowledge.lua", "inbox/desk.lua", "inbox/forget.lua");

#[async_trait]
impl Inbox for RedisStore {
    async fn check(&self, work: &Work) -> Result<(), Error> {
        self.check_work(work).await
    }

    async fn process(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        work: &Work,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        self.work(group, &arrivals, work, rules).await
    }

    async fn reserve(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        lease: Duration,
        rules: &InboxRules,
    ) -> Result<Vec<Reservation>, Error> {
        let mut reservations = Vec::with_capacity(arrivals.len());
        for part in arrivals.chunks(MOST) {
            let token = Uuid::new_v4();
            let answers = self.ask(part, |part, told| {
                let mut call = self.desk(&RESERVE, group, rules);
                call.arg(wait(lease).max(1)).arg(token.to_string());
                let arrivals: Vec<_> = part.iter().map(|arrival| (arrival, told)).collect();
                columns(&mut call, &arrivals, |_| {});
                call
            });
            for answer in answers.await? {
                reservations.push(match word(answer)? {
                    (word, _) if word == "granted" => Reservation::Granted(token),
                    said => Reservation::Settled(receipt(said)?),
                });
            }
        }
        Ok(reservations)
    }

    async fn conclude(
        &self,
        group: &str,
        conclusions: Vec<(Arrival, Uuid, Handled)>,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let mut receipts = Vec::with_capacity(conclusions.len());
        for part in conclusions.chunks(MOST) {
            let answers = self.ask(part, |part, told| {
                let mut call = self.desk(&CONCLUDE, group, rules);
                let is_kept =
                    |handled: &Handled| matches!(handled, Handled::Retry { .. } | Handled::Dead { .. });
                let told = |handled| if is_kept(handled) { Told::Whole } else { told };
                let arrivals: Vec<_> =
                    part.iter().map(|(arrival, _, handled)| (arrival, told(handled))).collect();
                columns(&mut call, &arrivals, |call| outcomes(call, part));
                call
            });
            for answer in answers.await? {
                receipts.push(receipt(word(answer)?)?);
            }
        }
        Ok(receipts)
    }

    async fn due(&self, group: &str, limit: usize) -> Result<Vec<Arrival>, Error> {
        self.parked_due(group, limit).await
    }

    async fn processed(&self, group: &str, page: Page) -> Result<Paged<Processed>, Error> {
        let entries = self.stream(&format!("in:{group}:log"), page).await?;
        let items: Vec<Processed> = entries
            .into_iter()
            .map(|(position, mut fields)| {
                Ok(Processed {
                    position,
                    id: fields.id("id")?,
                    topic: fields.text("topic")?,
                    key: fields.optional("key").and_then(|key| key.strip_prefix('=').map(str::to_owned)),
                    seq: fields.optional("seq").and_then(|seq| seq.parse().ok()),
                    processed_at: crate::column::time(fields.number("at")?),
                })
            })
            .collect::<Result<_, Error>>()?;
        let next = items.last().filter(|_| items.len() == page.limit).map(|last| last.position);
        Ok(Paged { items, next })
    }

    async fn parked(&self, group: &str, page: Page) -> Result<Paged<Parked>, Error> {
        self.list_parked(group, page).await
    }

    async fn unpark(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        self.start_again(group, id, actor).await
    }

    async fn drop_parked(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        self.give_up(group, id, actor).await
    }

    async fn inbox_counts(&self, group: &str) -> Result<InboxCounts, Error> {
        let counts: Vec<Option<i64>> = ::redis::cmd("HMGET")
            .arg(format!("{}:in:{group}:counts", self.prefix))
            .arg(&["processed", "duplicates", "parked", "dead"])
            .query_async(&mut self.connection.clone())
            .await?;
        let count =
            |place: usize| u64::try_from(counts.get(place).copied().flatten().unwrap_or(0)).unwrap_or(0);
        Ok(InboxCounts { processed: count(0), duplicates: count(1), parked: count(2), dead: count(3) })
    }

    async fn remembered(&self, group: &str) -> Result<Remembered, Error> {
        let key = |name: &str| format!("{}:in:{group}:{name}", self.prefix);
        let mut connection = self.connection.clone();
        let ids: u64 = ::redis::cmd("HLEN").arg(key("done")).query_async(&mut connection).await?;
        if ids == 0 {
            return Ok(Remembered { ids, bytes: Some(0) });
        }
        let mut bytes = Some(0);
        for part in ["done", "log"] {
            // From a few samples. Not everybody may ask this; the number of ids is known all the same.
            let asked = ::redis::cmd("MEMORY").arg("USAGE").arg(key(part)).query_async(&mut connection).await;
            let part: Option<Option<u64>> = asked.ok();
            bytes = bytes.zip(part).map(|(bytes, part)| bytes + part.unwrap_or(0));
        }
        Ok(Remembered { ids, bytes })
    }

    async fn forget_ids(&self, group: &str, keep: Duration) -> Result<u64, Error> {
        let mut call = self.script(&FORGET_IDS);
        call.arg(group).arg(wait(keep)).arg(FORGET);
        self.read(&call).await?.total()
    }
}

impl RedisStore {
    /// A script at the desk of a group: its name and its rules come first.
    fn desk<'a>(&self, script: &'a super::script::Script, group: &str, rules: &InboxRules) -> Call<'a> {
        let mut call = self.script(script);
        call.arg(group).flag(rules.ordered).flag(rules.hold_dead).flag(rules.acknowledge);
        call.arg(rules.retry.max_attempts).arg(wait(rules.retry.first)).arg(wait(rules.retry.cap));
        call.arg(wait(RetryPolicy::LEAST_JITTER)).arg(OTHER_CONTENT).arg(BEHIND);
        call
    }

    /// Calls a script for `items`, told in brief, and again for those that it left unanswered, told as a whole. One answer
    /// each, in order.
    async fn ask<'a, T>(
        &self,
        items: &[T],
        call: impl Fn(&[T], Told) -> Call<'a>,
    ) -> Result<Vec<Value>, Error> {
        let mut answers: Vec<Value> = self.write(&call(items, Told::Brief)).await?.collect();
        if answers.len() < items.len() {
            answers.extend(self.write(&call(&items[answers.len()..], Told::Whole)).await?);
        }
        if answers.len() != items.len() {
            return Err(odd("a list of receipts"));
        }
        Ok(answers)
    }
}

/// How much of an arrival a script is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// What tells it from others: enough for nearly all.
    Brief,
    /// All that is kept of it when it has to wait.
    Whole,
}

/// Arrivals as scripts read them: in columns, those that `more` adds, and a row for each of which more is told.
fn columns(call: &mut Call<'_>, arrivals: &[(&Arrival, Told)], more: impl FnOnce(&mut Call<'_>)) {
    call.arg(arrivals.len());
    for (arrival, _) in arrivals {
        call.arg(arrival.message.id.to_string());
    }
    for (arrival, _) in arrivals {
        call.arg(digest(arrival));
    }
    for (arrival, _) in arrivals {
        call.arg(&arrival.message.topic);
    }
    for (arrival, _) in arrivals {
        call.optional(arrival.message.key.as_deref().map(str::as_bytes));
    }
    for (arrival, _) in arrivals {
        call.arg(arrival.seq.map(|seq| seq.to_string()).unwrap_or_default());
    }
    let mut rows = 0;
    for (_, told) in arrivals {
        rows += usize::from(*told == Told::Whole);
        call.arg(if *told == Told::Whole { rows.to_string() } else { String::new() });
    }
    more(call);
    for (arrival, _) in arrivals.iter().filter(|(_, told)| *told == Told::Whole) {
        let message = &arrival.message;
        // Chance comes from here: inside a script it would be the same every time.
        call.arg(rand::random::<f64>()).arg(&message.payload[..]).arg(&message.content_type);
        call.arg(headers_json(message)).arg(message.occurred_at.timestamp_millis());
        call.optional(message.kind.as_deref().map(str::as_bytes)).arg(arrival.delivery);
    }
}

/// What handlers did, in columns: the tokens, the kinds, the errors and the least waits.
fn outcomes(call: &mut Call<'_>, conclusions: &[(Arrival, Uuid, Handled)]) {
    for (_, token, _) in conclusions {
        call.arg(token.to_string());
    }
    let (mut errors, mut waits) = (Vec::new(), Vec::new());
    for (.., handled) in conclusions {
        let (kind, error, after) = match handled {
            Handled::Done => ("done", "", None),
            Handled::Retry { error, after } => ("retry", clip(error), *after),
            Handled::Dead { error } => ("dead", clip(error), None),
            Handled::Unavailable { error } => ("unavailable", error.as_str(), None),
        };
        call.arg(kind);
        errors.push(error);
        waits.push(wait(after.unwrap_or_default()));
    }
    call.arg(errors).arg(waits);
}

/// What a script says of one arrival: a word, and what belongs to it.
fn word(answer: Value) -> Result<(String, Reader), Error> {
    let mut rest = Reader::from(answer);
    Ok((rest.text()?, rest))
}

fn receipt((word, mut rest): (String, Reader)) -> Result<Receipt, Error> {
    Ok(match word.as_str() {
        "done" => Receipt::Done,
        "duplicate" => Receipt::Duplicate,
        "parked" => Receipt::Parked { error: rest.text()? },
        "dead" => Receipt::Dead { error: rest.text()? },
        "unavailable" => Receipt::Unavailable { error: rest.text()? },
        "busy" => Receipt::Busy,
        _ => return Err(odd("a receipt")),
    })
}
