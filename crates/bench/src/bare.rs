//! The ceilings: one thread and prepared statements, writing the same rows in the same batches, and nothing else.
//! It neither reads what it wrote nor survives a crash in a useful state.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use broker::embedded;
use message::Message;
use rusqlite::{Connection, params};
use store::sqlite::SqliteStore;

use crate::Size;
use crate::append::WRITERS;
use crate::arrow::{BATCH, EFFECT, effects, message};

/// Partitions of a topic of the embedded broker, and lanes of the store.
const PARTITIONS: usize = 16;

fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.pragma_update_and_check(None, "journal_mode", "wal", |_| Ok(()))?;
    connection.pragma_update(None, "synchronous", "full")?;
    connection.pragma_update(None, "wal_autocheckpoint", 4_000)?;
    connection.set_prepared_statement_cache_capacity(64);
    Ok(connection)
}

pub(crate) fn append(size: Size) -> Result<Duration> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("store.db");
    drop(SqliteStore::open(&path)?);
    let mut store = connect(&path)?;
    let messages: Vec<Message> = (0..size.messages).map(|number| message(size, number)).collect();
    let started = Instant::now();
    for batch in messages.chunks(WRITERS) {
        commit(&mut store, |store| {
            batch.iter().try_for_each(|message| store::sqlite::append(store, message))
        })?;
    }
    Ok(started.elapsed())
}

pub(crate) fn arrow(size: Size) -> Result<Duration> {
    let folder = tempfile::tempdir()?;
    let (path, log) = (folder.path().join("store.db"), folder.path().join("broker.db"));
    drop(SqliteStore::open(&path)?);
    effects(&path)?;
    drop(embedded::Broker::open(embedded::Config::new(&log))?);
    let (mut store, mut broker) = (connect(&path)?, connect(&log)?);
    broker.pragma_update(None, "foreign_keys", false)?;
    for partition in 0..PARTITIONS {
        broker.execute("INSERT INTO broker_partitions (id, topic) VALUES (?1, 1)", [partition])?;
    }
    let messages: Vec<Message> = (0..size.messages).map(|number| message(size, number)).collect();
    let started = Instant::now();
    let mut seq = 0;
    for (number, batch) in messages.chunks(BATCH).enumerate() {
        commit(&mut store, |store| {
            batch.iter().try_for_each(|message| store::sqlite::append(store, message))
        })?;
        commit(&mut broker, |broker| publish(broker, number, batch))?;
        commit(&mut store, |store| settle(store, number, seq, batch.len()))?;
        commit(&mut store, |store| handle(store, seq, batch))?;
        commit(&mut broker, |broker| {
            let sql = "UPDATE broker_partitions SET next = next + 1 WHERE id = ?1";
            (0..PARTITIONS)
                .try_for_each(|partition| broker.prepare_cached(sql)?.execute([partition]).map(drop))
        })?;
        seq += batch.len();
    }
    Ok(started.elapsed())
}

fn commit(
    connection: &mut Connection,
    work: impl FnOnce(&Connection) -> rusqlite::Result<()>,
) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    work(&transaction)?;
    transaction.commit()
}

/// A block for each partition, with the bytes of its share of the batch, and the partition's next offset.
fn publish(broker: &Connection, number: usize, batch: &[Message]) -> rusqlite::Result<()> {
    for partition in 0..PARTITIONS {
        let share = batch.iter().skip(partition).step_by(PARTITIONS);
        let data: Vec<u8> = share.clone().flat_map(|message| message.payload.iter().copied()).collect();
        let position = (partition << 40) + number * BATCH;
        broker
            .prepare_cached(
                "INSERT INTO broker_blocks (position, messages, stored_at, data) VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![position, share.count().max(1), 0, data])?;
        broker
            .prepare_cached("UPDATE broker_partitions SET next = next + 1 WHERE id = ?1")?
            .execute([partition])?;
    }
    Ok(())
}

/// The batch records of the claim, written and removed, and the state of every message.
fn settle(store: &Connection, number: usize, seq: usize, count: usize) -> rusqlite::Result<()> {
    for lane in 0..PARTITIONS {
        store.prepare_cached("DELETE FROM outbox_batches WHERE lane = ?1")?.execute([lane])?;
        store
            .prepare_cached(
                "INSERT INTO outbox_batches (lane, id, epoch, lease_id, topics, seqs, size, failed, claimed_at)
                 VALUES (?1, ?2, 1, ?2, '[\"bench\"]', ?3, 31, 0, 0)",
            )?
            .execute(params![lane, format!("{number:036}"), "[100000,".repeat(31)])?;
    }
    for seq in seq + 1..=seq + count {
        store
            .prepare_cached(
                "UPDATE outbox_events SET status = 'sent', ready = 0, sent_at = 1, ack_groups = '[\"bench\"]'
                 WHERE seq = ?1",
            )?
            .execute([seq])?;
        store
            .prepare_cached("INSERT INTO outbox_unacknowledged (grp, seq) VALUES ('bench', ?1)")?
            .execute([seq])?;
    }
    Ok(())
}

/// The mark, the effect and the acknowledgement of every message.
fn handle(store: &Connection, seq: usize, batch: &[Message]) -> rusqlite::Result<()> {
    for (message, seq) in batch.iter().zip(seq + 1..) {
        let id = message.id.to_string();
        store
            .prepare_cached(
                "INSERT INTO inbox_ids (grp, id, digest, topic, key, seq, processed_at)
                 VALUES (1, ?1, ?2, ?3, ?4, ?5, 0)",
            )?
            .execute(params![id, [0u8; 16], message.topic, message.key, seq])?;
        store.prepare_cached(EFFECT)?.execute(&[(":id", &Some(id)), (":key", &message.key)])?;
        store
            .prepare_cached(
                "INSERT INTO outbox_acknowledgements (seq, grp, acknowledged_at) VALUES (?1, 'bench', 0)",
            )?
            .execute([seq])?;
        store
            .prepare_cached("DELETE FROM outbox_unacknowledged WHERE grp = 'bench' AND seq = ?1")?
            .execute([seq])?;
    }
    Ok(())
}
