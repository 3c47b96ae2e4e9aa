//! The inbox's lists and counts: a deep page costs as much as the first.

use mysql_async::Row;
use mysql_async::prelude::Queryable;

use super::super::error::Trouble;
use super::super::inspect::{direction, start};
use super::super::row::{MESSAGE_COLUMNS, Read};
use crate::column::time;
use crate::{Arrival, InboxCounts, Page, Paged, Parked, Processed, Remembered};

/// `sql` in the direction of `page`.
fn directed(sql: &str, page: Page) -> String {
    let (sign, order) = direction(page);
    sql.replace("{sign}", sign).replace("{order}", order)
}

pub(super) async fn processed(
    connection: &mut impl Queryable,
    group: &str,
    page: Page,
) -> Result<Paged<Processed>, Trouble> {
    let sql = directed(include_str!("processed.sql"), page);
    let mut items = Vec::new();
    for mut row in connection.exec::<Row, _, _>(sql, (group, start(page), page.limit)).await? {
        items.push(Processed {
            position: row.number(0)?,
            id: row.id(1)?,
            topic: row.text(2)?,
            key: row.optional_text(3)?,
            seq: row.optional_number(4)?,
            processed_at: time(row.millis(5)?),
        });
    }
    let next = items.last().filter(|_| items.len() == page.limit).map(|last| last.position);
    Ok(Paged { items, next })
}

pub(super) async fn parked(
    connection: &mut impl Queryable,
    group: &str,
    page: Page,
) -> Result<Paged<Parked>, Trouble> {
    const EXTRA: usize = MESSAGE_COLUMNS + 2;
    let sql = directed(include_str!("list.sql"), page);
    let mut items = Vec::new();
    let mut last = None;
    for mut row in connection.exec::<Row, _, _>(sql, (group, start(page), page.limit)).await? {
        last = Some(row.number(EXTRA + 4)?);
        items.push(Parked {
            group: group.to_owned(),
            attempts: row.small(EXTRA)?,
            next_attempt_at: row.optional_time(EXTRA + 1)?,
            dead: row.flag(EXTRA + 2)?,
            error: row.text(EXTRA + 3)?,
            arrival: arrival(row)?,
        });
    }
    let next = last.filter(|_| items.len() == page.limit);
    Ok(Paged { items, next })
}

pub(super) async fn due(
    connection: &mut impl Queryable,
    group: &str,
    limit: usize,
) -> Result<Vec<Arrival>, Trouble> {
    let rows: Vec<Row> = connection.exec(include_str!("due.sql"), (group, limit)).await?;
    rows.into_iter().map(arrival).collect()
}

fn arrival(mut row: Row) -> Result<Arrival, Trouble> {
    Ok(Arrival {
        seq: row.optional_number(MESSAGE_COLUMNS)?,
        delivery: row.small(MESSAGE_COLUMNS + 1)?,
        message: row.message()?,
    })
}

pub(super) async fn counts(connection: &mut impl Queryable, group: &str) -> Result<InboxCounts, Trouble> {
    let row: Option<Row> = connection
        .exec_first(
            "SELECT cast(coalesce(sum(processed), 0) AS SIGNED), cast(coalesce(sum(duplicates), 0) AS SIGNED),
                    cast(coalesce(sum(parked), 0) AS SIGNED), cast(coalesce(sum(dead), 0) AS SIGNED)
             FROM inbox_counters WHERE grp = (SELECT grp FROM inbox_groups WHERE name = ?)",
            (group,),
        )
        .await?;
    let Some(mut row) = row else { return Ok(InboxCounts::default()) };
    Ok(InboxCounts {
        processed: row.small(0)?,
        duplicates: row.small(1)?,
        parked: row.small(2)?,
        dead: row.small(3)?,
    })
}

pub(super) async fn remembered(connection: &mut impl Queryable, group: &str) -> Result<Remembered, Trouble> {
    let row: Option<Row> = connection.exec_first(include_str!("remembered.sql"), (group,)).await?;
    let Some(mut row) = row else { return Ok(Remembered::default()) };
    let (ids, all): (u64, u64) = (row.small(0)?, row.small(1)?);
    let table = row.optional_number(2)?.and_then(|bytes| u64::try_from(bytes).ok());
    let part = |table: u64| (table as f64 * ids as f64 / all.max(1) as f64) as u64;
    Ok(Remembered { ids, bytes: table.map(part) })
}
