//! A shop takes an order and its warehouse packs it, once, whatever crashes in between.
#![allow(clippy::print_stdout, reason = "it tells a person what happened")]

use std::sync::Arc;

use postrider::embedded::{Broker, Config};
use postrider::{Consumer, Group, InboxRules, Message, Relay, Route, Settings, SqliteStore, Transactional};
use sqlx::SqlitePool;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The outbox lives in the application's own database, beside its tables.
    let folder = tempfile::tempdir()?;
    let store = Arc::new(SqliteStore::open(folder.path().join("shop.db"))?);
    let broker = Arc::new(Broker::open(Config::new(folder.path().join("broker.db")))?);
    let pool = SqlitePool::connect(&format!("sqlite://{}", store.path().display())).await?;
    sqlx::query("CREATE TABLE orders (item TEXT)").execute(&pool).await?;
    sqlx::query("CREATE TABLE parcels (content TEXT)").execute(&pool).await?;

    // The order and the message about it are one transaction: both or neither.
    let message = Message::new("order-events", r#"{"item": "tea"}"#).key("order-7").kind("OrderPlaced");
    let mut transaction = pool.begin().await?;
    sqlx::query("INSERT INTO orders VALUES ('tea')").execute(&mut *transaction).await?;
    postrider::sqlite::sqlx::append(&mut transaction, &message).await?;
    transaction.commit().await?;
    println!("ordered: {}", message.id);

    // A relay carries what was written to the broker.
    let groups = Arc::new(|_: &str| vec!["warehouse".to_owned()]);
    let route = Route::new("default", &["*"], broker.clone());
    let relay = Relay::start(store.clone(), vec![route], Settings { groups, ..Settings::default() });

    // The warehouse packs in one transaction with the mark that says that it has.
    let (packed, mut parcels) = tokio::sync::mpsc::unbounded_channel();
    let pack = Transactional::new(pool.clone(), move |connection, message| {
        let packed = packed.clone();
        Box::pin(async move {
            let insert = sqlx::query("INSERT INTO parcels SELECT json_extract(?, '$.item')");
            insert.bind(std::str::from_utf8(&message.payload)?).execute(connection).await?;
            packed.send(message.id)?;
            Ok(())
        })
    });
    let group = Group::new("warehouse", store, pack.into(), InboxRules::default());
    let consumer = Consumer::new(Arc::new(group), broker, vec!["order-events".to_owned()]).start();

    println!("packed:  {}", parcels.recv().await.ok_or("the consumer ended")?);
    consumer.drain().await;
    relay.drain().await;
    let (content,): (String,) = sqlx::query_as("SELECT content FROM parcels").fetch_one(&pool).await?;
    println!("parcel:  {content}");
    Ok(())
}
