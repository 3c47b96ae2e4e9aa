//! How the members of a group divide its partitions: one transaction that renews, notices the dead, and takes.
//!
//! Nobody takes a partition from a living member. Members that ask for the same topics share their partitions
//! as evenly as whole numbers allow; who has more than its share is told so, and gives some up when it is
//! done with them. Every share is fixed by the members alone, and together they are all the partitions, so
//! each partition finds an owner.

use std::collections::{BTreeMap, HashMap};

use rusqlite::{Connection, params};

/// A generation that no group ever has: with it a member looks again.
pub(super) const UNKNOWN: i64 = -1;

/// What a member asks for when it renews.
#[derive(Clone, Debug)]
pub(super) struct Renewal {
    pub(super) group: i64,
    /// `None` until it is registered.
    pub(super) member: Option<i64>,
    pub(super) topics: Vec<String>,
    pub(super) presence: String,
    pub(super) lease_ms: i64,
    /// The generation of the group at the last look.
    pub(super) generation: i64,
    /// Partitions that it is done with, and their epochs.
    pub(super) released: Vec<(u32, i64)>,
    /// Presences of processes that have ended.
    pub(super) dead: Vec<String>,
}

/// What it is told.
#[derive(Clone, Debug)]
pub(super) struct Renewed {
    pub(super) member: i64,
    pub(super) generation: i64,
    /// `None`: as before.
    pub(super) shares: Option<Vec<Share>>,
}

/// The partitions that this member holds among members that ask for the same topics.
#[derive(Clone, Debug)]
pub(super) struct Share {
    pub(super) held: Vec<Partition>,
    /// How many it should hold. It may hold more until it is done with them.
    pub(super) fair: usize,
}

/// A partition in this member's hands.
#[derive(Clone, Debug)]
pub(super) struct Partition {
    pub(super) id: u32,
    pub(super) topic: String,
    pub(super) epoch: i64,
    pub(super) committed: i64,
}

/// The partitions that the same members may take.
#[derive(Default)]
struct Circle {
    partitions: usize,
    /// By the member that looks.
    held: Vec<Partition>,
    free: Vec<Partition>,
}

/// Makes the group known and remembers what it asks for, so that nothing of it is removed before it is read.
pub(super) fn subscribe(c: &Connection, group: &str, topics: &[String]) -> Result<i64, sqlite::Error> {
    c.execute("INSERT INTO broker_groups (name) VALUES (?1) ON CONFLICT DO NOTHING", [group])?;
    let id = c.query_row("SELECT id FROM broker_groups WHERE name = ?1", [group], |row| row.get(0))?;
    for topic in topics {
        c.execute(
            "INSERT INTO broker_subscriptions (group_id, topic) VALUES (?1, ?2) ON CONFLICT DO NOTHING",
            (id, topic),
        )?;
    }
    Ok(id)
}

/// Renews the lease; if anything has changed in the group, works out the shares and takes what is free.
pub(super) fn renew(c: &Connection, renewal: &Renewal) -> Result<Renewed, sqlite::Error> {
    let group = renewal.group;
    let mut changed = release(c, group, renewal.member, &renewal.released)?;
    let member = match renewal.member {
        Some(member) if extend(c, member, renewal.lease_ms)? => member,
        _ => {
            changed = true;
            register(c, renewal)?
        }
    };
    changed |= bury(c, group, &renewal.dead)?;
    if changed {
        c.prepare_cached("UPDATE broker_groups SET generation = generation + 1 WHERE id = ?1")?
            .execute([group])?;
    }
    let generation = c
        .prepare_cached("SELECT generation FROM broker_groups WHERE id = ?1")?
        .query_row([group], |row| row.get(0))?;
    let shares = if changed || generation != renewal.generation {
        c.prepare_cached(include_str!("discover.sql"))?.execute([group])?;
        Some(divide(c, group, member)?)
    } else {
        None
    };
    Ok(Renewed { member, generation, shares })
}

/// Leaves the group: its partitions are free at once.
pub(super) fn leave(c: &Connection, group: i64, member: i64) -> Result<(), sqlite::Error> {
    c.execute("DELETE FROM broker_members WHERE id = ?1", [member])?;
    free(c, group)?;
    c.execute("UPDATE broker_groups SET generation = generation + 1 WHERE id = ?1", [group])?;
    Ok(())
}

fn release(
    c: &Connection,
    group: i64,
    member: Option<i64>,
    released: &[(u32, i64)],
) -> Result<bool, sqlite::Error> {
    let mut any = false;
    for (partition, epoch) in released {
        any |= c
            .prepare_cached(
                "UPDATE broker_offsets SET member = NULL
                 WHERE group_id = ?1 AND partition = ?2 AND member = ?3 AND epoch = ?4",
            )?
            .execute(params![group, partition, member, epoch])?
            > 0;
    }
    Ok(any)
}

/// Whether the member is still known. One that was silent too long but was not missed may go on.
fn extend(c: &Connection, member: i64, lease_ms: i64) -> Result<bool, sqlite::Error> {
    let renewed = c
        .prepare_cached(
            "UPDATE broker_members SET locked_until = CAST(unixepoch('subsec') * 1000 AS INTEGER) + ?2
             WHERE id = ?1",
        )?
        .execute((member, lease_ms))?;
    Ok(renewed > 0)
}

