//! Messages that the inbox keeps: for a later try, behind another of their key, or for a person.

use std::time::Duration;

use ::redis::Value;
use message::MessageId;

use super::super::RedisStore;
use super::super::reply::{Fields, Reader, odd};
use super::super::script::script;
use crate::audit::{dropped, unparked};
use crate::{Arrival, Error, Page, Paged, Parked};

/// Times that a message is read again because somebody changed it in between.
const TRIES: usize = 16;

script!(DUE: "../prelude.lua", "../acknowledge.lua", "desk.lua", "due.lua");
script!(LIST: "../prelude.lua", "../acknowledge.lua", "desk.lua", "parked.lua");
script!(KEPT: "../prelude.lua", "../acknowledge.lua", "desk.lua", "kept.lua");
script!(UNPARK: "../prelude.lua", "../hold.lua", "../amend.lua", "../acknowledge.lua", "desk.lua", "unpark.lua");
script!(DROP: "../prelude.lua", "../hold.lua", "../amend.lua", "../acknowledge.lua", "desk.lua", "drop.lua");

impl RedisStore {
    pub(super) async fn parked_due(&self, group: &str, limit: usize) -> Result<Vec<Arrival>, Error> {
        let mut call = self.script(&DUE);
        call.arg(group).arg(limit);
        let mut due = self.read(&call).await?.map(parked).collect::<Result<Vec<_>, _>>()?;
        due.sort_unstable_by_key(|(position, _)| *position);
        Ok(due.into_iter().map(|(_, parked)| parked.arrival).collect())
    }

    pub(super) async fn list_parked(&self, group: &str, page: Page) -> Result<Paged<Parked>, Error> {
        let mut call = self.script(&LIST);
        call.arg(group).arg(page.after.map(|position| position.to_string()).unwrap_or_default());
        call.flag(page.newest_first).arg(page.limit);
        let items = self.read(&call).await?.map(parked).collect::<Result<Vec<_>, _>>()?;
        let next = items.last().filter(|_| items.len() == page.limit).map(|(position, _)| *position);
        let named = |(_, parked): (i64, Parked)| Parked { group: group.to_owned(), ..parked };
        Ok(Paged { items: items.into_iter().map(named).collect(), next })
    }

    pub(super) async fn start_again(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        let mut call = self.script(&UNPARK);
        call.arg(group).arg(id.to_string()).arg(actor).arg(unparked(group));
        match self.write(&call).await?.text()?.as_str() {
            "done" => Ok(()),
            _ => Err(not_parked(group, id)),
        }
    }

    pub(super) async fn give_up(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        for _ in 0..TRIES {
            let mut call = self.script(&KEPT);
            call.arg(group).arg(id.to_string());
            let kept = self.read(&call).await?;
            if kept.is_empty() {
                return Err(not_parked(group, id));
            }
            let (position, parked) = parked(Value::Array(kept.collect()))?;
            let mut call = self.script(&DROP);
            call.arg(group).arg(id.to_string()).arg(position).arg(actor);
            call.arg(dropped(group, &parked.arrival.message));
            if self.write(&call).await?.text()? == "done" {
                return Ok(());
            }
        }
        let reason = format!("message {id} is being changed all the time");
        Err(Error::Unavailable { reason, retry_after: Duration::from_millis(100) })
    }
}

/// A parked message and its position; its group is for the caller to say.
fn parked(item: Value) -> Result<(i64, Parked), Error> {
    let mut fields: Fields = Reader::from(Value::Array(vec![item])).fields()?;
    if fields.is_empty() {
        return Err(odd("a parked message"));
    }
    let position = fields.number("position")?;
    let parked = Parked {
        group: String::new(),
        attempts: fields.small("attempts")?,
        next_attempt_at: fields.optional_time("next_attempt_at")?,
        dead: fields.number("dead")? == 1,
        error: fields.optional("error").unwrap_or_default(),
        arrival: Arrival {
            seq: fields.optional_number("seq")?,
            delivery: fields.small("delivery")?,
            message: fields.message()?,
        },
    };
    Ok((position, parked))
}

fn not_parked(group: &str, id: MessageId) -> Error {
    Error::Refused(format!("the inbox of {group} does not keep a message {id}"))
}
