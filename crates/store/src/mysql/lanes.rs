//! Leases of lanes, on a connection of their own.
//!
//! The heartbeat writes `lanes` and `instances`. Work on a lane locks its row in `counters` and only reads `lanes`, so
//! no turn, however slow, keeps a lease from being renewed. To take a lane is to lock both; what somebody else is
//! working on is skipped, not waited for: a relay that was stopped in the middle of a turn blocks its own lanes only.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use async_trait::async_trait;
use message::{Event, Status};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Row};
use serde_json::{Value as Json, json};
use uuid::Uuid;

use super::error::Trouble;
use super::hold::{self, Holds};
use super::lane::{self, Place};
use super::row::{Read, at, at_text, list};
use super::session::{Tx, commit, committed, connect};
use super::{MysqlStore, settle, tally};
use crate::column::{SLOTS, crashes_relays, millis, time, word};
use crate::tally::Tally;
use crate::{Beat, Beaten, Error, Instance, LaneView, Lanes, Lease, Left, TopicRule};

/// What frees a lane.
const FREE: &str = "owner = NULL, lease_id = NULL, locked_until = '1970-01-01'";

#[async_trait]
impl Lanes for MysqlStore {
    async fn beat(&self, beat: &Beat) -> Result<Beaten, Error> {
        let beat = Arc::new(beat.clone());
        self.run(move |store| {
            let beat = Arc::clone(&beat);
            async move { store.beat_once(&beat).await }
        })
        .await
    }

    async fn release(&self, leases: &[Lease], left: Left) -> Result<(), Error> {
        if leases.is_empty() {
            return Ok(());
        }
        let leases = leases.to_vec();
        self.run(move |store| {
            let leases = leases.clone();
            async move {
                let mut tx = store.begin().await?;
                if left == Left::Untouched {
                    close(&mut tx, &leases).await?;
                }
                let rows: Json =
                    leases.iter().map(|lease| json!([lease.lane, lease.epoch, lease.id])).collect();
                tx.exec_drop(include_str!("lanes/release.sql"), (rows.to_string(),)).await?;
                commit(tx).await
            }
        })
        .await
    }

    async fn leave(&self, instance: &Instance) -> Result<(), Error> {
        let id = instance.id.to_string();
        self.run(move |store| {
            let id = id.clone();
            async move {
                let mut tx = store.begin().await?;
                tx.exec_drop("DELETE FROM outbox_instances WHERE id = ?", (&id,)).await?;
                // Found first and written by number: an UPDATE by owner would wait for everybody's lanes.
                let lanes: Vec<u16> =
                    tx.exec("SELECT lane FROM outbox_lanes WHERE owner = ?", (&id,)).await?;
                let sql = format!(
                    "UPDATE outbox_lanes FORCE INDEX (PRIMARY) SET {FREE} WHERE lane IN ({}) AND owner = ?",
                    list(lanes)
                );
                tx.exec_drop(sql, (&id,)).await?;
                commit(tx).await
            }
        })
        .await
    }

    async fn lanes(&self) -> Result<Vec<LaneView>, Error> {
        self.run(|store| async move {
            let mut connection = store.connection().await?;
            let place = lane::look(&mut connection, BTreeSet::new()).await?;
            let rows: Vec<Row> = connection
                .exec(
                    "SELECT l.lane, l.epoch, coalesce(i.name, l.owner), l.locked_until,
                            (SELECT cast(coalesce(sum(b.size), 0) AS SIGNED) FROM outbox_batches b WHERE b.lane = l.lane)
                     FROM outbox_lanes l LEFT JOIN outbox_instances i ON i.id = l.owner
                     WHERE l.lane < ? ORDER BY l.lane",
                    (place.count(),),
                )
                .await?;
            let view = |mut row: Row| -> Result<LaneView, Trouble> {
                let until = row.millis(3)?;
                let owned = until > place.now;
                Ok(LaneView {
                    lane: row.small(0)?,
                    epoch: row.number(1)?,
                    owner: if owned { row.optional_text(2)? } else { None },
                    locked_until: owned.then(|| time(until)),
                    in_flight: row.small(4)?,
                })
            };
            rows.into_iter().map(view).collect()
        })
        .await
    }

