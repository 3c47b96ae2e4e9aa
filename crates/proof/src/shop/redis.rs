//! The shop on Redis: WATCH and MULTI, with keys beside those of the store.
//!
//! A transaction of Redis is optimistic: what was read is watched, and all is written at once if nobody else wrote it.

use std::sync::Arc;
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{AsyncCommands, AsyncConnectionConfig, Client, Value, cmd, pipe};
use anyhow::{Context, Result};
use async_trait::async_trait;
use inbox::Handler;
use store::Store;
use store::redis::{Config, RedisStore, append};

use super::{Address, Cursor, Order, Outbox, Sale, Shop, Till};
use crate::worker::GROUP;

/// See the module.
pub(super) struct RedisShop {
    client: Client,
    store: RedisStore,
}

/// Removes all keys of a proof.
pub(super) async fn remove(address: &Address) -> Result<()> {
    let mut connection = connect(&Client::open(&*address.store)?).await?;
    let mut cursor = 0_u64;
    loop {
        let mut scan = cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(format!("{}:*", address.name)).arg("COUNT").arg(10_000);
        let (next, keys): (u64, Vec<String>) = scan.query_async(&mut connection).await?;
        if !keys.is_empty() {
            let () = connection.unlink(keys).await?;
        }
        if next == 0 {
            return Ok(());
        }
        cursor = next;
    }
}

impl RedisShop {
    pub(super) async fn open(address: &Address) -> Result<Self> {
        let client = Client::open(&*address.store)?;
        let config = Config { prefix: address.name.clone(), ..Config::new(&address.store) };
        Ok(Self { client, store: RedisStore::connect(config).await.context("cannot open the store")? })
    }

    fn key(&self, name: &str) -> String {
        key(self.store.prefix(), name)
    }

    async fn connect(&self) -> Result<MultiplexedConnection> {
        connect(&self.client).await
    }

    async fn list(&self, name: &str) -> Result<Vec<Order>> {
        let lines: Vec<String> = self.connect().await?.lrange(self.key(name), 0, -1).await?;
        let order = |line: &String| {
            let (customer, n) = line.split_once(' ').with_context(|| format!("`{line}` is no order"))?;
            Ok(Order { customer: customer.to_owned(), n: n.parse()? })
        };
        lines.iter().map(order).collect()
    }
}

async fn connect(client: &Client) -> Result<MultiplexedConnection> {
    // The driver gives up after half a second, and a machine that is busy with proofs may take longer.
    let patient = AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(60)));
    Ok(client.get_multiplexed_async_connection_with_config(&patient).await?)
}

fn key(prefix: &str, name: &str) -> String {
    format!("{prefix}:shop:{name}")
}

#[async_trait]
impl Shop for RedisShop {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn ring(&self) {
        self.store.ring();
    }

    fn handler(&self) -> Handler {
        let effects = self.key("effects");
        Handler::Script(format!(
            "redis.call('RPUSH', '{effects}', message.key .. ' ' .. cjson.decode(message.payload).n)"
        ))
    }

    async fn furnish(&self, _: u64) -> Result<()> {
        Ok(())
    }

    async fn till(&self) -> Result<Box<dyn Till>> {
        let prefix = self.store.prefix().to_owned();
        Ok(Box::new(RedisTill { connection: self.connect().await?, prefix }))
    }

    async fn orders(&self) -> Result<Vec<Order>> {
        self.list("orders").await
    }

    async fn effects(&self) -> Result<Vec<Order>> {
        self.list("effects").await
    }

    async fn outbox(&self) -> Result<Outbox> {
        let (mut connection, prefix) = (self.connect().await?, self.store.prefix());
        let seqs: Vec<u64> = connection.hvals(format!("{prefix}:ids")).await?;
        let (mut unsent, mut unacknowledged) = (0, 0);
        for seqs in seqs.chunks(1_000) {
            let mut look = pipe();
            for seq in seqs {
                look.hget(format!("{prefix}:m:{seq}"), "status")
                    .hexists(format!("{prefix}:acks:{seq}"), GROUP);
            }
            let found: Vec<(Option<String>, bool)> = pairs(look.query_async(&mut connection).await?)?;
            unsent += found.iter().filter(|(status, _)| status.as_deref() != Some("sent")).count() as u64;
            unacknowledged += found.iter().filter(|(_, acknowledged)| !acknowledged).count() as u64;
        }
        Ok(Outbox { messages: seqs.len() as u64, unsent, unacknowledged })
    }

