//! Leases of lanes, on a connection of their own.
//!
//! Whoever locks several lanes does it in their order. A heartbeat waits for the lanes it holds, which nobody locks for
//! long, and steps over others that somebody is at: they are not free, or will be there for the next beat.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::PostgresStore;
use super::connection::{Transaction, repeat};
use super::error::Trouble;
use super::row::{after, lane, limit, small};
use super::settle::{BEFORE, Changes};
use crate::column::SLOTS;
use crate::{Beat, Beaten, Error, Instance, LaneView, Lanes, Lease, Left, TopicRule};

#[async_trait]
impl Lanes for PostgresStore {
    async fn beat(&self, beat: &Beat) -> Result<Beaten, Error> {
        repeat(|| self.beat_once(beat)).await
    }

    async fn release(&self, leases: &[Lease], left: Left) -> Result<(), Error> {
        repeat(|| self.release_once(leases, left)).await
    }

    async fn leave(&self, instance: &Instance) -> Result<(), Error> {
        self.execute(
            "WITH gone AS (DELETE FROM outbox_instances WHERE id = $1)
             UPDATE outbox_lanes SET owner = NULL, lease_id = NULL, locked_until = 'epoch'
             WHERE lane IN (SELECT lane FROM outbox_lanes WHERE owner = $1 ORDER BY lane FOR UPDATE)",
            &[(&instance.id, Type::UUID)],
        )
        .await
        .map(drop)
    }

    async fn lanes(&self) -> Result<Vec<LaneView>, Error> {
        let rows = self.read(include_str!("lanes.sql"), &[]).await?;
        let view = |row: &tokio_postgres::Row| {
            Ok(LaneView {
                lane: lane(row, 0)?,
                epoch: row.try_get(1)?,
                owner: row.try_get(2)?,
                locked_until: row.try_get(3)?,
                in_flight: u64::try_from(row.try_get::<_, i64>(4)?).unwrap_or(0),
            })
        };
        Ok(rows.iter().map(view).collect::<Result<_, Trouble>>()?)
    }

    async fn set_lanes(&self, wanted: u16) -> Result<bool, Error> {
        if !wanted.is_power_of_two() || wanted > SLOTS {
            return Err(Error::Refused(format!(
                "{wanted} lanes are not possible: choose a power of two from 1 to {SLOTS}"
            )));
        }
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let result = async {
                tx.begin().await?;
                tx.execute(
                    "UPDATE outbox_settings SET value = $1 WHERE name = 'lanes_wanted'",
                    &[(&wanted.to_string(), Type::TEXT)],
                )
                .await?;
                let now = now(&tx).await?;
                Ok(Size::lock(&tx).await?.resize(&tx, now).await?.is_settled())
            }
            .await;
            tx.end(result).await
        })
        .await
    }
}

async fn now(tx: &Transaction) -> Result<DateTime<Utc>, Trouble> {
    Ok(tx.one("SELECT clock_timestamp()", &[]).await?.try_get(0)?)
}

/// How many lanes there are, and how many there are to be.
#[derive(Clone, Copy, Debug)]
struct Size {
    lanes: u16,
    wanted: u16,
}

impl Size {
    /// Reads it, and keeps it as it is until the transaction ends: nobody takes a lane that is about to go.
    async fn lock(tx: &Transaction) -> Result<Self, Trouble> {
        let size = Self::read(tx, "").await?;
        let lock = if size.is_settled() { "FOR SHARE" } else { "FOR UPDATE" };
        Self::read(tx, lock).await
    }

    async fn read(tx: &Transaction, lock: &str) -> Result<Self, Trouble> {
        let sql = format!(
            "SELECT name = 'lanes', value::smallint FROM outbox_settings WHERE name IN ('lanes', 'lanes_wanted') ORDER BY name {lock}"
        );
        let mut size = Self { lanes: 1, wanted: 1 };
        for row in tx.query(&sql, &[]).await? {
            let number = lane(&row, 1)?;
            if row.try_get(0)? { size.lanes = number } else { size.wanted = number }
        }
        Ok(size)
    }

    fn is_settled(self) -> bool {
        self.lanes == self.wanted
    }

    /// Puts the wanted number in force if nothing stands in its way.
    async fn resize(self, tx: &Transaction, now: DateTime<Utc>) -> Result<Self, Trouble> {
        if self.is_settled() {
            return Ok(self);
        }
        // An open batch counts even when its owner is dead: only a relay, which knows the routes, can resolve it.
        let busy = tx
            .one(
                "SELECT EXISTS (SELECT 1 FROM outbox_lanes WHERE locked_until > $1) OR EXISTS (SELECT 1 FROM outbox_open_batches)",
                &[(&now, Type::TIMESTAMPTZ)],
            )
            .await?;
        if busy.try_get(0)? {
            return Ok(self);
        }
        tx.execute(
            "UPDATE outbox_settings SET value = $1 WHERE name = 'lanes'",
            &[(&self.wanted.to_string(), Type::TEXT)],
        )
        .await?;
        Ok(Self { lanes: self.wanted, ..self })
    }
}

