//! From the application's transaction to the handler's effect through every broker, which is restarted meanwhile.

mod stores;

use std::path::Path;
use std::time::Duration;

use proof::scenario::{Exact, Restart, prove};
use stores::{SQLITE, on};
use testkit::servers;

async fn survives(broker: &str, away: Duration, store: &str) {
    let restart = Restart { messages: 2_000, keys: 200, broker: broker.to_owned(), away };
    let figures = prove(&restart, Path::new(env!("CARGO_BIN_EXE_proof")), store).await;
    eprintln!("{}", figures.expect("every promise is kept"));
}

#[tokio::test]
async fn a_restart_of_kafka_loses_nothing_doubles_nothing_and_keeps_every_key_in_order() {
    survives("kafka", Duration::ZERO, &servers::url("postgres")).await;
}

on! { sqlite postgres:
    async fn a_relay_that_dies_in_a_transaction_of_kafka_leaves_each_message_in_the_log_once(store: &str) {
        let exact = Exact { crashes: 1, stops: 1, keys: 100, broker: "kafka".to_owned() };
        let figures = prove(&exact, Path::new(env!("CARGO_BIN_EXE_proof")), store).await;
        eprintln!("{}", figures.expect("every promise is kept"));
    }
}

#[tokio::test]
async fn a_relay_that_dies_in_a_transaction_of_the_embedded_broker_leaves_each_message_in_the_log_once() {
    let exact = Exact { crashes: 2, stops: 1, keys: 100, broker: "embedded".to_owned() };
    let figures = prove(&exact, Path::new(env!("CARGO_BIN_EXE_proof")), "sqlite:").await;
    eprintln!("{}", figures.expect("every promise is kept"));
}

#[tokio::test]
async fn a_restart_of_rabbitmq_loses_nothing_doubles_nothing_and_keeps_every_key_in_order() {
    survives("rabbitmq", Duration::ZERO, &servers::url("mariadb")).await;
}

#[tokio::test]
async fn a_restart_of_nats_loses_nothing_doubles_nothing_and_keeps_every_key_in_order() {
    survives("nats", Duration::ZERO, "sqlite:").await;
}

#[tokio::test]
async fn a_restart_of_redis_streams_loses_nothing_doubles_nothing_and_keeps_every_key_in_order() {
    survives("redis", Duration::ZERO, &servers::url("redis")).await;
}

#[tokio::test]
async fn a_stall_of_pubsub_loses_nothing_doubles_nothing_and_keeps_every_key_in_order() {
    survives("pubsub", Duration::ZERO, "sqlite:").await;
}

#[tokio::test]
async fn a_stall_of_sqs_loses_nothing_doubles_nothing_and_keeps_every_key_in_order() {
    survives("sqs", Duration::ZERO, "sqlite:").await;
}

#[tokio::test]
async fn a_restart_of_a_webhook_loses_nothing_doubles_nothing_and_keeps_every_key_in_order() {
    survives("http", Duration::ZERO, &servers::url("postgres")).await;
}

#[tokio::test]
async fn a_broker_that_stays_away_costs_no_attempt_and_holds_up_no_other() {
    survives("nats", Duration::from_secs(15), "sqlite:").await;
}
