//! The checker finds whatever is wrong, on every store: what it cannot see would never be missed.

mod stores;

use std::path::Path;
use std::time::Duration;

use proof::check::check;
use proof::ground::Ground;
use proof::nemesis::Nemesis;
use stores::{SQLITE, on};

/// What it must say, and the damage in SQL and in Lua. Each is done to what the ones before it left.
const DAMAGE: [(&str, &str, &str); 6] = [
    (
        "lost 1,",
        "DELETE FROM effects WHERE customer = 'customer-0' AND n = 1",
        "redis.call('LREM', KEYS[1] .. ':shop:effects', 1, 'customer-0 1')",
    ),
    (
        "phantom 1,",
        "INSERT INTO effects (message_id, customer, n) VALUES ('x', 'customer-0', 999)",
        "redis.call('RPUSH', KEYS[1] .. ':shop:effects', 'customer-0 999')",
    ),
    (
        "disordered 1,",
        "UPDATE effects SET n = CASE n WHEN 1 THEN 2 ELSE 1 END WHERE customer = 'customer-1' AND n IN (1, 2)",
        "local list = KEYS[1] .. ':shop:effects'
         local first, second = redis.call('LPOS', list, 'customer-1 1'), redis.call('LPOS', list, 'customer-1 2')
         redis.call('LSET', list, first, 'customer-1 2')
         redis.call('LSET', list, second, 'customer-1 1')",
    ),
    (
        "doubled 1,",
        "INSERT INTO effects (message_id, customer, n)
         SELECT message_id, customer, n FROM effects WHERE customer = 'customer-2' AND n = 1",
        "redis.call('RPUSH', KEYS[1] .. ':shop:effects', 'customer-2 1')",
    ),
    (
        "unsent 1,",
        "UPDATE outbox_events SET status = 'dead' WHERE seq = (SELECT min(seq) FROM outbox_acknowledgements)",
        "redis.call('HSET', KEYS[1] .. ':m:1', 'status', 'dead')",
    ),
    (
        "unacknowledged 1,",
        "DELETE FROM outbox_acknowledgements WHERE seq = (SELECT max(seq) FROM outbox_events)",
        "redis.call('DEL', KEYS[1] .. ':acks:2')",
    ),
];

on! { sqlite postgres mariadb redis:
    async fn every_planted_corruption_is_found(store: &str) {
        let (keys, lease) = (5, Duration::from_millis(500));
        let ground = Ground::fresh(store, keys).await.expect("fresh ground");
        let found = ground.during(async |ground| {
            let program = Path::new(env!("CARGO_BIN_EXE_proof"));
            Nemesis { program, ground, keys, lease }.finish_alone(500).await?;
            for (finding, sql, lua) in DAMAGE {
                let damage = if store.starts_with("redis") { lua } else { sql };
                ground.shop().tamper(damage).await?;
                let error = check(ground).await?.verdict().expect_err(finding).to_string();
                anyhow::ensure!(error.contains(finding), "{error:?} should say {finding:?}");
            }
            Ok(())
        });
        found.await.expect("all of it is found");
    }
}