impl PostgresStore {
    async fn beat_once(&self, beat: &Beat) -> Result<Beaten, Trouble> {
        let tx = self.connections.heartbeat().await?;
        let result = Heartbeat { store: self, tx: &tx, beat }.run().await;
        tx.end(result).await
    }

    async fn release_once(&self, leases: &[Lease], left: Left) -> Result<(), Trouble> {
        let lanes: Vec<i16> = leases.iter().map(|lease| small(lease.lane)).collect();
        let epochs: Vec<i64> = leases.iter().map(|lease| lease.epoch).collect();
        let ids: Vec<Uuid> = leases.iter().map(|lease| lease.id).collect();
        let tx = self.connections.transaction().await?;
        let result = async {
            let asked: [(&(dyn ToSql + Sync), Type); 3] =
                [(&lanes, Type::INT2_ARRAY), (&epochs, Type::INT8_ARRAY), (&ids, Type::UUID_ARRAY)];
            let (begun, freed) =
                tokio::join!(biased; tx.begin(), tx.query(include_str!("release.sql"), &asked));
            begun?;
            let freed: Vec<i16> = freed?.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
            if left == Left::Untouched && !freed.is_empty() {
                close(&tx, &freed).await?;
            }
            Ok(())
        };
        let result = result.await;
        tx.end(result).await
    }
}

/// One beat, inside its transaction.
struct Heartbeat<'a> {
    store: &'a PostgresStore,
    tx: &'a Transaction,
    beat: &'a Beat,
}

impl Heartbeat<'_> {
    async fn run(&self) -> Result<Beaten, Trouble> {
        let (begun, held) = tokio::join!(biased; self.tx.begin(), self.lock_held());
        begun?;
        held?;
        let now = now(self.tx).await?;
        let until = after(now, self.beat.lease);
        let instances = self.show(now, until).await?;
        let mut beaten = Beaten { held: self.renew(until).await?, instances, ..Beaten::default() };
        let size = self.settle_size(now).await?;
        let share = if size.is_settled() { usize::from(size.lanes).div_ceil(instances.max(1)) } else { 0 };
        let most = share.saturating_sub(beaten.held.len());
        if self.beat.take && most > 0 {
            self.take(size, most, now, until, &mut beaten).await?;
        }
        beaten.surplus = beaten.held.len().saturating_sub(share);
        beaten.wanting = share.saturating_sub(beaten.held.len());
        Ok(beaten)
    }

    async fn lock_held(&self) -> Result<(), Trouble> {
        let lanes: Vec<i16> = self.beat.held.iter().map(|lease| small(lease.lane)).collect();
        super::claim::lock(self.tx, &lanes).await.map(drop)
    }

    /// Shows that this instance lives, and removes those that do not. Answers how many do.
    async fn show(&self, now: DateTime<Utc>, until: DateTime<Utc>) -> Result<usize, Trouble> {
        let instance = &self.beat.instance;
        self.tx
            .execute(
                "INSERT INTO outbox_instances (id, name, alive_until) VALUES ($1, $2, $3)
                 ON CONFLICT (id) DO UPDATE SET alive_until = excluded.alive_until",
                &[(&instance.id, Type::UUID), (&instance.name, Type::TEXT), (&until, Type::TIMESTAMPTZ)],
            )
            .await?;
        self.tx
            .execute(
                "DELETE FROM outbox_instances WHERE id IN
                 (SELECT id FROM outbox_instances WHERE alive_until < $1 FOR UPDATE SKIP LOCKED)",
                &[(&now, Type::TIMESTAMPTZ)],
            )
            .await?;
        let row = self
            .tx
            .one(
                "SELECT count(*) FROM outbox_instances WHERE alive_until >= $1",
                &[(&now, Type::TIMESTAMPTZ)],
            )
            .await?;
        Ok(usize::try_from(row.try_get::<_, i64>(0)?).unwrap_or(0))
    }

    /// Renews what still stands, and writes down how far its batches are settled: the row is written anyway.
    async fn renew(&self, until: DateTime<Utc>) -> Result<Vec<Lease>, Trouble> {
        let held = &self.beat.held;
        if held.is_empty() {
            return Ok(Vec::new());
        }
        let lanes: Vec<i16> = held.iter().map(|lease| small(lease.lane)).collect();
        let epochs: Vec<i64> = held.iter().map(|lease| lease.epoch).collect();
        let ids: Vec<Uuid> = held.iter().map(|lease| lease.id).collect();
        let settled: Vec<i64> = held.iter().map(|lease| self.store.marks.settled(lease.lane)).collect();
        let rows = self
            .tx
            .query(
                "UPDATE outbox_lanes l SET locked_until = $5, settled_to = greatest(l.settled_to, h.settled)
                 FROM unnest($1::smallint[], $2::bigint[], $3::uuid[], $4::bigint[]) AS h(lane, epoch, id, settled)
                 WHERE l.lane = h.lane AND l.epoch = h.epoch AND l.lease_id = h.id
                 RETURNING l.lane, l.epoch, l.lease_id",
                &[
                    (&lanes, Type::INT2_ARRAY),
                    (&epochs, Type::INT8_ARRAY),
                    (&ids, Type::UUID_ARRAY),
                    (&settled, Type::INT8_ARRAY),
                    (&until, Type::TIMESTAMPTZ),
                ],
            )
            .await?;
        let mut renewed = Vec::with_capacity(rows.len());
        for row in &rows {
            renewed.push(Lease { lane: lane(row, 0)?, epoch: row.try_get(1)?, id: row.try_get(2)? });
        }
        Ok(held.iter().filter(|lease| renewed.contains(lease)).copied().collect())
    }

    /// A change of the number of lanes waits for dead owners' batches too: this instance resolves them.
    async fn settle_size(&self, now: DateTime<Utc>) -> Result<Size, Trouble> {
        let size = Size::lock(self.tx).await?.resize(self.tx, now).await?;
        if size.is_settled() {
            return Ok(size);
        }
        // A new epoch first: the late owner must find its batch gone and its lease void.
        let rows = self
            .tx
            .query(
                "UPDATE outbox_lanes SET epoch = epoch + 1, owner = NULL, lease_id = NULL, locked_until = 'epoch'
                 WHERE lane IN (SELECT l.lane FROM outbox_lanes l WHERE l.locked_until <= $1
                                AND EXISTS (SELECT 1 FROM outbox_batches b WHERE b.lane = l.lane AND b.position > l.settled_to)
                                ORDER BY l.lane FOR UPDATE SKIP LOCKED)
                 RETURNING lane",
                &[(&now, Type::TIMESTAMPTZ)],
            )
            .await?;
        if rows.is_empty() {
            return Ok(size);
        }
        let abandoned: Vec<i16> = rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
        orphan(self.tx, self.store, &abandoned, &*self.beat.rule, now).await?;
        size.resize(self.tx, now).await
    }

    async fn take(
        &self,
        size: Size,
        most: usize,
        now: DateTime<Utc>,
        until: DateTime<Utc>,
        beaten: &mut Beaten,
    ) -> Result<(), Trouble> {
        let rows = self
            .tx
            .query(
                include_str!("take.sql"),
                &[
                    (&small(size.lanes), Type::INT2),
                    (&now, Type::TIMESTAMPTZ),
                    (&limit(most), Type::INT8),
                    (&self.beat.instance.id, Type::UUID),
                    (&until, Type::TIMESTAMPTZ),
                ],
            )
            .await?;
        if rows.is_empty() {
            return Ok(());
        }
        let mut taken = Vec::with_capacity(rows.len());
        for row in &rows {
            taken.push(Lease { lane: lane(row, 0)?, epoch: row.try_get(1)?, id: row.try_get(2)? });
        }
        taken.sort_unstable_by_key(|lease| lease.lane);
        let lanes: Vec<i16> = taken.iter().map(|lease| small(lease.lane)).collect();
        let (orphans, dead) = orphan(self.tx, self.store, &lanes, &*self.beat.rule, now).await?;
        beaten.orphans += orphans;
        beaten.dead += dead;
        beaten.held.extend(taken);
        Ok(())
    }
}

