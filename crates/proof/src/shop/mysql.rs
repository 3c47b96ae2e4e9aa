//! The shop on MySQL or MariaDB: mysql_async, in the database of the store.

use std::sync::Arc;

use anyhow::{Context, Result};
use async_trait::async_trait;
use inbox::Handler;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, IsolationLevel, TxOpts};
use store::mysql::{Config, MysqlStore, append};
use store::{Seq, Store};

use super::{Address, Cursor, Order, Outbox, Sale, Shop, Till, customer};

const HANDLER: &str = "INSERT INTO effects (message_id, customer, n)
                       VALUES (:id, :key, json_value(convert(:payload USING utf8mb4), '$.n'))";

/// See the module.
pub(super) struct MysqlShop {
    url: String,
    store: MysqlStore,
}

pub(super) async fn create(address: &Address) -> Result<()> {
    let mut connection = connect(&address.store).await?;
    Ok(connection.query_drop(format!("CREATE DATABASE {} CHARACTER SET utf8mb4", address.name)).await?)
}

pub(super) async fn remove(address: &Address) -> Result<()> {
    let mut connection = connect(&address.store).await?;
    Ok(connection.query_drop(format!("DROP DATABASE {}", address.name)).await?)
}

async fn connect(url: &str) -> Result<Conn> {
    let url = url.replacen("mariadb:", "mysql:", 1);
    Conn::from_url(url).await.context("cannot reach MySQL")
}

impl MysqlShop {
    pub(super) async fn open(address: &Address) -> Result<Self> {
        let url = address.url();
        let store = MysqlStore::connect(Config::new(&url)).await.context("cannot open the store")?;
        Ok(Self { url, store })
    }

    async fn connect(&self) -> Result<Conn> {
        connect(&self.url).await
    }

    async fn list(&self, sql: &str) -> Result<Vec<Order>> {
        let order = |(customer, n)| Order { customer, n };
        Ok(self.connect().await?.query_map(sql, order).await?)
    }
}

#[async_trait]
impl Shop for MysqlShop {
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
        let mut connection = self.connect().await?;
        for statement in include_str!("mysql.sql").split(';').map(str::trim).filter(|sql| !sql.is_empty()) {
            connection.query_drop(statement).await?;
        }
        let names: Vec<_> = (0..customers).map(|number| (customer(number),)).collect();
        Ok(connection.exec_batch("INSERT INTO customers (customer) VALUES (?)", names).await?)
    }

    async fn till(&self) -> Result<Box<dyn Till>> {
        Ok(Box::new(MysqlTill(self.connect().await?)))
    }

    async fn orders(&self) -> Result<Vec<Order>> {
        self.list("SELECT customer, n FROM orders").await
    }

    async fn effects(&self) -> Result<Vec<Order>> {
        self.list("SELECT customer, n FROM effects ORDER BY position").await
    }

    async fn outbox(&self) -> Result<Outbox> {
        let counts: Option<(u64, u64, u64)> =
            self.connect().await?.query_first(include_str!("outbox.sql")).await?;
        let (messages, unsent, unacknowledged) = counts.context("a count has a row")?;
        Ok(Outbox { messages, unsent, unacknowledged })
    }

    async fn acknowledged(&self) -> Result<Vec<Order>> {
        self.list(
            "SELECT e.`key`, CAST(JSON_VALUE(e.payload, '$.n') AS UNSIGNED) FROM outbox_events e
             JOIN outbox_acknowledgements a ON a.seq = e.seq AND a.grp = 'proof'",
        )
        .await
    }

    fn cursor(&self) -> Option<&dyn Cursor> {
        Some(self)
    }

    async fn tamper(&self, statement: &str) -> Result<()> {
        Ok(self.connect().await?.query_drop(statement).await?)
    }
}

#[async_trait]
impl Cursor for MysqlShop {
    async fn after(&self, last: Seq) -> Result<Vec<Seq>> {
        let sql = "SELECT seq FROM outbox_events WHERE seq > ? ORDER BY seq";
        Ok(self.connect().await?.exec(sql, (last,)).await?)
    }
}

struct MysqlTill(Conn);

#[async_trait]
impl Till for MysqlTill {
    async fn sell(&mut self, sale: &Sale) -> Result<u64> {
        let mut options = TxOpts::new();
        options.with_isolation_level(IsolationLevel::ReadCommitted);
        let mut transaction = self.0.start_transaction(options).await?;
        let mut orders = 0;
        for customer in &sale.customers {
            let free = "SELECT n + 1 FROM customers WHERE customer = ? FOR UPDATE SKIP LOCKED";
            let Some(n): Option<u64> = transaction.exec_first(free, (customer,)).await? else { continue };
            transaction.exec_drop("UPDATE customers SET n = ? WHERE customer = ?", (n, customer)).await?;
            transaction.exec_drop("INSERT INTO orders VALUES (?, ?)", (customer, n)).await?;
            let order = Order { customer: customer.clone(), n };
            append(&mut transaction, &order.message()?).await?;
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
