//! Marks in transactions of PostgreSQL.

use async_trait::async_trait;
use message::MessageId;
use sqlx::error::DatabaseError;
use sqlx::{PgConnection, Pool, Postgres, Transaction};
use store::Arrival;
use store::postgres::sqlx as marks;

use super::{Blame, Marks};

#[async_trait]
impl Marks for Postgres {
    const ONE_WRITER: bool = false;

    async fn begin(pool: &Pool<Self>) -> Result<Transaction<'static, Self>, sqlx::Error> {
        pool.begin().await
    }

    async fn once(
        connection: &mut PgConnection,
        group: &str,
        arrival: &Arrival,
    ) -> Result<bool, sqlx::Error> {
        marks::once(connection, group, arrival).await
    }

    async fn once_all(
        connection: &mut PgConnection,
        group: &str,
        arrivals: &[&Arrival],
    ) -> Result<bool, sqlx::Error> {
        marks::once_all(connection, group, arrivals).await
    }

    async fn acknowledge(
        connection: &mut PgConnection,
        group: &str,
        id: MessageId,
    ) -> Result<(), sqlx::Error> {
        marks::acknowledge(connection, group, id).await
    }

    fn blame(error: &dyn DatabaseError) -> Blame {
        let Some(code) = error.code() else { return Blame::Message };
        match code.as_ref() {
            "40001" | "40P01" | "55P03" => Blame::Others,
            // A server that cannot be written to, has no room or is going down. A statement that took too long is no sign of that.
            "57014" => Blame::Message,
            code if ["08", "25006", "53", "57", "58", "XX"].iter().any(|class| code.starts_with(class)) => {
                Blame::Database
            }
            _ => Blame::Message,
        }
    }
}