/// Closes the batches that are open on `lanes`, which are locked: a statement of its own, to see what whoever had the lock
/// before has done. Answers their messages.
async fn close(tx: &Transaction, lanes: &[i16]) -> Result<Vec<i64>, Trouble> {
    let rows = tx
        .query(
            "DELETE FROM outbox_batches WHERE position = ANY (ARRAY(SELECT position FROM outbox_open_batches WHERE lane = ANY ($1)))
             RETURNING seqs",
            &[(&lanes, Type::INT2_ARRAY)],
        )
        .await?;
    let mut seqs: Vec<i64> = Vec::new();
    for row in &rows {
        seqs.extend(row.try_get::<_, Vec<i64>>(0)?);
    }
    Ok(seqs)
}

/// Resolves the batches that former owners left open on `lanes`, which are locked. Answers how many messages they had
/// and how many of them are Dead now.
async fn orphan(
    tx: &Transaction,
    store: &PostgresStore,
    lanes: &[i16],
    rule: &(dyn Fn(&str) -> TopicRule + Send + Sync),
    now: DateTime<Utc>,
) -> Result<(usize, usize), Trouble> {
    let seqs = close(tx, lanes).await?;
    if seqs.is_empty() {
        return Ok((0, 0));
    }
    let mut changes = Changes::new(now);
    changes.read(&tx.query(BEFORE, &[(&seqs, Type::INT8_ARRAY)]).await?)?;
    let mut dead = 0;
    for seq in &seqs {
        dead += usize::from(changes.orphan(*seq, rule)?);
    }
    changes.write(tx, store.sent).await?;
    Ok((seqs.len(), dead))
}
