//! For applications that use diesel: an insert that their own connection executes, in their own transaction.
//!
//! ```no_run
//! # fn example(connection: &mut impl diesel::connection::LoadConnection<Backend = diesel::mysql::Mysql>) -> diesel::QueryResult<()> {
//! use diesel::RunQueryDsl;
//! use message::Message;
//!
//! let message = Message::new("order-events", "{}").key("42");
//! store::mysql::diesel::append(&message).execute(connection)?;
//! # Ok(()) }
//! ```
//!
//! `diesel_async` executes the same value with its own `RunQueryDsl`.

use diesel::mysql::Mysql;
use diesel::query_builder::{BoxedSqlQuery, SqlQuery};
use diesel::sql_types::{Binary, Nullable, Text};
use message::Message;

use super::row::at_text;
use crate::NewMessage;
use crate::column::{groups_json, headers_json};

/// An insert of one message.
pub type Insert = BoxedSqlQuery<'static, Mysql, SqlQuery>;

/// The insert of `message`: it exists if and when the transaction that executes this commits. A message whose id is
/// taken violates `outbox_id`.
pub fn append(message: &Message) -> Insert {
    append_for(&NewMessage::from(message.clone()))
}

/// Like [`append`], naming the groups that must acknowledge. `once` is not looked at: the caller's own
/// transaction decides whether it writes.
pub fn append_for(new: &NewMessage) -> Insert {
    let message = &new.message;
    diesel::sql_query(include_str!("append.sql"))
        .into_boxed()
        .bind::<Text, _>(message.id.to_string())
        .bind::<Text, _>(message.topic.clone())
        .bind::<Nullable<Text>, _>(message.kind.clone())
        .bind::<Nullable<Text>, _>(message.key.clone())
        .bind::<Binary, _>(message.payload.to_vec())
        .bind::<Text, _>(message.content_type.clone())
        .bind::<Text, _>(headers_json(message))
        .bind::<Text, _>(at_text(message.occurred_at.timestamp_millis()))
        .bind::<Nullable<Text>, _>(new.ack_groups.as_deref().map(groups_json))
}
