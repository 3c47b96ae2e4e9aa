//! Mending: every action checks the transition, keeps counters and holds right, and is audited, in one script.
//!
//! What the audit says of an action is made here, from the message as it was read; the script does nothing if the
//! message is no longer that, and it is read again.

use std::time::Duration;

use async_trait::async_trait;
use message::{Event, MessageId, Next, step};

use super::RedisStore;
use super::reply::{odd, status, word};
use super::script::script;
use crate::audit::{RELAY, changed, redelivered};
use crate::column::headers_json;
use crate::{Acknowledged, Amend, Edit, Error, Inspect, Record, Retention};

/// Times that a message is read again because somebody changed it in between.
const TRIES: usize = 16;

/// Acknowledgements in one script.
const MOST: usize = 500;

script!(AMEND: "prelude.lua", "hold.lua", "amend.lua", "amend_one.lua");
script!(REDELIVER: "prelude.lua", "hold.lua", "amend.lua", "redeliver.lua");
script!(ACKNOWLEDGE: "prelude.lua", "acknowledge.lua", "acknowledge_all.lua");

#[async_trait]
impl Amend for RedisStore {
    async fn requeue(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, "requeue", Event::Requeued, &Edit::default()).await
    }

    async fn edit(&self, id: MessageId, edit: &Edit, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, "edit", Event::Requeued, edit).await
    }

    async fn discard(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, "discard", Event::Discarded, &Edit::default()).await
    }

    async fn delete(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, "delete", Event::Deleted, &Edit::default()).await
    }

    async fn acknowledge(&self, done: Vec<(MessageId, String)>) -> Result<Vec<Acknowledged>, Error> {
        let mut answers = Vec::with_capacity(done.len());
        for part in done.chunks(MOST) {
            let mut call = self.script(&ACKNOWLEDGE);
            call.arg(part.len());
            for (id, group) in part {
                call.arg(id.to_string()).arg(group);
            }
            let mut words = self.write(&call).await?;
            for _ in part {
                answers.push(acknowledged(&words.text()?)?);
            }
        }
        Ok(answers)
    }

    async fn redeliver(&self, id: MessageId, group: &str, why: &str) -> Result<bool, Error> {
        let mut call = self.script(&REDELIVER);
        call.arg(id.to_string()).arg(group).arg(why).arg(RELAY).arg("redeliver");
        call.arg(redelivered(group, why));
        let again = self.write(&call).await?.flag()?;
        if again {
            self.ring();
        }
        Ok(again)
    }

    async fn clean(&self, retention: &Retention) -> Result<u64, Error> {
        self.remove_old(retention).await
    }
}

impl RedisStore {
    async fn amend(
        &self,
        id: MessageId,
        actor: &str,
        action: &str,
        event: Event,
        edit: &Edit,
    ) -> Result<(), Error> {
        for _ in 0..TRIES {
            let record = self.record(id).await?;
            let record = record.ok_or_else(|| Error::Refused(format!("there is no message {id}")))?;
            let after = after(&record, event, edit)?;
            let mut call = self.script(&AMEND);
            call.arg(record.seq).arg(event.name()).arg(actor).arg(action).arg(id.to_string());
            call.arg(changed(&record, after.as_ref()));
            let state = record.state;
            call.arg(word(state.status)).arg(state.attempts).arg(state.crashes).arg(state.delivery);
            call.arg(record.last_error.as_deref().unwrap_or_default());
            call.optional(edit.payload.as_deref());
            call.optional(edit.content_type.as_deref().map(str::as_bytes));
            let headers = after.filter(|_| edit.headers.is_some()).map(|after| headers_json(&after.message));
            call.optional(headers.as_deref().map(str::as_bytes));
            match self.write(&call).await?.text()?.as_str() {
                "done" => {
                    self.ring();
                    return Ok(());
                }
                "changed" | "refused" => {}
                _ => return Err(odd("an amendment")),
            }
        }
        let reason = format!("message {id} is being changed all the time");
        Err(Error::Unavailable { reason, retry_after: Duration::from_millis(100) })
    }
}

/// What becomes of a record; nothing when it is gone.
fn after(record: &Record, event: Event, edit: &Edit) -> Result<Option<Record>, Error> {
    let Next::State(state) = step(record.state, event)? else { return Ok(None) };
    let mut after = Record { state, next_attempt_at: None, dead_reason: None, held: false, ..record.clone() };
    let message = &mut after.message;
    if let Some(payload) = &edit.payload {
        message.payload = payload.clone();
    }
    if let Some(content_type) = &edit.content_type {
        message.content_type.clone_from(content_type);
    }
    if let Some(headers) = &edit.headers {
        message.headers.clone_from(headers);
    }
    Ok(Some(after))
}

fn acknowledged(word: &str) -> Result<Acknowledged, Error> {
    Ok(match word {
        "new" => Acknowledged::New,
        "repeated" => Acknowledged::Repeated,
        "unknown" => Acknowledged::Unknown,
        "not_asked" => Acknowledged::NotAsked,
        refused => Acknowledged::Refused(status(refused)?),
    })
}
