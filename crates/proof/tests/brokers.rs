//! From the application's transaction to the handler's effect through every broker, which is restarted meanwhile.

mod stores;

use std::path::Path;
use std::time::Duration;

use proof::scenario::{Exact, Handle, Once, Restart, Scenario, prove};
use stores::{SQLITE, on};
use testkit::servers;

async fn holds(scenario: impl Scenario, store: &str) {
    let figures = prove(&scenario, Path::new(env!("CARGO_BIN_EXE_proof")), store).await;
    eprintln!("{}", figures.expect("every promise is kept"));
}

async fn survives(broker: &str, away: Duration, store: &str) {
    let restart = Restart { messages: 2_000, keys: 200, broker: broker.to_owned(), away };
    holds(restart, store).await;
}

fn exact(crashes: u32, broker: &str, fault: bool) -> Exact {
    Exact { crashes, stops: u32::from(!fault), keys: 100, broker: broker.to_owned(), fault }
}

/// A relay that is killed, on a line to Kafka that is cut again and again.
fn cut(fault: bool) -> Once {
    let life = Duration::from_millis(1_200);
    Once { messages: u64::MAX, keys: 200, kills: 8, life, broker: "kafka".to_owned(), fault }
}

#[tokio::test]
async fn a_restart_of_kafka_loses_nothing_doubles_nothing_and_keeps_every_key_in_order() {
    survives("kafka", Duration::ZERO, &servers::url("postgres")).await;
}

on! { sqlite postgres:
    async fn a_relay_that_dies_in_a_transaction_of_kafka_leaves_each_message_in_the_log_once(store: &str) {
        holds(exact(1, "kafka", false), store).await;
    }
}

#[tokio::test]
async fn a_relay_that_dies_in_a_transaction_of_the_embedded_broker_leaves_each_message_in_the_log_once() {
    holds(exact(2, "embedded", false), SQLITE).await;
}

#[tokio::test]
async fn a_relay_that_dies_leaves_each_message_in_a_stream_of_nats_once_while_nats_remembers_and_not_after() {
    holds(exact(2, "nats", false), SQLITE).await;
    holds(exact(1, "nats", true), SQLITE).await;
}

#[tokio::test]
async fn a_relay_that_dies_leaves_each_message_in_streams_of_redis_once_while_redis_remembers_and_not_after()
{
    holds(exact(2, "redis", false), SQLITE).await;
    holds(exact(1, "redis", true), SQLITE).await;
}

#[tokio::test]
async fn a_relay_that_promises_at_most_once_sends_nothing_twice_when_it_is_killed_and_kafkas_answers_are_lost()
 {
    holds(cut(false), SQLITE).await;
}

#[tokio::test]
async fn a_client_of_kafka_that_tries_again_by_itself_is_caught() {
    holds(cut(true), SQLITE).await;
}

#[tokio::test]
async fn a_consumer_that_dies_between_any_two_steps_acknowledges_by_a_topic_what_is_done_and_nothing_else() {
    holds(Handle { crashes: 1, keys: 100, acknowledge: "topic".to_owned() }, SQLITE).await;
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
