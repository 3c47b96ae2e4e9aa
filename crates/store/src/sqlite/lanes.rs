//! Leases of lanes, on a connection of their own.

use std::collections::HashMap;

use async_trait::async_trait;
use message::{Event, Next, State, Status, step};
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};
use sqlite::{Neighbours, Presence};
use uuid::Uuid;

use super::row::{now, optional_text, state, text};
use super::{SqliteStore, hold, tally};
use crate::column::{SLOTS, crashes_relays, millis, time, word};
use crate::tally::Tally;
use crate::{Beat, Beaten, Error, Instance, LaneView, Lanes, Lease, Left, TopicRule};

#[async_trait]
impl Lanes for SqliteStore {
    async fn beat(&self, beat: &Beat) -> Result<Beaten, Error> {
        let neighbours = self.neighbours();
        let dead = neighbours.as_ref().map(Neighbours::dead).unwrap_or_default();
        let presence = neighbours.as_ref().map(Neighbours::own);
        let mut heart = self.heart.lock().expect("no beat panics while it holds the connection");
        let transaction = heart.transaction_with_behavior(TransactionBehavior::Immediate)?;
        bury(&transaction, &dead)?;
        let beaten = Heartbeat { connection: &transaction, now: now(&transaction)?, beat, presence }.run()?;
        transaction.commit()?;
        if let Some(neighbours) = neighbours {
            neighbours.clear(&dead);
        }
        Ok(beaten)
    }

    async fn release(&self, leases: &[Lease], left: Left) -> Result<(), Error> {
        let leases = leases.to_vec();
        self.file
            .write(move |connection| {
                for lease in leases {
                    let freed = connection
                        .prepare_cached(
                            "UPDATE outbox_lanes SET owner = NULL, lease_id = NULL, locked_until = 0
                             WHERE lane = ?1 AND epoch = ?2 AND lease_id = ?3",
                        )?
                        .execute(params![lease.lane, lease.epoch, lease.id.to_string()])?;
                    if freed == 1 && left == Left::Untouched {
                        left_open(connection, lease.lane)?;
                    }
                }
                Ok(())
            })
            .await
    }

    async fn leave(&self, instance: &Instance) -> Result<(), Error> {
        let id = instance.id.to_string();
        self.file
            .write(move |connection| {
                connection.execute("DELETE FROM outbox_instances WHERE id = ?1", [&id])?;
                connection.execute(
                    "UPDATE outbox_lanes SET owner = NULL, lease_id = NULL, locked_until = 0 WHERE owner = ?1",
                    [&id],
                )?;
                Ok(())
            })
            .await
    }

    async fn lanes(&self) -> Result<Vec<LaneView>, Error> {
        self.file
            .read(|connection| {
                let now = now(connection)?;
                let mut statement = connection.prepare_cached(
                    "SELECT l.lane, l.epoch, coalesce(i.name, l.owner), l.locked_until,
                            (SELECT coalesce(sum(b.size), 0) FROM outbox_batches b WHERE b.lane = l.lane)
                     FROM outbox_lanes l LEFT JOIN outbox_instances i ON i.id = l.owner
                     WHERE l.lane < ?1 ORDER BY l.lane",
                )?;
                let lanes = statement.query_map([count(connection)?], |row| {
                    let until: i64 = row.get(3)?;
                    let owned = until > now;
                    Ok(LaneView {
                        lane: row.get(0)?,
                        epoch: row.get(1)?,
                        owner: if owned { row.get(2)? } else { None },
                        locked_until: owned.then(|| time(until)),
                        in_flight: row.get(4)?,
                    })
                })?;
                Ok(lanes.collect::<Result<_, _>>()?)
            })
            .await
    }

    async fn set_lanes(&self, wanted: u16) -> Result<bool, Error> {
        if !wanted.is_power_of_two() || wanted > SLOTS {
            return Err(Error::Refused(format!(
                "{wanted} lanes are not possible: choose a power of two from 1 to {SLOTS}"
            )));
        }
        self.file
            .write(move |connection| {
                connection.execute(
                    "UPDATE outbox_settings SET value = ?1 WHERE name = 'lanes_wanted'",
                    [wanted.to_string()],
                )?;
                resize(connection, now(connection)?)
            })
            .await
    }
}

impl SqliteStore {
    /// The processes beside this one. Where none can be seen, leases alone decide.
    fn neighbours(&self) -> Option<Neighbours> {
        let announce = || {
            Presence::announce(self.path())
                .inspect_err(
                    |error| tracing::warn!(%error, "a crash of this process will be noticed by its leases"),
                )
                .ok()
        };
        self.presence.get_or_init(announce).as_ref().map(Presence::neighbours)
    }
}

