//! The shop on SQLite: rusqlite, in the file of the store.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use inbox::Handler;
use rusqlite::Connection;
use store::Store;
use store::sqlite::SqliteStore;

use super::{Address, Cursor, Order, Outbox, Sale, Shop, Till, customer};

const HANDLER: &str = "INSERT INTO effects (message_id, customer, n)
                       VALUES (:id, :key, json_extract(:payload, '$.n'))";

/// See the module.
pub(super) struct SqliteShop {
    path: PathBuf,
    store: SqliteStore,
}

impl SqliteShop {
    pub(super) fn open(address: &Address) -> Result<Self> {
        let path = PathBuf::from(&address.name);
        let store = SqliteStore::open(&path).context("cannot open the store")?;
        Ok(Self { path, store })
    }

    fn connect(&self) -> rusqlite::Result<Connection> {
        connect(&self.path)
    }

    fn list(&self, sql: &str) -> Result<Vec<Order>> {
        let connection = self.connect()?;
        let mut statement = connection.prepare(sql)?;
        let orders = statement.query_map([], |row| Ok(Order { customer: row.get(0)?, n: row.get(1)? }))?;
        Ok(orders.collect::<Result<_, _>>()?)
    }
}

fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(Duration::from_secs(60))?;
    connection.pragma_update(None, "synchronous", "full")?;
    Ok(connection)
}

#[async_trait]
impl Shop for SqliteShop {
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
        let mut connection = self.connect()?;
        let transaction = connection.transaction()?;
        transaction.execute_batch(include_str!("sqlite.sql"))?;
        for number in 0..customers {
            transaction
                .prepare_cached("INSERT INTO customers (customer) VALUES (?1)")?
                .execute([customer(number)])?;
        }
        Ok(transaction.commit()?)
    }

    async fn till(&self) -> Result<Box<dyn Till>> {
        Ok(Box::new(SqliteTill(self.connect()?)))
    }

    async fn orders(&self) -> Result<Vec<Order>> {
        self.list("SELECT customer, n FROM orders")
    }

    async fn effects(&self) -> Result<Vec<Order>> {
        self.list("SELECT customer, n FROM effects ORDER BY position")
    }

    async fn outbox(&self) -> Result<Outbox> {
        let connection = self.connect()?;
        let integrity: String = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
        ensure!(integrity == "ok", "the store is damaged: {integrity}");
        let outbox = connection.query_row(include_str!("outbox.sql"), [], |row| {
            Ok(Outbox { messages: row.get(0)?, unsent: row.get(1)?, unacknowledged: row.get(2)? })
        });
        Ok(outbox?)
    }

    async fn acknowledged(&self) -> Result<Vec<Order>> {
        self.list(
            "SELECT e.key, json_extract(e.payload, '$.n') FROM outbox_events e
             JOIN outbox_acknowledgements a ON a.seq = e.seq AND a.grp = 'proof'",
        )
    }

    fn cursor(&self) -> Option<&dyn Cursor> {
        None
    }

    async fn tamper(&self, statement: &str) -> Result<()> {
        Ok(self.connect()?.execute_batch(statement)?)
    }
}

struct SqliteTill(Connection);

#[async_trait]
impl Till for SqliteTill {
    async fn sell(&mut self, sale: &Sale) -> Result<u64> {
        // By hand: rusqlite's own transaction cannot be kept across the wait.
        self.0.execute_batch("BEGIN IMMEDIATE")?;
        let orders = self.write(sale)?;
        sale.hold.wait().await?;
        self.0.execute_batch(if sale.commit { "COMMIT" } else { "ROLLBACK" })?;
        Ok(if sale.commit { orders } else { 0 })
    }
}

impl SqliteTill {
    fn write(&mut self, sale: &Sale) -> Result<u64> {
        for customer in &sale.customers {
            let n = self
                .0
                .prepare_cached("UPDATE customers SET n = n + 1 WHERE customer = ?1 RETURNING n")?
                .query_row([customer], |row| row.get(0))?;
            self.0.prepare_cached("INSERT INTO orders VALUES (?1, ?2)")?.execute((customer, n))?;
            let order = Order { customer: customer.clone(), n };
            store::sqlite::append(&self.0, &order.message()?)?;
        }
        Ok(sale.customers.len() as u64)
    }
}
