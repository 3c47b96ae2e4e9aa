//! Mending: every action checks the transition, keeps counters and holds right, and is audited, in one
//! transaction, under the lock of the message's lane.

use async_trait::async_trait;
use message::{Event, Message, MessageId, Next, step};
use tokio_postgres::types::Type;

use super::acknowledge::Acknowledger;
use super::connection::{Transaction, repeat};
use super::error::Trouble;
use super::inspect::find;
use super::row::count;
use super::{PostgresStore, retain, tally};
use crate::audit::{RELAY, changed, redelivered};
use crate::column::{headers_json, word};
use crate::tally::Tally;
use crate::{Acknowledged, Amend, Edit, Error, Record, Retention};

/// What to do with a message.
enum Action<'a> {
    Requeue,
    Edit(&'a Edit),
    Discard,
    Delete,
}

impl Action<'_> {
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
impl Amend for PostgresStore {
    async fn requeue(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, Action::Requeue).await
    }

    async fn edit(&self, id: MessageId, edit: &Edit, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, Action::Edit(edit)).await
    }

    async fn discard(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, Action::Discard).await
    }

    async fn delete(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        self.amend(id, actor, Action::Delete).await
    }

    async fn acknowledge(&self, done: Vec<(MessageId, String)>) -> Result<Vec<Acknowledged>, Error> {
        let done: Vec<_> = done.into_iter().map(|(id, group)| (id, None, group)).collect();
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let result = async {
                tx.begin().await?;
                Acknowledger { tx: &tx, sent: self.sent }.acknowledge(&done).await
            }
            .await;
            tx.end(result).await
        })
        .await
    }

    async fn redeliver(&self, id: MessageId, group: &str, why: &str) -> Result<bool, Error> {
        let again = repeat(|| async {
            let tx = self.connections.transaction().await?;
            let result = redeliver(&tx, id, group, why).await;
            tx.end(result).await
        })
        .await?;
        if again {
            self.ring();
        }
        Ok(again)
    }

    async fn clean(&self, retention: &Retention) -> Result<u64, Error> {
        retain::clean(self, retention).await
    }
}

impl PostgresStore {
    async fn amend(&self, id: MessageId, actor: &str, action: Action<'_>) -> Result<(), Error> {
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let result = act(&tx, id, actor, &action).await;
            tx.end(result).await
        })
        .await?;
        self.ring();
        Ok(())
    }
}

async fn act(tx: &Transaction, id: MessageId, actor: &str, action: &Action<'_>) -> Result<(), Trouble> {
    let (begun, lane) = tokio::join!(biased; tx.begin(), lock(tx, id));
    begun?;
    let lane = lane?;
    let record = find(tx, id).await?.ok_or_else(|| Error::Refused(format!("there is no message {id}")))?;
    match action {
        Action::Requeue => again(tx, &record, &record.message, lane, Event::Requeued).await?,
        Action::Edit(edit) => {
            again(tx, &record, &edited(&record.message, edit), lane, Event::Requeued).await?
        }
        Action::Discard => remove(tx, &record, Event::Discarded).await?,
        Action::Delete => remove(tx, &record, Event::Deleted).await?,
    }
    let after = find(tx, id).await?;
    audit(tx, actor, action.name(), id, &changed(&record, after.as_ref())).await
}

async fn redeliver(tx: &Transaction, id: MessageId, group: &str, why: &str) -> Result<bool, Trouble> {
    let (begun, lane) = tokio::join!(biased; tx.begin(), lock(tx, id));
    begun?;
    let lane = lane?;
    let Some(record) = find(tx, id).await?.filter(|record| record.waits_for(group)) else {
        return Ok(false);
    };
    // Where sent records are deleted, the last acknowledgement may have done that by now.
    let kept = tx
        .execute(
            "UPDATE outbox_events SET last_error = $2 WHERE seq = $1 AND status = 'sent'",
            &[(&record.seq, Type::INT8), (&why, Type::TEXT)],
        )
        .await?;
    if kept == 0 {
        return Ok(false);
    }
    again(tx, &record, &record.message, lane, Event::Unacknowledged).await?;
    tx.execute("DELETE FROM outbox_unacknowledged WHERE seq = $1", &[(&record.seq, Type::INT8)]).await?;
    audit(tx, RELAY, "redeliver", id, &redelivered(group, why)).await?;
    Ok(true)
}

