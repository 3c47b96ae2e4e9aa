//! Marks in transactions of MySQL and MariaDB.

use async_trait::async_trait;
use message::MessageId;
use sqlx::error::DatabaseError;
use sqlx::mysql::MySqlDatabaseError;
use sqlx::{MySql, MySqlConnection, Pool, Transaction};
use store::Arrival;
use store::mysql::sqlx as marks;

use super::{Blame, Marks};

/// Codes of the server.
const CONNECTIONS: u16 = 1040;
const GOING_DOWN: u16 = 1053;
const LOCK_WAIT: u16 = 1205;
const DEADLOCK: u16 = 1213;
const READ_ONLY: u16 = 1290;
const DISK_FULL: u16 = 1021;

#[async_trait]
impl Marks for MySql {
    const ONE_WRITER: bool = false;

    async fn begin(pool: &Pool<Self>) -> Result<Transaction<'static, Self>, sqlx::Error> {
        pool.begin().await
    }

    async fn once(
        connection: &mut MySqlConnection,
        group: &str,
        arrival: &Arrival,
    ) -> Result<bool, sqlx::Error> {
        marks::once(connection, group, arrival).await
    }

    async fn once_all(
        connection: &mut MySqlConnection,
        group: &str,
        arrivals: &[&Arrival],
    ) -> Result<bool, sqlx::Error> {
        marks::once_all(connection, group, arrivals).await
    }

    async fn acknowledge(
        connection: &mut MySqlConnection,
        group: &str,
        id: MessageId,
    ) -> Result<(), sqlx::Error> {
        marks::acknowledge(connection, group, id).await
    }

    fn blame(error: &dyn DatabaseError) -> Blame {
        match error.downcast_ref::<MySqlDatabaseError>().number() {
            LOCK_WAIT | DEADLOCK => Blame::Others,
            CONNECTIONS | GOING_DOWN | READ_ONLY | DISK_FULL => Blame::Database,
            _ => Blame::Message,
        }
    }
}
