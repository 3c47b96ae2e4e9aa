//! For applications that use `mysql_async`: marks and acknowledgements in their own transaction.

use std::time::Duration;

use message::MessageId;
use mysql_async::prelude::Queryable;
use mysql_async::{Error as Driver, Value};

use crate::column::digest;
use crate::{Arrival, Latency};

/// Marks `arrival` as done by `group` in the caller's transaction. `false`: it was done before, so do nothing.
///
/// Of two transactions that try at the same time one waits for the other, and hears `false` if that commits.
///
/// # Errors
/// What the driver says.
///
/// # Cancel safety
/// A call that is dropped may have made the mark in the transaction: roll it back.
pub async fn once(connection: &mut impl Queryable, group: &str, arrival: &Arrival) -> Result<bool, Driver> {
    let mut number: Option<i64> = connection.exec_first(include_str!("once/group.sql"), (group,)).await?;
    if number.is_none() {
        connection.exec_drop(include_str!("once/new_group.sql"), (group,)).await?;
        number = connection.exec_first(include_str!("once/made_group.sql"), (group,)).await?;
    }
    let message = &arrival.message;
    let mark: Vec<Value> = vec![
        number.into(),
        message.id.to_string().into(),
        digest(arrival).into(),
        message.topic.as_str().into(),
        message.key.as_deref().into(),
        arrival.seq.into(),
    ];
    let marked = connection.exec_iter(include_str!("once/mark.sql"), mark).await?.affected_rows() == 1;
    let counts = (number, i32::from(marked), i32::from(!marked));
    connection.exec_drop(include_str!("once/count.sql"), counts).await?;
    Ok(marked)
}

/// Acknowledges a message to its producer in the caller's transaction, when both share this database. What was
/// never sent, or asks other groups only, is left as it is.
///
/// # Errors
/// What the driver says.
///
/// # Cancel safety
/// A call that is dropped may have written the acknowledgement into the transaction: roll it back.
pub async fn acknowledge(connection: &mut impl Queryable, group: &str, id: MessageId) -> Result<(), Driver> {
    let asked = include_str!("acknowledge/asked.sql");
    let found: Option<(i64, u64)> = connection.exec_first(asked, (id.to_string(), group)).await?;
    let Some((seq, waited)) = found else { return Ok(()) };
    let written =
        connection.exec_iter(include_str!("acknowledge/one.sql"), (seq, group)).await?.affected_rows();
    if written == 1 {
        connection.exec_drop(include_str!("acknowledge/one_done.sql"), (group, seq)).await?;
        connection.query_drop(include_str!("acknowledge/count.sql")).await?;
        let bucket = Latency::bucket(Duration::from_millis(waited));
        connection.exec_drop(include_str!("acknowledge/wait.sql"), (bucket, waited)).await?;
    }
    Ok(())
}
