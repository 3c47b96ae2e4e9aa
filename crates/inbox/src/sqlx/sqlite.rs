//! Marks in transactions of SQLite.

use async_trait::async_trait;
use message::MessageId;
use sqlx::error::DatabaseError;
use sqlx::{Pool, Sqlite, SqliteConnection, Transaction};
use store::Arrival;
use store::sqlite::sqlx as marks;

use super::{Blame, Marks};

/// Result codes; the low byte of an extended one is the code.
const BUSY: u32 = 5;
const LOCKED: u32 = 6;

#[async_trait]
impl Marks for Sqlite {
    const ONE_WRITER: bool = true;

    async fn begin(pool: &Pool<Self>) -> Result<Transaction<'static, Self>, sqlx::Error> {
        // At once for writing: a transaction that reads first and writes later can fail halfway.
        pool.begin_with("BEGIN IMMEDIATE").await
    }

    async fn once(
        connection: &mut SqliteConnection,
        group: &str,
        arrival: &Arrival,
    ) -> Result<bool, sqlx::Error> {
        marks::once(connection, group, arrival).await
    }

    async fn once_all(
        connection: &mut SqliteConnection,
        group: &str,
        arrivals: &[&Arrival],
    ) -> Result<bool, sqlx::Error> {
        marks::once_all(connection, group, arrivals).await
    }

    async fn acknowledge(
        connection: &mut SqliteConnection,
        group: &str,
        id: MessageId,
    ) -> Result<(), sqlx::Error> {
        marks::acknowledge(connection, group, id).await
    }

    fn blame(error: &dyn DatabaseError) -> Blame {
        let code = error.code().and_then(|code| code.parse::<u32>().ok()).unwrap_or_default();
        if matches!(code & 0xff, BUSY | LOCKED) { Blame::Database } else { Blame::Message }
    }
}