    async fn set_lanes(&self, wanted: u16) -> Result<bool, Error> {
        if !wanted.is_power_of_two() || wanted > SLOTS {
            return Err(Error::Refused(format!(
                "{wanted} lanes are not possible: choose a power of two from 1 to {SLOTS}"
            )));
        }
        self.run(move |store| async move {
            let mut tx = store.begin().await?;
            tx.exec_drop(
                "UPDATE outbox_settings SET value = ? WHERE name = 'lanes_wanted'",
                (wanted.to_string(),),
            )
            .await?;
            let place = lane::look(&mut tx, BTreeSet::new()).await?;
            let in_force = resize(&mut tx, place.now).await?;
            commit(tx).await?;
            Ok(in_force)
        })
        .await
    }
}

impl MysqlStore {
    /// One beat, on the heartbeat's own connection. One that failed is closed: what it was doing ends with it.
    async fn beat_once(&self, beat: &Beat) -> Result<Beaten, Trouble> {
        let mut heart = self.heart.lock().await;
        let mut connection = match heart.take() {
            Some(connection) => connection,
            None => connect(self.options.clone()).await?,
        };
        let beaten = self.beat_on(&mut connection, beat).await?;
        *heart = Some(connection);
        Ok(beaten)
    }

    async fn beat_on(&self, connection: &mut Conn, beat: &Beat) -> Result<Beaten, Trouble> {
        let tx = connection.start_transaction(committed()).await?;
        Heartbeat { tx, beat, owner: beat.instance.id.to_string() }.run().await
    }
}

async fn setting(connection: &mut impl Queryable, name: &str) -> Result<u16, Trouble> {
    let value: Option<String> =
        connection.exec_first("SELECT value FROM outbox_settings WHERE name = ?", (name,)).await?;
    let number = value.and_then(|value| value.parse().ok());
    Ok(number.ok_or_else(|| Error::Broken(format!("the setting `{name}` is no number of lanes")))?)
}

/// Puts a wanted number of lanes in force if nothing stands in its way. `true` when it is in force.
async fn resize(tx: &mut Tx<'_>, now: i64) -> Result<bool, Trouble> {
    let (current, wanted) = (setting(tx, "lanes").await?, setting(tx, "lanes_wanted").await?);
    if current == wanted {
        return Ok(true);
    }
    // Whoever works on a lane counts on the number of lanes: all of them must be at rest.
    let at_rest: Vec<u16> = tx
        .exec(
            "SELECT part FROM outbox_counters WHERE part < ? ORDER BY part FOR UPDATE SKIP LOCKED",
            (SLOTS,),
        )
        .await?;
    // An open batch counts even when its owner is dead: only a relay, which knows the routes, can resolve it.
    let busy: Option<bool> = tx
        .exec_first(
            "SELECT EXISTS (SELECT 1 FROM outbox_lanes WHERE locked_until > ?) OR EXISTS (SELECT 1 FROM outbox_batches)",
            (at(now),),
        )
        .await?;
    if at_rest.len() < usize::from(SLOTS) || busy != Some(false) {
        return Ok(false);
    }
    tx.exec_drop("UPDATE outbox_settings SET value = ? WHERE name = 'lanes'", (wanted.to_string(),)).await?;
    Ok(true)
}

/// One beat, inside its transaction.
struct Heartbeat<'a> {
    tx: Tx<'a>,
    beat: &'a Beat,
    owner: String,
}

