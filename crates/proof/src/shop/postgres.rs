//! The shop on PostgreSQL: tokio-postgres, in the database of the store.

use std::sync::Arc;

use anyhow::{Context, Result};
use async_trait::async_trait;
use inbox::Handler;
use store::postgres::{Config, PostgresStore, append};
use store::{Seq, Store};
use tokio_postgres::{Client, NoTls, Statement};

use super::{Address, Cursor, Order, Outbox, Sale, Shop, Till, customer};

const HANDLER: &str = "INSERT INTO effects (message_id, customer, n)
                       VALUES (:id, :key, (convert_from(:payload, 'UTF8')::jsonb ->> 'n')::bigint)";

/// See the module.
pub(super) struct PostgresShop {
    url: String,
    store: PostgresStore,
    reader: Client,
}

pub(super) async fn create(address: &Address) -> Result<()> {
    let client = connect(&address.store).await?;
    Ok(client.batch_execute(&format!("CREATE DATABASE {}", address.name)).await?)
}

pub(super) async fn remove(address: &Address) -> Result<()> {
    let client = connect(&address.store).await?;
    Ok(client.batch_execute(&format!("DROP DATABASE {} WITH (FORCE)", address.name)).await?)
}

async fn connect(url: &str) -> Result<Client> {
    let (client, connection) =
        tokio_postgres::connect(url, NoTls).await.context("cannot reach PostgreSQL")?;
    // It ends with the client; what went wrong is told to whoever asks the client.
    tokio::spawn(connection);
    Ok(client)
}

impl PostgresShop {
    pub(super) async fn open(address: &Address) -> Result<Self> {
        let url = address.url();
        let store = PostgresStore::connect(Config::new(&url)).await.context("cannot open the store")?;
        Ok(Self { reader: connect(&url).await?, url, store })
    }

    async fn list(&self, sql: &str) -> Result<Vec<Order>> {
        let rows = self.reader.query(sql, &[]).await?;
        rows.iter().map(|row| Ok(Order { customer: row.try_get(0)?, n: number(row.try_get(1)?)? })).collect()
    }
}

fn number(column: i64) -> Result<u64> {
    Ok(u64::try_from(column)?)
}

#[async_trait]
impl Shop for PostgresShop {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn ring(&self) {
        self.store.ring();
    }

    fn handler(&self) -> Handler {
        Handler::Sql(HANDLER.to_owned())
    }

    async fn furnish(&self, customers: u64) -> Result<()> {
        self.reader.batch_execute(include_str!("postgres.sql")).await?;
        let names: Vec<_> = (0..customers).map(customer).collect();
        self.reader.execute("INSERT INTO customers SELECT unnest($1::text[])", &[&names]).await?;
        Ok(())
    }

    async fn till(&self) -> Result<Box<dyn Till>> {
        let client = connect(&self.url).await?;
        let free = "SELECT n + 1 FROM customers WHERE customer = $1 FOR UPDATE SKIP LOCKED";
        Ok(Box::new(PostgresTill {
            free: client.prepare(free).await?,
            count: client.prepare("UPDATE customers SET n = $2 WHERE customer = $1").await?,
            order: client.prepare("INSERT INTO orders VALUES ($1, $2)").await?,
            client,
        }))
    }

    async fn orders(&self) -> Result<Vec<Order>> {
        self.list("SELECT customer, n FROM orders").await
    }

    async fn effects(&self) -> Result<Vec<Order>> {
        self.list("SELECT customer, n FROM effects ORDER BY position").await
    }

    async fn outbox(&self) -> Result<Outbox> {
        let row = self.reader.query_one(include_str!("outbox.sql"), &[]).await?;
        Ok(Outbox {
            messages: number(row.try_get(0)?)?,
            unsent: number(row.try_get(1)?)?,
            unacknowledged: number(row.try_get(2)?)?,
        })
    }

    async fn acknowledged(&self) -> Result<Vec<Order>> {
        self.list(
            "SELECT e.key, (convert_from(e.payload, 'UTF8')::json ->> 'n')::bigint FROM outbox_events e
             JOIN outbox_acknowledgements a ON a.seq = e.seq AND a.grp = 'proof'",
        )
        .await
    }

    fn cursor(&self) -> Option<&dyn Cursor> {
        Some(self)
    }

    async fn tamper(&self, statement: &str) -> Result<()> {
        Ok(self.reader.batch_execute(statement).await?)
    }
}

#[async_trait]
impl Cursor for PostgresShop {
    async fn after(&self, last: Seq) -> Result<Vec<Seq>> {
        let rows =
            self.reader.query("SELECT seq FROM outbox_events WHERE seq > $1 ORDER BY seq", &[&last]).await?;
        rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
    }
}

struct PostgresTill {
    client: Client,
    free: Statement,
    count: Statement,
    order: Statement,
}

#[async_trait]
impl Till for PostgresTill {
    async fn sell(&mut self, sale: &Sale) -> Result<u64> {
        let transaction = self.client.transaction().await?;
        let mut orders = 0;
        for customer in &sale.customers {
            let Some(row) = transaction.query_opt(&self.free, &[customer]).await? else { continue };
            let n: i64 = row.try_get(0)?;
            transaction.execute(&self.count, &[customer, &n]).await?;
            transaction.execute(&self.order, &[customer, &n]).await?;
            let order = Order { customer: customer.clone(), n: number(n)? };
            append(&transaction, &order.message()?).await?;
            orders += 1;
        }
        sale.hold.wait().await?;
        if sale.commit {
            transaction.commit().await?;
            return Ok(orders);
        }
        transaction.rollback().await?;
        Ok(0)
    }
}