/// Frees the lanes of processes that have ended: nobody is left who could use their leases.
fn bury(connection: &Connection, presences: &[String]) -> Result<(), Error> {
    for presence in presences {
        connection
            .prepare_cached(
                "UPDATE outbox_lanes SET owner = NULL, lease_id = NULL, locked_until = 0
                 WHERE owner IN (SELECT id FROM outbox_instances WHERE presence = ?1)",
            )?
            .execute([presence])?;
        connection.prepare_cached("DELETE FROM outbox_instances WHERE presence = ?1")?.execute([presence])?;
    }
    Ok(())
}

/// How many lanes there are.
pub(super) fn count(connection: &Connection) -> rusqlite::Result<u16> {
    setting(connection, "lanes")
}

fn setting(connection: &Connection, name: &str) -> rusqlite::Result<u16> {
    connection
        .prepare_cached("SELECT CAST(value AS INTEGER) FROM outbox_settings WHERE name = ?1")?
        .query_row([name], |row| row.get(0))
}

/// Puts a wanted number of lanes in force if nothing stands in its way. `true` when it is in force.
fn resize(connection: &Connection, now: i64) -> Result<bool, Error> {
    let (current, wanted) = (count(connection)?, setting(connection, "lanes_wanted")?);
    if current == wanted {
        return Ok(true);
    }
    // An open batch counts even when its owner is dead: only a relay, which knows the routes, can resolve it.
    let busy: bool = connection.query_row(
        "SELECT EXISTS (SELECT 1 FROM outbox_lanes WHERE locked_until > ?1) OR EXISTS (SELECT 1 FROM outbox_batches)",
        [now],
        |row| row.get(0),
    )?;
    if busy {
        return Ok(false);
    }
    connection.execute("UPDATE outbox_settings SET value = ?1 WHERE name = 'lanes'", [wanted.to_string()])?;
    Ok(true)
}

/// One beat, inside its transaction.
struct Heartbeat<'a> {
    connection: &'a Connection,
    now: i64,
    beat: &'a Beat,
    /// What this process is known by.
    presence: Option<&'a str>,
}

impl Heartbeat<'_> {
    fn run(&self) -> Result<Beaten, Error> {
        let owner = self.beat.instance.id.to_string();
        let until = self.now + millis(self.beat.lease);
        self.connection
            .prepare_cached(
                "INSERT INTO outbox_instances (id, name, presence, alive_until) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT DO UPDATE SET alive_until = excluded.alive_until",
            )?
            .execute(params![owner, self.beat.instance.name, self.presence, until])?;
        self.connection
            .prepare_cached("DELETE FROM outbox_instances WHERE alive_until < ?1")?
            .execute([self.now])?;
        let instances: usize =
            self.connection.query_row("SELECT count(*) FROM outbox_instances", [], |row| row.get(0))?;

        let mut beaten = Beaten { held: self.renew(until)?, instances, ..Beaten::default() };
        let resizing = !self.settle_size()?;
        let lanes = usize::from(count(self.connection)?);
        let share = if resizing { 0 } else { lanes.div_ceil(instances.max(1)) };
        if self.beat.take {
            self.take(share.saturating_sub(beaten.held.len()), until, &owner, &mut beaten)?;
        }
        beaten.surplus = beaten.held.len().saturating_sub(share);
        beaten.wanting = share.saturating_sub(beaten.held.len());
        Ok(beaten)
    }

    fn renew(&self, until: i64) -> Result<Vec<Lease>, Error> {
        let mut held = Vec::with_capacity(self.beat.held.len());
        for lease in &self.beat.held {
            let renewed = self
                .connection
                .prepare_cached(
                    "UPDATE outbox_lanes SET locked_until = ?4 WHERE lane = ?1 AND epoch = ?2 AND lease_id = ?3",
                )?
                .execute(params![lease.lane, lease.epoch, lease.id.to_string(), until])?;
            if renewed == 1 {
                held.push(*lease);
            }
        }
        Ok(held)
    }

    /// A change of the number of lanes waits for dead owners' batches too: this instance resolves them.
    fn settle_size(&self) -> Result<bool, Error> {
        if resize(self.connection, self.now)? {
            return Ok(true);
        }
        let abandoned: Vec<u16> = self
            .connection
            .prepare_cached(
                "SELECT DISTINCT b.lane FROM outbox_batches b JOIN outbox_lanes l USING (lane)
                 WHERE l.locked_until <= ?1",
            )?
            .query_map([self.now], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        for lane in abandoned {
            // A new epoch first: the late owner must find its batch gone and its lease void.
            self.connection.execute(
                "UPDATE outbox_lanes SET epoch = epoch + 1, owner = NULL, lease_id = NULL, locked_until = 0
                 WHERE lane = ?1",
                [lane],
            )?;
            orphan(self.connection, lane, &*self.beat.rule)?;
        }
        resize(self.connection, self.now)
    }

    fn take(&self, most: usize, until: i64, owner: &str, beaten: &mut Beaten) -> Result<(), Error> {
        if most == 0 {
            return Ok(());
        }
        let free: Vec<(u16, i64)> = self
            .connection
            .prepare_cached(
                "SELECT lane, epoch FROM outbox_lanes WHERE lane < ?1 AND locked_until <= ?2 ORDER BY lane LIMIT ?3",
            )?
            .query_map(params![count(self.connection)?, self.now, most], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })?
            .collect::<Result<_, _>>()?;
        for (lane, epoch) in free {
            let lease = Lease { lane, epoch: epoch + 1, id: Uuid::new_v4() };
            self.connection
                .prepare_cached(
                    "UPDATE outbox_lanes SET epoch = ?2, lease_id = ?3, owner = ?4, locked_until = ?5 WHERE lane = ?1",
                )?
                .execute(params![lane, lease.epoch, lease.id.to_string(), owner, until])?;
            let (orphans, dead) = orphan(self.connection, lane, &*self.beat.rule)?;
            beaten.orphans += orphans;
            beaten.dead += dead;
            beaten.held.push(lease);
        }
        Ok(())
    }
}