impl Heartbeat<'_> {
    async fn run(mut self) -> Result<Beaten, Trouble> {
        let now = lane::look(&mut self.tx, BTreeSet::new()).await?.now;
        let until = now.saturating_add(millis(self.beat.lease));
        let instances = self.announce(now, until).await?;
        let mut beaten = Beaten { held: self.renew(until).await?, instances, ..Beaten::default() };
        let resizing = !self.settle_size(now).await?;
        let lanes = usize::from(setting(&mut self.tx, "lanes").await?);
        let share = if resizing { 0 } else { lanes.div_ceil(instances.max(1)) };
        let most = share.saturating_sub(beaten.held.len());
        if self.beat.take && most > 0 {
            self.take(most, now, until, &mut beaten).await?;
        }
        beaten.surplus = beaten.held.len().saturating_sub(share);
        beaten.wanting = share.saturating_sub(beaten.held.len());
        commit(self.tx).await?;
        Ok(beaten)
    }

    /// Says that this instance lives, forgets those that do not, and counts.
    async fn announce(&mut self, now: i64, until: i64) -> Result<usize, Trouble> {
        self.tx
            .exec_drop(
                "INSERT INTO outbox_instances (id, name, alive_until) VALUES (?, ?, ?)
                 ON DUPLICATE KEY UPDATE alive_until = VALUES(alive_until)",
                (&self.owner, &self.beat.instance.name, at(until)),
            )
            .await?;
        // Read without a lock and removed by id: beats must not wait for each other's rows.
        let rows: Vec<Row> =
            self.tx.exec("SELECT id, alive_until < ? FROM outbox_instances ORDER BY id", (at(now),)).await?;
        let mut alive = 0;
        for mut row in rows {
            if row.flag(1)? {
                let sql = "DELETE FROM outbox_instances WHERE id = ? AND alive_until < ?";
                self.tx.exec_drop(sql, (row.text(0)?, at(now))).await?;
            } else {
                alive += 1;
            }
        }
        Ok(alive)
    }

    async fn renew(&mut self, until: i64) -> Result<Vec<Lease>, Trouble> {
        if self.beat.held.is_empty() {
            return Ok(Vec::new());
        }
        let lanes = list(self.beat.held.iter().map(|lease| lease.lane).collect::<BTreeSet<_>>());
        let sql = format!(
            "SELECT lane, epoch, lease_id FROM outbox_lanes FORCE INDEX (PRIMARY) WHERE lane IN ({lanes}) ORDER BY lane
             FOR UPDATE"
        );
        let mut current = HashMap::new();
        for mut row in self.tx.query::<Row, _>(sql).await? {
            let lane: u16 = row.small(0)?;
            current.insert(lane, (row.number(1)?, row.optional_text(2)?));
        }
        let same =
            |lease: &&Lease| current.get(&lease.lane) == Some(&(lease.epoch, Some(lease.id.to_string())));
        let held: Vec<Lease> = self.beat.held.iter().filter(same).copied().collect();
        if !held.is_empty() {
            let sql = format!(
                "UPDATE outbox_lanes FORCE INDEX (PRIMARY) SET locked_until = '{}' WHERE lane IN ({})",
                at_text(until),
                list(held.iter().map(|lease| lease.lane))
            );
            self.tx.query_drop(sql).await?;
        }
        Ok(held)
    }

    /// A change of the number of lanes waits for dead owners' batches too: this instance resolves them.
    async fn settle_size(&mut self, now: i64) -> Result<bool, Trouble> {
        if resize(&mut self.tx, now).await? {
            return Ok(true);
        }
        let sql = "SELECT DISTINCT b.lane FROM outbox_batches b JOIN outbox_lanes l ON l.lane = b.lane
                   WHERE l.locked_until <= ?";
        let abandoned: Vec<u16> = self.tx.exec(sql, (at(now),)).await?;
        // A new epoch first: the late owner must find its batch gone and its lease void.
        let abandoned = self.seize(abandoned.len(), now, Some(&abandoned)).await?;
        if abandoned.is_empty() {
            return Ok(false);
        }
        let sql = format!(
            "UPDATE outbox_lanes FORCE INDEX (PRIMARY) SET epoch = epoch + 1, {FREE} WHERE lane IN ({})",
            list(abandoned.iter().map(|(lane, _)| lane))
        );
        self.tx.query_drop(sql).await?;
        orphan(&mut self.tx, abandoned.iter().map(|(lane, _)| *lane), &*self.beat.rule).await?;
        resize(&mut self.tx, now).await
    }

    /// Locks up to `most` lanes that nobody owns and nobody is working on.
    async fn seize(
        &mut self,
        most: usize,
        now: i64,
        among: Option<&[u16]>,
    ) -> Result<Vec<(u16, i64)>, Trouble> {
        if most == 0 {
            return Ok(Vec::new());
        }
        let count = setting(&mut self.tx, "lanes").await?;
        let among = among.map(|lanes| format!(" AND l.lane IN ({})", list(lanes))).unwrap_or_default();
        let sql = format!(
            "SELECT l.lane, l.epoch FROM outbox_lanes l FORCE INDEX (PRIMARY)
             STRAIGHT_JOIN outbox_counters c FORCE INDEX (PRIMARY) ON c.part = l.lane
             WHERE l.lane < {count} AND l.locked_until <= '{}'{among} ORDER BY l.lane LIMIT {most}
             FOR UPDATE SKIP LOCKED",
            at_text(now)
        );
        let mut seized = Vec::new();
        for mut row in self.tx.query::<Row, _>(sql).await? {
            seized.push((row.small(0)?, row.number(1)?));
        }
        Ok(seized)
    }

    async fn take(&mut self, most: usize, now: i64, until: i64, beaten: &mut Beaten) -> Result<(), Trouble> {
        let free = self.seize(most, now, None).await?;
        if free.is_empty() {
            return Ok(());
        }
        let leases: Vec<Lease> = free
            .iter()
            .map(|(lane, epoch)| Lease { lane: *lane, epoch: epoch + 1, id: Uuid::new_v4() })
            .collect();
        let rows: Json = leases.iter().map(|lease| json!([lease.lane, lease.epoch, lease.id])).collect();
        let sql = include_str!("lanes/take.sql");
        self.tx.exec_drop(sql, (rows.to_string(), &self.owner, at(until))).await?;
        let lanes = leases.iter().map(|lease| lease.lane);
        (beaten.orphans, beaten.dead) = orphan(&mut self.tx, lanes, &*self.beat.rule).await?;
        beaten.held.extend(leases);
        Ok(())
    }
}

