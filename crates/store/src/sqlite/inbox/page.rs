//! Pages of the inbox's lists: a deep one costs as much as the first.

use rusqlite::{Connection, params};

use super::super::inspect::{direction, start};
use super::super::row::{id, optional_text, text};
use crate::column::time;
use crate::{Error, Page, Paged, Processed};

/// `sql` in the direction of `page`.
pub(super) fn directed(sql: &str, page: Page) -> String {
    let (sign, order) = direction(page);
    sql.replace("{sign}", sign).replace("{order}", order)
}

pub(super) fn processed(connection: &Connection, group: &str, page: Page) -> Result<Paged<Processed>, Error> {
    let mut statement = connection.prepare_cached(&directed(include_str!("processed.sql"), page))?;
    let rows = statement.query_map(params![group, start(page), page.limit], |row| {
        Ok(Processed {
            position: row.get(0)?,
            id: id(row, 1)?,
            topic: text(row, 2)?,
            key: optional_text(row, 3)?,
            seq: row.get(4)?,
            processed_at: time(row.get(5)?),
        })
    })?;
    let items: Vec<Processed> = rows.collect::<Result<_, _>>()?;
    let next = items.last().filter(|_| items.len() == page.limit).map(|last| last.position);
    Ok(Paged { items, next })
}
