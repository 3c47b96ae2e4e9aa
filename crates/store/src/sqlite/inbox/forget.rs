//! Forgetting what no group needs any more: ids past their time, and reservations that have ended.

use std::time::Duration;

use rusqlite::{Connection, params};

use super::super::row::now;
use super::find_group;
use crate::Error;
use crate::column::millis;

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
        left -= connection.prepare_cached(include_str!("forget.sql"))?.execute(params![
            group,
            now.saturating_sub(keep),
            left
        ])?;
        if left == 0 {
            break;
        }
    }
    Ok((FORGET - left) as u64)
}