/// Locks the lane of a message, if there is one: its relay is not at it from now on.
async fn lock(tx: &Transaction, id: MessageId) -> Result<Option<i16>, Trouble> {
    let rows = tx
        .query(
            "SELECT lane FROM outbox_lanes WHERE lane =
             (SELECT e.slot & (s.value::smallint - 1::smallint) FROM outbox_events e, outbox_settings s WHERE e.id = $1 AND s.name = 'lanes')
             FOR UPDATE",
            &[(&id.0, Type::UUID)],
        )
        .await?;
    Ok(rows.first().map(|row| row.try_get(0)).transpose()?)
}

fn edited(message: &Message, edit: &Edit) -> Message {
    let mut message = message.clone();
    message.payload = edit.payload.clone().unwrap_or(message.payload);
    message.content_type = edit.content_type.clone().unwrap_or(message.content_type);
    message.headers = edit.headers.clone().unwrap_or(message.headers);
    message
}

pub(super) async fn audit(
    tx: &Transaction,
    actor: &str,
    action: &str,
    id: MessageId,
    detail: &str,
) -> Result<(), Trouble> {
    tx.execute(
        "INSERT INTO outbox_audit (at, actor, action, message_id, detail) VALUES (clock_timestamp(), $1, $2, $3, $4)",
        &[(&actor, Type::TEXT), (&action, Type::TEXT), (&id.0, Type::UUID), (&detail, Type::TEXT)],
    )
    .await?;
    Ok(())
}

/// A fresh start for a message, at its old place: those it holds stay behind it.
async fn again(
    tx: &Transaction,
    record: &Record,
    message: &Message,
    lane: Option<i16>,
    event: Event,
) -> Result<(), Trouble> {
    let Next::State(state) = step(record.state, event)? else {
        return Err(Error::Broken(format!("a {} message cannot vanish", event.name())).into());
    };
    tx.execute(
        "UPDATE outbox_events SET status = $2, ready = true, held = false, attempts = $3, crashes = $4,
                delivery_epoch = $5, next_attempt_at = NULL, dead_reason = NULL, dead_at = NULL,
                payload = $6, content_type = $7, headers = $8::jsonb
         WHERE seq = $1",
        &[
            (&record.seq, Type::INT8),
            (&word(state.status), Type::TEXT),
            (&count(state.attempts), Type::INT4),
            (&count(state.crashes), Type::INT4),
            (&count(state.delivery), Type::INT4),
            (&&message.payload[..], Type::BYTEA),
            (&message.content_type, Type::TEXT),
            (&headers_json(message), Type::TEXT),
        ],
    )
    .await?;
    // Its number may be below the mark of the lane's owner.
    tx.execute("UPDATE outbox_lanes SET amended = amended + 1 WHERE lane = $1", &[(&lane, Type::INT2)])
        .await?;
    let mut moved = Tally::default();
    moved.moved(record.state.status, state.status);
    tally::write(tx, moved).await
}

/// A trigger takes with the record all that hangs on it, lets its followers go, and counts.
async fn remove(tx: &Transaction, record: &Record, event: Event) -> Result<(), Trouble> {
    match step(record.state, event)? {
        Next::Gone => {
            tx.execute("DELETE FROM outbox_events WHERE seq = $1", &[(&record.seq, Type::INT8)]).await?;
            Ok(())
        }
        Next::State(_) => {
            Err(Error::Broken(format!("a message that is {} must be gone", event.name())).into())
        }
    }
}