    async fn acknowledged(&self) -> Result<Vec<Order>> {
        let (mut connection, prefix) = (self.connect().await?, self.store.prefix());
        let seqs: Vec<u64> = connection.hvals(format!("{prefix}:ids")).await?;
        let mut orders = Vec::new();
        for seqs in seqs.chunks(1_000) {
            let mut look = pipe();
            for seq in seqs {
                look.hexists(format!("{prefix}:acks:{seq}"), GROUP);
                look.hget(format!("{prefix}:m:{seq}"), "key").get(format!("{prefix}:b:{seq}"));
            }
            let found: Vec<Value> = look.query_async(&mut connection).await?;
            for three in found.chunks(3) {
                let [acknowledged, customer, payload] = three else { continue };
                if ::redis::from_redis_value(acknowledged.clone())? {
                    let customer = ::redis::from_redis_value(customer.clone())?;
                    let payload: Vec<u8> = ::redis::from_redis_value(payload.clone())?;
                    let payload: serde_json::Value = serde_json::from_slice(&payload)?;
                    orders
                        .push(Order { customer, n: payload["n"].as_u64().context("an order has a number")? });
                }
            }
        }
        Ok(orders)
    }

    fn cursor(&self) -> Option<&dyn Cursor> {
        None
    }

    async fn tamper(&self, statement: &str) -> Result<()> {
        let mut connection = self.connect().await?;
        let mut eval = cmd("EVAL");
        Ok(eval.arg(statement).arg(1).arg(self.store.prefix()).exec_async(&mut connection).await?)
    }
}

/// Two answers for each message.
fn pairs(answers: Vec<Value>) -> Result<Vec<(Option<String>, bool)>> {
    let mut answers = answers.into_iter();
    let mut pairs = Vec::new();
    while let (Some(status), Some(acknowledged)) = (answers.next(), answers.next()) {
        pairs.push((::redis::from_redis_value(status)?, ::redis::from_redis_value(acknowledged)?));
    }
    Ok(pairs)
}

struct RedisTill {
    connection: MultiplexedConnection,
    prefix: String,
}

#[async_trait]
impl Till for RedisTill {
    async fn sell(&mut self, sale: &Sale) -> Result<u64> {
        let mut customers = sale.customers.clone();
        customers.sort_unstable();
        let counters: Vec<String> =
            customers.iter().map(|customer| key(&self.prefix, &format!("n:{customer}"))).collect();
        cmd("WATCH").arg(&counters).exec_async(&mut self.connection).await?;
        let before: Vec<Option<u64>> = cmd("MGET").arg(&counters).query_async(&mut self.connection).await?;

        let mut transaction = pipe();
        transaction.atomic();
        let mut last: Option<Order> = None;
        for ((customer, counter), before) in customers.into_iter().zip(&counters).zip(before) {
            let again = last.filter(|last| last.customer == customer).map(|last| last.n);
            let order = Order { customer, n: again.or(before).unwrap_or_default() + 1 };
            transaction.set(counter, order.n).ignore();
            transaction
                .rpush(key(&self.prefix, "orders"), format!("{} {}", order.customer, order.n))
                .ignore();
            append(&mut transaction, &self.prefix, &order.message()?)?;
            last = Some(order);
        }
        sale.hold.wait().await?;
        if !sale.commit {
            cmd("UNWATCH").exec_async(&mut self.connection).await?;
            return Ok(0);
        }
        // Nothing was written if another till has served one of them meanwhile.
        let done: Option<Value> = transaction.query_async(&mut self.connection).await?;
        Ok(if done.is_some() { sale.customers.len() as u64 } else { 0 })
    }
}
