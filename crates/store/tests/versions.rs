//! Versioned updates: a stale message does not overwrite a newer one.

#![cfg(feature = "sqlite")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use rusqlite::Connection;
use store::sqlite::{SqliteStore, newer, swap};

fn open() -> (tempfile::TempDir, Connection) {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("store.db");
    SqliteStore::open(&path).unwrap();
    (folder, Connection::open(path).unwrap())
}

#[test]
fn an_older_version_is_not_newer_whatever_the_order_of_arrival() {
    let (_folder, mut application) = open();
    assert!(newer(&application, "prices", "42", 2).unwrap());
    assert!(!newer(&application, "prices", "42", 1).unwrap(), "it came late");
    assert!(!newer(&application, "prices", "42", 2).unwrap(), "it came again");
    assert!(newer(&application, "prices", "43", 1).unwrap(), "of another entity");
    assert!(newer(&application, "stock", "42", 1).unwrap(), "in another scope");
    let transaction = application.transaction().unwrap();
    assert!(newer(&transaction, "prices", "42", 3).unwrap());
    transaction.rollback().unwrap();
    assert!(newer(&application, "prices", "42", 3).unwrap(), "what was rolled back was never applied");
}

#[test]
fn a_swap_is_done_only_from_the_expected_version() {
    let (_folder, application) = open();
    assert!(!swap(&application, "prices", "42", 1, 2).unwrap(), "there is no version yet");
    assert!(swap(&application, "prices", "42", 0, 1).unwrap());
    assert!(!swap(&application, "prices", "42", 0, 2).unwrap());
    assert!(swap(&application, "prices", "42", 1, 5).unwrap());
    assert!(!swap(&application, "prices", "42", 1, 6).unwrap(), "somebody was quicker");
}