/// Resolves the batches that a former owner left open on `lane`. Answers how many messages they had and how many
/// of them are Dead now.
fn orphan(
    connection: &Connection,
    lane: u16,
    rule: &dyn Fn(&str) -> TopicRule,
) -> Result<(usize, usize), Error> {
    let seqs = left_open(connection, lane)?;
    if seqs.is_empty() {
        return Ok((0, 0));
    }
    let now = now(connection)?;
    let mut moved = Tally::default();
    let mut rules = HashMap::new();
    let mut dead = 0;
    for seq in &seqs {
        let found: Option<(String, Option<String>, State)> = connection
            .prepare_cached(
                "SELECT topic, key, status, attempts, crashes, delivery_epoch FROM outbox_events WHERE seq = ?1",
            )?
            .query_row([seq], |row| Ok((text(row, 0)?, optional_text(row, 1)?, state(row, 2, true)?)))
            .optional()?;
        // Somebody deleted the row by hand; that must not keep the lane from its new owner.
        let Some((topic, key, before)) = found else { continue };
        let Next::State(after) = step(before, Event::Orphaned)? else {
            return Err(Error::Broken("an orphaned message cannot be gone".to_owned()));
        };
        if after.status == Status::Dead {
            dead += 1;
            moved.moved(before.rest, Status::Dead);
            let hold_dead = rules.entry(topic.clone()).or_insert_with(|| rule(&topic)).hold_dead;
            match key.filter(|_| hold_dead) {
                Some(key) => hold::place(connection, &topic, &key, *seq)?,
                None => hold::lift(connection, *seq)?,
            }
        }
        let reason = (after.status == Status::Dead).then(|| crashes_relays(after.crashes));
        connection
            .prepare_cached(
                "UPDATE outbox_events SET crashes = ?2, status = ?3, ready = ?4, dead_reason = ?5, dead_at = ?6
                 WHERE seq = ?1",
            )?
            .execute(params![
                seq,
                after.crashes,
                word(after.status),
                reason.is_none(),
                reason,
                reason.is_some().then_some(now)
            ])?;
    }
    tally::write(moved, connection)?;
    Ok((seqs.len(), dead))
}

/// Closes the batches of `lane`. Answers their messages.
fn left_open(connection: &Connection, lane: u16) -> Result<Vec<i64>, Error> {
    let mut statement =
        connection.prepare_cached("DELETE FROM outbox_batches WHERE lane = ?1 RETURNING seqs")?;
    let mut rows = statement.query([lane])?;
    let mut all = Vec::new();
    while let Some(row) = rows.next()? {
        let seqs: Vec<i64> = serde_json::from_str(&row.get::<_, String>(0)?)
            .map_err(|error| Error::Broken(format!("a batch record cannot be read: {error}")))?;
        all.extend(seqs);
    }
    Ok(all)
}
