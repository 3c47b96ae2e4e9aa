//! Handlers of an application that uses sqlx: with a memory, in transactions that make the marks; without one, as anybody
//! would write it.

use anyhow::Result;
use inbox::Handler;
use inbox::sqlx::{Failure, Transactional};
use message::Message;
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};

use crate::dedup::{CONNECTIONS, EFFECT, PAY, READ, Work};

async fn pool(url: &str) -> Result<PgPool> {
    Ok(PgPoolOptions::new()
        .max_connections(CONNECTIONS as u32)
        .min_connections(CONNECTIONS as u32)
        .connect(url)
        .await?)
}

/// Each message has a transaction of its own, and nothing marks it.
pub(crate) async fn alone(url: &str, work: Work) -> Result<Handler> {
    let pool = pool(url).await?;
    Ok(Handler::closure(move |message: Message| {
        let pool = pool.clone();
        async move {
            // A single statement is a transaction.
            if work == Work::Row {
                return run(&mut *pool.acquire().await?, &message, work).await;
            }
            let mut transaction = pool.begin().await?;
            run(&mut transaction, &message, work).await?;
            Ok::<_, Failure>(transaction.commit().await?)
        }
    }))
}

/// Messages and their marks share transactions.
pub(crate) async fn transactional(url: &str, work: Work) -> Result<Handler> {
    let handler = Transactional::new(pool(url).await?, move |connection, message| {
        Box::pin(run(connection, message, work))
    });
    Ok(handler.into())
}

async fn run(connection: &mut PgConnection, message: &Message, work: Work) -> Result<(), Failure> {
    if work == Work::Balance {
        let read = sqlx::query_scalar(READ).bind(&message.key);
        let balance: i64 = read.fetch_one(&mut *connection).await?;
        sqlx::query(PAY).bind(&message.key).bind(balance - 100).execute(&mut *connection).await?;
    }
    let effect = sqlx::query(EFFECT).bind(message.id.0).bind(&message.key);
    effect.execute(connection).await?;
    Ok(())
}