/// Closes the batches that are open under `leases`.
async fn close(tx: &mut Tx<'_>, leases: &[Lease]) -> Result<(), Trouble> {
    let place = lane::lock(tx, leases.iter().map(|lease| lease.lane)).await?;
    let standings = lane::standings(tx, place.lanes()).await?;
    let held = leases.iter().filter_map(|lease| {
        let standing = standings.get(&lease.lane).filter(|standing| standing.is_held_by(lease))?;
        Some(standing.batches.iter().map(|open| (lease.lane, open.id.clone())))
    });
    lane::close(tx, &held.flatten().collect::<Vec<_>>()).await
}

/// Resolves the batches that former owners left open on `lanes`, which are locked. Answers how many messages they had
/// and how many of them are Dead now.
async fn orphan(
    tx: &mut Tx<'_>,
    lanes: impl Iterator<Item = u16>,
    rule: &(dyn Fn(&str) -> TopicRule + Send + Sync),
) -> Result<(usize, usize), Trouble> {
    let lanes: BTreeSet<u16> = lanes.collect();
    let mut left = Vec::new();
    let mut seqs = Vec::new();
    for (lane, standing) in lane::standings(tx, &lanes).await? {
        for open in standing.batches {
            left.push((lane, open.id));
            seqs.extend(open.seqs);
        }
    }
    if left.is_empty() {
        return Ok((0, 0));
    }
    lane::close(tx, &left).await?;
    let place = lane::look(tx, left.into_iter().map(|(lane, _)| lane).collect()).await?;
    let dead = resolve(tx, &place, &seqs, rule).await?;
    Ok((seqs.len(), dead))
}

async fn resolve(
    tx: &mut Tx<'_>,
    place: &Place,
    seqs: &[i64],
    rule: &(dyn Fn(&str) -> TopicRule + Send + Sync),
) -> Result<usize, Trouble> {
    let befores = settle::befores(tx, seqs).await?;
    let mut holds = Holds::default();
    let keys = befores.values().filter_map(|before| Some((before.topic.as_str(), before.key.as_deref()?)));
    holds.load(tx, keys).await?;
    let mut moved = Tally::default();
    let mut dead = 0;
    let mut rows = Vec::with_capacity(seqs.len());
    for seq in seqs {
        // Somebody deleted the row by hand; that must not keep the lane from its new owner.
        let Some(before) = befores.get(seq) else { continue };
        let after = before.step(Event::Orphaned, &mut moved)?;
        let reason = (after.status == Status::Dead).then(|| crashes_relays(after.crashes));
        let died = reason.is_some().then(|| at_text(place.now));
        if reason.is_some() {
            dead += 1;
            match before.key.as_deref().filter(|_| rule(&before.topic).hold_dead) {
                Some(key) => holds.place(&before.topic, key, before.slot, *seq),
                None => holds.lift(&before.topic, before.key.as_deref(), *seq),
            }
        }
        rows.push(json!([seq, after.crashes, word(after.status), reason, died]));
    }
    tx.exec_drop(include_str!("settle/orphaned.sql"), (Json::from(rows).to_string(),)).await?;
    if holds.write(tx).await?.lifted {
        hold::drain(tx, place).await?;
    }
    tally::write(moved, tx, place.part()).await?;
    Ok(dead)
}
