//! Mending: every action locks its message's lane, checks the transition, keeps counters and holds right, and is
//! audited, in one transaction.

use std::sync::Arc;

use async_trait::async_trait;
use message::{Event, Message, MessageId, Next, step};
use mysql_async::Value;
use mysql_async::prelude::Queryable;

use super::error::Trouble;
use super::hold::{self, Holds};
use super::inspect::find;
use super::lane::{self, Place};
use super::row::at;
use super::session::{Tx, commit};
use super::{MysqlStore, acknowledge, retain, settle, tally};
use crate::audit::{RELAY, changed, redelivered};
use crate::column::{headers_json, word};
use crate::tally::Tally;
use crate::{Acknowledged, Amend, Edit, Error, Record, Retention};

/// What an operator asks for.
#[derive(Clone, Debug)]
enum Action {
    Requeue,
    Edit(Edit),
    Discard,
    Delete,
}

impl Action {
    fn name(&self) -> &'static str {
        match self {
            Self::Requeue => "requeue",
            Self::Edit(_) => "edit",
            Self::Discard => "discard",
            Self::Delete => "delete",
        }
    }
}

#[async_trait]
impl Amend for MysqlStore {
    async fn requeue(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, Action::Requeue).await
    }

    async fn edit(&self, id: MessageId, edit: &Edit, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, Action::Edit(edit.clone())).await
    }

    async fn discard(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, Action::Discard).await
    }

    async fn delete(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, Action::Delete).await
    }

    async fn acknowledge(&self, done: Vec<(MessageId, String)>) -> Result<Vec<Acknowledged>, Error> {
        let done = Arc::new(done);
        self.run(move |store| {
            let done = Arc::clone(&done);
            async move {
                let mut tx = store.begin().await?;
                let now = lane::look(&mut tx, std::collections::BTreeSet::new()).await?.now;
                let mut moved = Tally::default();
                let answers = acknowledge::acknowledge(&store, &mut tx, &done, now, &mut moved).await?;
                tally::write(moved, &mut tx, tally::any_part()).await?;
                commit(tx).await?;
                Ok(answers)
            }
        })
        .await
    }

    async fn redeliver(&self, id: MessageId, group: &str, why: &str) -> Result<bool, Error> {
        let asked = Arc::new((group.to_owned(), why.to_owned()));
        let again = self.run(move |store| {
            let asked = Arc::clone(&asked);
            async move { store.redeliver_once(id, &asked.0, &asked.1).await }
        });
        let again = again.await?;
        if again {
            self.ring();
        }
        Ok(again)
    }

    async fn clean(&self, retention: &Retention) -> Result<u64, Error> {
        retain::clean(self, *retention).await
    }
}

impl MysqlStore {
    async fn amend(&self, id: MessageId, actor: &str, action: Action) -> Result<(), Error> {
        let asked = Arc::new((actor.to_owned(), action));
        self.run(move |store| {
            let asked = Arc::clone(&asked);
            async move { store.amend_once(id, &asked.0, &asked.1).await }
        })
        .await?;
        self.ring();
        Ok(())
    }

    async fn amend_once(&self, id: MessageId, actor: &str, action: &Action) -> Result<(), Trouble> {
        let unknown = || Error::Refused(format!("there is no message {id}"));
        let mut tx = self.begin().await?;
        let (_, slot) = find(&mut tx, id).await?.ok_or_else(unknown)?;
        let place = lane::lock_slot(&mut tx, slot).await?;
        // Read again: what was seen before the lock may be over.
        let (record, slot) = find(&mut tx, id).await?.ok_or_else(unknown)?;
        let mut moved = Tally::default();
        match action {
            Action::Requeue => again(&mut tx, &record, &record.message, Event::Requeued, &mut moved).await?,
            Action::Edit(edit) => {
                let message = mended(&record.message, edit);
                again(&mut tx, &record, &message, Event::Requeued, &mut moved).await?
            }
            Action::Discard => {
                self.remove(&mut tx, &record, slot, Event::Discarded, &place, &mut moved).await?
            }
            Action::Delete => self.remove(&mut tx, &record, slot, Event::Deleted, &place, &mut moved).await?,
        }
        let after = find(&mut tx, id).await?.map(|(record, _)| record);
        audit(&mut tx, place.now, actor, action.name(), id, &changed(&record, after.as_ref())).await?;
        tally::write(moved, &mut tx, place.part()).await?;
        commit(tx).await
    }

