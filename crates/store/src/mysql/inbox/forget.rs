//! Forgetting what no group needs any more: ids past their time, and reservations that have ended.

use std::collections::BTreeSet;
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Row, Value};

use super::super::error::Trouble;
use super::super::row::{Read, at, list};
use super::super::session::commit;
use super::super::{MysqlStore, lane};
use super::find_group;
use crate::column::millis;

/// Rows that are removed in one transaction.
const FORGET: usize = 1_000;

/// Forgets the ids of `group` that are older than `keep`, and those of other groups by what they said last.
pub(super) async fn ids(store: &MysqlStore, group: &str, keep: Duration) -> Result<u64, Trouble> {
    let mut tx = store.begin().await?;
    let now = lane::look(&mut tx, BTreeSet::new()).await?.now;
    // Found first and removed by name: a DELETE that looks for rows itself would wait for those in use.
    let sql = format!("SELECT grp, id FROM inbox_reserved WHERE until <= ? LIMIT {FORGET}");
    let ended: Vec<Row> = tx.exec(sql, (at(now),)).await?;
    for mut row in ended {
        let values: Vec<Value> = vec![row.number(0)?.into(), row.text(1)?.into(), at(now)];
        tx.exec_drop("DELETE FROM inbox_reserved WHERE grp = ? AND id = ? AND until <= ?", values).await?;
    }
    // The group may have no consumer tomorrow; whoever calls then knows how long its ids were to be kept.
    let own = find_group(&mut tx, group).await?;
    let sql =
        "SELECT grp, keep_ids FROM inbox_groups WHERE keep_ids IS NOT NULL OR grp = ? ORDER BY grp <> ?, grp";
    let groups: Vec<(i64, Option<i64>)> = tx.exec(sql, (own, own)).await?;
    let keep = millis(keep);
    if let Some(own) = own
        && !groups.contains(&(own, Some(keep)))
    {
        tx.exec_drop("UPDATE inbox_groups SET keep_ids = ? WHERE grp = ?", (keep, own)).await?;
    }
    let mut left = FORGET;
    for (number, kept) in groups {
        // Its own ids first.
        let kept = if Some(number) == own { keep } else { kept.unwrap_or(i64::MAX) };
        let sql = format!(
            "SELECT position FROM (SELECT position, processed_at FROM inbox_ids FORCE INDEX (inbox_ids_group)
                                   WHERE grp = ? ORDER BY position LIMIT {left}) old
             WHERE processed_at < ?"
        );
        let old: Vec<i64> = tx.exec(sql, (number, at(now.saturating_sub(kept)))).await?;
        if !old.is_empty() {
            left -= old.len();
            let sql = "DELETE i FROM inbox_ids i FORCE INDEX (PRIMARY) WHERE i.position IN";
            tx.query_drop(format!("{sql} ({})", list(old))).await?;
            // Another process may have removed some of them meanwhile, and counted them.
            let sql = "INSERT INTO inbox_forgotten (grp, ids) VALUES (?, ?) ON DUPLICATE KEY UPDATE ids = ids + VALUES(ids)";
            let forgotten = tx.affected_rows();
            tx.exec_drop(sql, (number, forgotten)).await?;
        }
        if left == 0 {
            break;
        }
    }
    commit(tx).await?;
    Ok((FORGET - left) as u64)
}
