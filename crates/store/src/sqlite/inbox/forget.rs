//! Forgetting what no group needs any more: ids past their time, and reservations that have ended.

use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};

use super::super::row::now;
use super::find_group;
use crate::column::millis;
use crate::{Error, Remembered};

/// Rows that are removed in one transaction.
const FORGET: usize = 1_000;

/// Forgets the ids of `group` that are older than `keep`, and those of other groups by what they said last.
pub(super) fn ids(connection: &Connection, group: &str, keep: Duration) -> Result<u64, Error> {
    let now = now(connection)?;
    connection
        .prepare_cached(
            "DELETE FROM inbox_reserved WHERE (grp, id) IN
             (SELECT grp, id FROM inbox_reserved WHERE until <= ?1 LIMIT ?2)",
        )?
        .execute(params![now, FORGET])?;
    // The group may have no consumer tomorrow; whoever calls then knows how long its ids were to be kept.
    let own = find_group(connection, group)?;
    connection
        .prepare_cached("UPDATE inbox_groups SET keep_ids = ?2 WHERE grp = ?1 AND keep_ids IS NOT ?2")?
        .execute(params![own, millis(keep)])?;
    // Its own ids first.
    let groups: Vec<(i64, i64)> = connection
        .prepare_cached(
            "SELECT grp, keep_ids FROM inbox_groups WHERE keep_ids IS NOT NULL ORDER BY grp IS NOT ?1, grp",
        )?
        .query_map([own], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_, _>>()?;
    let mut left = FORGET;
    for (group, keep) in groups {
        let forgotten = connection.prepare_cached(include_str!("forget.sql"))?.execute(params![
            group,
            now.saturating_sub(keep),
            left
        ])?;
        if forgotten > 0 {
            connection
                .prepare_cached(
                    "INSERT INTO inbox_forgotten (grp, ids) VALUES (?1, ?2)
                     ON CONFLICT DO UPDATE SET ids = ids + excluded.ids",
                )?
                .execute(params![group, forgotten])?;
        }
        left -= forgotten;
        if left == 0 {
            break;
        }
    }
    Ok((FORGET - left) as u64)
}

/// What is left of what the group has done. SQLite does not know how large a table is: the newest ids speak for all.
pub(super) fn remembered(connection: &Connection, group: &str) -> Result<Remembered, Error> {
    let found = connection
        .prepare_cached(include_str!("remembered.sql"))?
        .query_row([group], |row| {
            let (ids, each): (u64, Option<f64>) = (row.get(0)?, row.get(1)?);
            Ok(Remembered { ids, bytes: Some((each.unwrap_or(0.0) * ids as f64) as u64) })
        })
        .optional()?;
    Ok(found.unwrap_or(Remembered { ids: 0, bytes: Some(0) }))
}