    async fn redeliver_once(&self, id: MessageId, group: &str, why: &str) -> Result<bool, Trouble> {
        let mut tx = self.begin().await?;
        let Some((_, slot)) = find(&mut tx, id).await? else { return Ok(false) };
        let place = lane::lock_slot(&mut tx, slot).await?;
        // Read again: what was seen before the lock may be over.
        let found = find(&mut tx, id).await?.map(|(record, _)| record);
        let mut found = found.filter(|record| record.waits_for(group));
        if let Some(record) = &found {
            // Where sent records are deleted, the last acknowledgement may have done that by now.
            let sql = "SELECT seq FROM outbox_events WHERE seq = ? AND status = 'sent' FOR UPDATE";
            let kept: Option<i64> = tx.exec_first(sql, (record.seq,)).await?;
            found = found.filter(|_| kept.is_some());
        }
        let Some(record) = found else {
            // Now, and not when the connection is tidied up: relays pass a lane by that is locked.
            tx.rollback().await?;
            return Ok(false);
        };
        let mut moved = Tally::default();
        again(&mut tx, &record, &record.message, Event::Unacknowledged, &mut moved).await?;
        tx.exec_drop("UPDATE outbox_events SET last_error = ? WHERE seq = ?", (why, record.seq)).await?;
        forget_asked(&mut tx, &record).await?;
        audit(&mut tx, place.now, RELAY, "redeliver", id, &redelivered(group, why)).await?;
        tally::write(moved, &mut tx, place.part()).await?;
        commit(tx).await?;
        Ok(true)
    }

    async fn remove(
        &self,
        tx: &mut Tx<'_>,
        record: &Record,
        slot: u16,
        event: Event,
        place: &Place,
        moved: &mut Tally,
    ) -> Result<(), Trouble> {
        let Next::Gone = step(record.state, event)? else {
            let why = format!("a message that is {} must be gone", event.name());
            return Err(Trouble::Final(Error::Broken(why)));
        };
        debug_assert!(place.lanes().contains(&(slot & place.mask())));
        let mut holds = Holds::default();
        let key = record.message.key.as_deref();
        holds.load(tx, key.map(|key| (record.message.topic.as_str(), key))).await?;
        holds.lift(&record.message.topic, key, record.seq);
        let lifted = holds.write(tx).await?.lifted;
        let removed = settle::remove(tx, &[record.seq]).await?;
        if record.state.status == message::Status::Sent {
            self.uncount(moved, removed);
        }
        forget_asked(tx, record).await?;
        if lifted {
            hold::drain(tx, place).await?;
        }
        Ok(())
    }
}

/// Nobody is waited for any more.
async fn forget_asked(tx: &mut Tx<'_>, record: &Record) -> Result<(), Trouble> {
    for group in record.ack_groups.iter().flatten() {
        tx.exec_drop("DELETE FROM outbox_unacknowledged WHERE grp = ? AND seq = ?", (group, record.seq))
            .await?;
    }
    Ok(())
}

fn mended(message: &Message, edit: &Edit) -> Message {
    let mut message = message.clone();
    message.payload = edit.payload.clone().unwrap_or(message.payload);
    message.content_type = edit.content_type.clone().unwrap_or(message.content_type);
    message.headers = edit.headers.clone().unwrap_or(message.headers);
    message
}

pub(super) async fn audit(
    tx: &mut Tx<'_>,
    now: i64,
    actor: &str,
    action: &str,
    id: MessageId,
    detail: &str,
) -> Result<(), Trouble> {
    tx.exec_drop(
        "INSERT INTO outbox_audit (at, actor, action, message_id, detail) VALUES (?, ?, ?, ?, ?)",
        (at(now), actor, action, id.to_string(), detail),
    )
    .await?;
    Ok(())
}

/// A fresh start for a message, at its old place: those it holds stay behind it.
async fn again(
    tx: &mut Tx<'_>,
    record: &Record,
    message: &Message,
    event: Event,
    moved: &mut Tally,
) -> Result<(), Trouble> {
    let Next::State(state) = step(record.state, event)? else {
        let why = format!("a {} message cannot vanish", event.name());
        return Err(Trouble::Final(Error::Broken(why)));
    };
    let values: Vec<Value> = vec![
        word(state.status).into(),
        state.attempts.into(),
        state.crashes.into(),
        state.delivery.into(),
        Value::Bytes(message.payload.to_vec()),
        message.content_type.as_str().into(),
        headers_json(message).into(),
        record.seq.into(),
    ];
    tx.exec_drop(
        "UPDATE outbox_events SET status = ?, ready = 1, held = 0, attempts = ?, crashes = ?, delivery_epoch = ?,
                next_attempt_at = NULL, dead_reason = NULL, dead_at = NULL, payload = ?, content_type = ?, headers = ?
         WHERE seq = ?",
        values,
    )
    .await?;
    moved.moved(record.state.status, state.status);
    Ok(())
}
