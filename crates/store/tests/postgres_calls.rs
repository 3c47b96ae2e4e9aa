//! Large calls of an inbox on PostgreSQL: many transactions, side by side and one after another.

#![cfg(feature = "postgres")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod postgres_server;

use std::time::Duration;

use message::Message;
use store::{Arrival, Inbox, InboxRules, Receipt, Work};

use postgres_server::{Database, number};

#[tokio::test]
async fn a_call_with_more_keys_than_a_server_has_locks_for_is_done() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let rules = InboxRules { ordered: true, ..InboxRules::default() };
    let application = database.application().await;
    let room = "SELECT current_setting('max_locks_per_transaction')::bigint
                       * (current_setting('max_connections')::bigint + 100)";
    let keys = usize::try_from(number(&application, room).await).unwrap() * 2;
    let arrival = |key: usize| {
        let message = Message::new("orders", "1").key(key.to_string());
        Arrival { message, seq: None, delivery: 0 }
    };
    let arrivals: Vec<Arrival> = (0..keys).map(arrival).collect();
    let receipts = store.process("billing", arrivals, &Work::Mark, &rules).await.unwrap();
    assert_eq!(receipts, vec![Receipt::Done; keys]);
}

#[tokio::test]
async fn a_large_call_is_done_side_by_side_with_each_key_in_order_and_each_receipt_in_its_place() {
    let database = Database::fresh().await;
    let store = database.open().await;
    let application = database.application().await;
    // Whoever writes a row says in which process of the server.
    application
        .batch_execute(
            "CREATE TABLE done (position bigserial, key text, number bigint CHECK (number <> 2000),
                                process int DEFAULT pg_backend_pid())",
        )
        .await
        .unwrap();
    let work = Work::Sql("INSERT INTO done (key, number) VALUES (:key, :payload)".to_owned());
    let arrivals: Vec<Arrival> = (0..4_000)
        .map(|number| {
            let message = Message::new("orders", number.to_string()).key((number % 97).to_string());
            Arrival { message, seq: Some(number), delivery: 0 }
        })
        .collect();
    let rules = InboxRules::default();
    let process = || store.process("billing", arrivals.clone(), &work, &rules);
    let receipts = process().await.unwrap();
    for (number, receipt) in receipts.iter().enumerate() {
        let waits = number >= 2_000 && number % 97 == 2_000 % 97;
        assert_eq!(matches!(receipt, Receipt::Parked { .. }), waits, "{number}: {receipt:?}");
        assert_eq!(*receipt == Receipt::Done, !waits, "{number}: {receipt:?}");
    }
    let disordered = "SELECT count(*) FROM done a JOIN done b ON a.key = b.key AND a.position < b.position
                      WHERE a.number >= b.number";
    assert_eq!(number(&application, disordered).await, 0);
    assert_eq!(number(&application, "SELECT count(DISTINCT process) FROM done").await, 4);
    let again = process().await.unwrap();
    for (first, second) in receipts.iter().zip(again) {
        assert_eq!(*first == Receipt::Done, second == Receipt::Duplicate, "{first:?}, then {second:?}");
    }
}

#[tokio::test]
async fn a_busy_message_holds_its_key_through_all_transactions_of_a_call() {
    let database = Database::fresh().await;
    let (store, rules) = (database.open().await, InboxRules::default());
    let arrival = |key: usize| {
        let message = Message::new("orders", "1").key(key.to_string());
        Arrival { message, seq: None, delivery: 0 }
    };
    let first = arrival(0);
    store.reserve("billing", vec![first.clone()], Duration::from_secs(3_600), &rules).await.unwrap();
    // More keys than one transaction has, whichever share they are in.
    let mut call = vec![first];
    call.extend((1..4_010).map(arrival));
    call.push(arrival(0));
    let receipts = store.process("billing", call, &Work::Mark, &rules).await.unwrap();
    let busy: Vec<usize> = (0..receipts.len()).filter(|place| receipts[*place] == Receipt::Busy).collect();
    assert_eq!(busy, [0, 4_010]);
}
