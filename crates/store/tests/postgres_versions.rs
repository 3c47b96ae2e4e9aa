//! Versioned updates on PostgreSQL: a stale message does not overwrite a newer one.

#![cfg(feature = "postgres")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod postgres_server;

use postgres_server::Database;
use store::postgres::{Config, PostgresStore, newer, swap};

#[tokio::test]
async fn an_older_version_is_not_newer_and_a_swap_needs_the_expected_one() {
    let database = Database::fresh().await;
    PostgresStore::connect(Config::new(database.url())).await.unwrap();
    let mut application = database.application().await;
    assert!(newer(&application, "prices", "42", 2).await.unwrap());
    assert!(!newer(&application, "prices", "42", 1).await.unwrap(), "it came late");
    assert!(!newer(&application, "prices", "42", 2).await.unwrap(), "it came again");
    assert!(newer(&application, "stock", "42", 1).await.unwrap(), "in another scope");
    let transaction = application.transaction().await.unwrap();
    assert!(newer(&transaction, "prices", "42", 3).await.unwrap());
    transaction.rollback().await.unwrap();
    assert!(newer(&application, "prices", "42", 3).await.unwrap(), "what was rolled back was never applied");

    assert!(!swap(&application, "prices", "43", 1, 2).await.unwrap(), "there is no version yet");
    assert!(swap(&application, "prices", "43", 0, 1).await.unwrap());
    assert!(!swap(&application, "prices", "43", 0, 2).await.unwrap());
    assert!(swap(&application, "prices", "43", 1, 5).await.unwrap());
    assert!(!swap(&application, "prices", "43", 1, 6).await.unwrap(), "somebody was quicker");
}
