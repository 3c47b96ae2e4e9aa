//! Transactions: a batch and the note of it in one transaction of the file, by a sender that nobody has fenced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension};

use super::error::outcome;
use super::publish::{Ready, TIME_LIMIT, append, failed, unanswered};
use super::{Broker, Inner};
use crate::{Line, Outcome, Outgoing, SendTogether, Transactions, WriteNote};

#[async_trait]
impl Transactions for Broker {
    async fn sender(&self, line: &Line) -> Result<Arc<dyn SendTogether>, Outcome> {
        let made = self.inner.file.write(|connection| {
            let made = "INSERT INTO broker_senders DEFAULT VALUES RETURNING id";
            Ok(connection.query_row(made, [], |row| row.get(0))?)
        });
        let id = made.await.map_err(|error| outcome(&error).before_sending())?;
        let line = format!("{}.{}", line.store, line.broker);
        Ok(Arc::new(Together { broker: self.clone(), line, id, good: AtomicBool::new(true) }))
    }
}

/// One that sends.
struct Together {
    broker: Broker,
    line: String,
    id: i64,
    good: AtomicBool,
}

#[async_trait]
impl SendTogether for Together {
    async fn take(&self, lanes: &[u16]) -> Result<Vec<Vec<u8>>, Outcome> {
        let (line, id, lanes) = (self.line.clone(), self.id, lanes.to_vec());
        let taken = self.inner().file.write(move |connection| take(connection, &line, id, &lanes)).await;
        match taken {
            Ok(Some(notes)) => Ok(notes),
            Ok(None) => {
                self.good.store(false, Ordering::SeqCst);
                Err(Outcome::Held)
            }
            Err(error) => Err(outcome(&error).before_sending()),
        }
    }

    fn resolve(&self, lanes: &[u16]) {
        let (inner, line, lanes) = (Arc::clone(&self.broker.inner), self.line.clone(), lanes.to_vec());
        let id = self.id;
        // Where this fails, the next who takes the lanes finds that everything is settled.
        tokio::spawn(async move {
            drop(inner.file.write(move |connection| resolve(connection, &line, id, &lanes)).await);
        });
    }

    async fn give_back(&self, lanes: &[u16]) {
        let (line, id, lanes) = (self.line.clone(), self.id, lanes.to_vec());
        drop(self.inner().file.write(move |connection| give_back(connection, &line, id, &lanes)).await);
    }

    async fn publish(&self, batch: Vec<Outgoing>, note: WriteNote<'_>) -> Vec<Outcome> {
        let (mut outcomes, ready) = self.broker.sort(batch);
        if ready.is_empty() {
            return outcomes.into_iter().flatten().collect();
        }
        let places: Vec<usize> = (0..outcomes.len()).filter(|place| outcomes[*place].is_none()).collect();
        let note = note(&places);
        // Until it is known how this ends, nothing else may begin.
        self.good.store(false, Ordering::SeqCst);
        let results = match tokio::time::timeout(TIME_LIMIT, self.store(&ready, note)).await {
            Ok(Ok(true)) => {
                fail::fail_point!("broker::published");
                self.good.store(true, Ordering::SeqCst);
                self.inner().ring();
                vec![Outcome::Confirmed; ready.len()]
            }
            Ok(Ok(false)) => vec![Outcome::Held; ready.len()],
            Ok(Err(error)) => failed(&ready, &outcome(&error)),
            Err(_) => failed(&ready, &unanswered()),
        };
        for (place, result) in places.into_iter().zip(results) {
            outcomes[place] = Some(result);
        }
        outcomes.into_iter().flatten().collect()
    }

    fn is_good(&self) -> bool {
        self.good.load(Ordering::SeqCst)
    }
}

impl Together {
    fn inner(&self) -> &Inner {
        &self.broker.inner
    }

    /// Stores messages and note; neither where this sender is fenced.
    async fn store(&self, ready: &[Ready], note: Vec<u8>) -> Result<bool, sqlite::Error> {
        let (blocks, id) = (self.broker.blocks(ready).await?, self.id);
        let write = move |connection: &Connection| {
            let noted = connection
                .prepare_cached("UPDATE broker_senders SET note = ?2 WHERE id = ?1 AND NOT fenced")?
                .execute((id, &note))?;
            if noted > 0 {
                append(connection, &blocks)?;
            }
            Ok(noted > 0)
        };
        fail::fail_point!("broker::publishing");
        self.inner().file.write(write).await
    }
}

/// Fences whoever has one of the lanes, and answers their notes; nothing where this one is fenced itself.
fn take(
    connection: &Connection,
    line: &str,
    sender: i64,
    lanes: &[u16],
) -> Result<Option<Vec<Vec<u8>>>, sqlite::Error> {
    let good = connection
        .prepare_cached("SELECT 1 FROM broker_senders WHERE id = ?1 AND NOT fenced")?
        .query_row([sender], |_| Ok(()))
        .optional()?;
    if good.is_none() {
        return Ok(None);
    }
    let mut others = connection.prepare_cached(
        "UPDATE broker_senders SET fenced = TRUE
         WHERE id IN (SELECT sender FROM broker_claims WHERE line = ?1 AND lane = ?2 AND sender <> ?3)
         RETURNING id, note",
    )?;
    let mut claim = connection
        .prepare_cached("INSERT OR IGNORE INTO broker_claims (line, lane, sender) VALUES (?1, ?2, ?3)")?;
    let mut notes = std::collections::BTreeMap::new();
    for lane in lanes {
        let fenced = others.query_map((line, lane, sender), |row| Ok((row.get(0)?, row.get(1)?)))?;
        for fenced in fenced {
            let (other, note): (i64, Option<Vec<u8>>) = fenced?;
            notes.insert(other, note);
        }
        claim.execute((line, lane, sender))?;
    }
    Ok(Some(notes.into_values().flatten().collect()))
}

/// Forgets the claims of those who were fenced, and them with the last of their claims. Only who has a lane may: what is open
/// of it is known to nobody else.
fn resolve(connection: &Connection, line: &str, sender: i64, lanes: &[u16]) -> Result<(), sqlite::Error> {
    let mut claims = connection.prepare_cached(
        "DELETE FROM broker_claims WHERE line = ?1 AND lane = ?2
         AND sender IN (SELECT id FROM broker_senders WHERE fenced)
         AND EXISTS (SELECT 1 FROM broker_claims own JOIN broker_senders ON id = own.sender
                     WHERE own.line = ?1 AND own.lane = ?2 AND own.sender = ?3 AND NOT fenced)",
    )?;
    for lane in lanes {
        claims.execute((line, lane, sender))?;
    }
    connection
        .prepare_cached(
            "DELETE FROM broker_senders WHERE fenced
             AND NOT EXISTS (SELECT 1 FROM broker_claims WHERE sender = broker_senders.id)",
        )?
        .execute([])?;
    Ok(())
}

/// Ends claims. With the last of them nobody has to know the note.
fn give_back(connection: &Connection, line: &str, sender: i64, lanes: &[u16]) -> Result<(), sqlite::Error> {
    let mut end = connection
        .prepare_cached("DELETE FROM broker_claims WHERE line = ?1 AND lane = ?2 AND sender = ?3")?;
    for lane in lanes {
        end.execute((line, lane, sender))?;
    }
    connection
        .prepare_cached(
            "UPDATE broker_senders SET note = NULL
             WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM broker_claims WHERE sender = ?1)",
        )?
        .execute([sender])?;
    Ok(())
}