fn register(c: &Connection, renewal: &Renewal) -> Result<i64, sqlite::Error> {
    let member = c.query_row(
        "INSERT INTO broker_members (group_id, presence, locked_until)
         VALUES (?1, ?2, CAST(unixepoch('subsec') * 1000 AS INTEGER) + ?3) RETURNING id",
        params![renewal.group, renewal.presence, renewal.lease_ms],
        |row| row.get(0),
    )?;
    for topic in &renewal.topics {
        c.execute("INSERT INTO broker_interests (member, topic) VALUES (?1, ?2)", params![member, topic])?;
    }
    Ok(member)
}

/// Removes members whose lease is over or whose process has ended. Says whether any was of this group.
fn bury(c: &Connection, group: i64, dead: &[String]) -> Result<bool, sqlite::Error> {
    let mut gone = c
        .prepare_cached(
            "DELETE FROM broker_members
             WHERE group_id = ?1 AND locked_until <= CAST(unixepoch('subsec') * 1000 AS INTEGER)",
        )?
        .execute([group])?;
    for presence in dead {
        // In every group, because the file that tells of it is removed after this transaction.
        let mut bury =
            c.prepare_cached("DELETE FROM broker_members WHERE presence = ?1 RETURNING group_id")?;
        let groups = bury.query_map([presence], |row| row.get(0))?.collect::<Result<Vec<i64>, _>>()?;
        gone += groups.len();
        for other in groups.into_iter().filter(|other| *other != group) {
            free(c, other)?;
            c.execute("UPDATE broker_groups SET generation = generation + 1 WHERE id = ?1", [other])?;
        }
    }
    if gone > 0 {
        free(c, group)?;
    }
    Ok(gone > 0)
}

/// Partitions of members that are gone belong to nobody.
fn free(c: &Connection, group: i64) -> Result<(), sqlite::Error> {
    c.execute(
        "UPDATE broker_offsets SET member = NULL
         WHERE group_id = ?1 AND member IS NOT NULL AND member NOT IN (SELECT id FROM broker_members)",
        [group],
    )?;
    Ok(())
}

/// Works out this member's shares and takes what is free and due to it.
fn divide(c: &Connection, group: i64, member: i64) -> Result<Vec<Share>, sqlite::Error> {
    let mut interested: HashMap<String, Vec<i64>> = HashMap::new();
    let mut members = c.prepare_cached(
        "SELECT i.topic, m.id FROM broker_members m JOIN broker_interests i ON i.member = m.id
         WHERE m.group_id = ?1 ORDER BY m.id",
    )?;
    let mut rows = members.query([group])?;
    while let Some(row) = rows.next()? {
        interested.entry(row.get(0)?).or_default().push(row.get(1)?);
    }

    // Partitions that the same members may take are divided together; a count over all of them at once could
    // fill a member up with what others could have taken and leave without an owner what only it can take.
    let mut circles: BTreeMap<&[i64], Circle> = BTreeMap::new();
    let mut partitions = c.prepare_cached(
        "SELECT o.partition, t.name, o.epoch, o.committed, o.member
         FROM broker_offsets o
         JOIN broker_partitions p ON p.id = o.partition
         JOIN broker_topics t ON t.id = p.topic
         WHERE o.group_id = ?1 ORDER BY o.partition",
    )?;
    let mut rows = partitions.query([group])?;
    while let Some(row) = rows.next()? {
        let topic: String = row.get(1)?;
        let Some(circle) = interested.get(&topic).filter(|circle| circle.contains(&member)) else { continue };
        let partition = Partition { id: row.get(0)?, topic, epoch: row.get(2)?, committed: row.get(3)? };
        let circle = circles.entry(circle).or_default();
        circle.partitions += 1;
        match row.get::<_, Option<i64>>(4)? {
            Some(owner) if owner == member => circle.held.push(partition),
            Some(_) => {}
            None => circle.free.push(partition),
        }
    }

    let mut shares = Vec::with_capacity(circles.len());
    for (members, Circle { mut held, free, partitions }) in circles {
        let rank = members.iter().position(|other| *other == member).unwrap_or(members.len());
        let fair = fair(partitions, members.len(), rank);
        for mut partition in free.into_iter().take(fair.saturating_sub(held.len())) {
            partition.epoch = c
                .prepare_cached(
                    "UPDATE broker_offsets SET member = ?3, epoch = epoch + 1
                     WHERE group_id = ?1 AND partition = ?2 RETURNING epoch",
                )?
                .query_row((group, partition.id, member), |row| row.get(0))?;
            held.push(partition);
        }
        shares.push(Share { held, fair });
    }
    Ok(shares)
}

/// The share of the member of this rank: the first few get one more when it does not come out even.
fn fair(partitions: usize, members: usize, rank: usize) -> usize {
    partitions / members + usize::from(rank < partitions % members)
}

#[cfg(test)]
mod tests {
    use super::fair;

    #[test]
    fn shares_are_even_and_together_they_are_everything() {
        for partitions in 0..40 {
            for members in 1..20 {
                let shares: Vec<_> = (0..members).map(|rank| fair(partitions, members, rank)).collect();
                assert_eq!(shares.iter().sum::<usize>(), partitions);
                assert!(shares.iter().max().expect("one") - shares.iter().min().expect("one") <= 1);
            }
        }
    }
}
