//! How a store on MySQL comes to be: what is connected to, what is refused, and the schema, step by step.

#![cfg(feature = "mysql")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod mysql_database;

use std::sync::Arc;

use message::Message;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use store::mysql::{Config, MIGRATIONS, MysqlStore};
use store::{Append, Arrival, Inbox, InboxRules, Receipt, Work};

use mysql_database::Database;

async fn open(database: &Database) -> Arc<MysqlStore> {
    Arc::new(MysqlStore::connect(Config::new(database.url())).await.unwrap())
}

async fn number(connection: &mut Conn, sql: &str) -> i64 {
    connection.query_first(sql).await.unwrap().unwrap()
}

#[tokio::test]
async fn two_processes_may_migrate_at_once() {
    let database = Database::fresh().await;
    assert_eq!(store::mysql::pending(&database.url()).await.unwrap().len(), MIGRATIONS.len());
    let refused =
        MysqlStore::connect(Config { migrate: false, ..Config::new(database.url()) }).await.unwrap_err();
    assert!(refused.to_string().contains("postrider migrate"), "{refused}");
    let run = |url: String| tokio::spawn(async move { store::mysql::migrate(&url).await.unwrap().len() });
    let (first, second) = (run(database.url()), run(database.url()));
    assert_eq!(first.await.unwrap() + second.await.unwrap(), MIGRATIONS.len());
    assert!(store::mysql::pending(&database.url()).await.unwrap().is_empty());
    MysqlStore::connect(Config { migrate: false, ..Config::new(database.url()) }).await.unwrap();

    let mut application = database.application().await;
    application
        .query_drop("INSERT INTO postrider_migrations (version, name) VALUES (99, 'later')")
        .await
        .unwrap();
    let newer = MysqlStore::connect(Config::new(database.url())).await.unwrap_err();
    assert!(newer.to_string().contains("99"), "{newer}");
}

#[tokio::test]
async fn a_migration_that_stopped_in_its_middle_is_run_again() {
    let database = Database::fresh().await;
    let mut application = database.application().await;
    let half: String = MIGRATIONS[0].sql.split_inclusive(";\n").take(4).collect();
    application.query_drop(half).await.unwrap();
    let store = open(&database).await;
    store.append(vec![Message::new("orders", "1").into()]).await.unwrap();
    assert_eq!(number(&mut application, "SELECT count(*) FROM outbox_lanes").await, 1_024);
}

#[tokio::test]
async fn what_was_parked_before_a_migration_holds_its_key_after_it() {
    let database = Database::fresh().await;
    let steps: String = MIGRATIONS[..4].iter().map(|step| step.sql).collect();
    database.run_script(&steps);
    database.run_script(
        "CREATE TABLE postrider_migrations (version INT UNSIGNED NOT NULL PRIMARY KEY, name VARCHAR(64) NOT NULL,
                                            applied_at DATETIME(3) NOT NULL DEFAULT (utc_timestamp(3)));
         INSERT INTO postrider_migrations (version, name) VALUES (1, 'x'), (2, 'x'), (3, 'x'), (4, 'x');
         INSERT INTO inbox_groups (name) VALUES ('billing');
         INSERT INTO inbox_parked (grp, id, digest, topic, `key`, payload, content_type, headers, occurred_at,
                                   delivery, attempts, dead, error)
         SELECT grp, uuid(), 'x', 'orders', 'ä', '{}', 'text/plain', '{}', utc_timestamp(3), 0, 1, 1, 'no way'
         FROM inbox_groups;",
    );
    open(&database).await;
    // As if the step had stopped before it was written down.
    let mut application = database.application().await;
    application.query_drop("DELETE FROM postrider_migrations WHERE version = 5").await.unwrap();
    let store = open(&database).await;
    let arrival =
        |key: &str| Arrival { message: Message::new("orders", "1").key(key), seq: None, delivery: 0 };
    let arrivals = vec![arrival("ä"), arrival("a")];
    let receipts = store.process("billing", arrivals, &Work::Mark, &InboxRules::default()).await.unwrap();
    assert!(matches!(receipts[..], [Receipt::Parked { .. }, Receipt::Done]), "{receipts:?}");
}

/// A way to the server of `database` that hangs up on the first `times` who call.
async fn rude(database: &Database, times: usize) -> String {
    let options = mysql_async::Opts::from_url(&database.url()).unwrap();
    let server = (options.ip_or_hostname().to_owned(), options.tcp_port());
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = database.url().replacen(
        &format!("{}:{}", server.0, server.1),
        &listener.local_addr().unwrap().to_string(),
        1,
    );
    tokio::spawn(async move {
        for call in 0.. {
            let (mut caller, _) = listener.accept().await.unwrap();
            if call >= times {
                let mut server = tokio::net::TcpStream::connect(server.clone()).await.unwrap();
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut caller, &mut server).await });
            }
        }
    });
    url
}

#[tokio::test]
async fn a_connection_that_breaks_while_the_store_is_opened_is_made_again() {
    let database = Database::fresh().await;
    let store = MysqlStore::connect(Config::new(rude(&database, 2).await)).await.unwrap();
    store.append(vec![Message::new("orders", "1").into()]).await.unwrap();
    assert!(store::mysql::pending(&rude(&database, 2).await).await.unwrap().is_empty());
    assert!(store::mysql::migrate(&rude(&database, 2).await).await.unwrap().is_empty());

    let error = MysqlStore::connect(Config::new(rude(&database, usize::MAX).await)).await.unwrap_err();
    assert!(error.is_transient(), "somebody may try later: {error}");
}

#[tokio::test]
async fn the_schema_for_other_tools_is_the_one_that_migrations_make() {
    let (migrated, by_hand) = (Database::fresh().await, Database::fresh().await);
    open(&migrated).await;
    by_hand.run_script(&store::mysql::schema());
    assert!(
        store::mysql::pending(&by_hand.url()).await.unwrap().is_empty(),
        "it says of itself that it is there"
    );
    let shape = async |database: &Database| {
        let mut application = database.application().await;
        application.query_drop("SET SESSION group_concat_max_len = 10000").await.unwrap();
        let lines: Vec<String> = application.query(include_str!("mysql_shape.sql")).await.unwrap();
        lines.join("\n")
    };
    let found = shape(&migrated).await;
    assert_eq!(found, shape(&by_hand).await);
    let expected = include_str!("mysql_shape.txt").trim_end();
    assert!(
        found == expected,
        "the schema has drifted from tests/mysql_shape.txt; if that is meant, add a migration and write:\n{found}"
    );
}

#[tokio::test]
async fn a_table_that_was_converted_is_refused_with_the_remedy() {
    let database = Database::fresh().await;
    open(&database).await;
    let mut application = database.application().await;
    application.query_drop("ALTER TABLE outbox_holds ENGINE = MyISAM, DROP PRIMARY KEY").await.unwrap();
    let error = MysqlStore::connect(Config::new(database.url())).await.unwrap_err().to_string();
    assert!(error.contains("holds") && error.contains("InnoDB") && error.contains("ALTER TABLE"), "{error}");
}

#[tokio::test]
async fn a_server_that_is_not_there_is_unavailable_and_no_password_is_told() {
    let config = Config { migrate: false, ..Config::new("mysql://ann:hush@127.0.0.1:1/db") };
    assert!(!format!("{config:?}").contains("hush"));
    let error = MysqlStore::connect(config).await.unwrap_err();
    assert!(error.is_transient() && !error.to_string().contains("hush"), "{error}");
    let database = Database::fresh().await;
    let safe = format!("{}?require_ssl=true", database.url());
    let error = MysqlStore::connect(Config::new(safe)).await.unwrap_err();
    assert!(!error.is_transient(), "this server has no certificate: {error}");
    let wrong = database.url().replacen("root@", "nobody:hush@", 1);
    let error = MysqlStore::connect(Config::new(wrong)).await.unwrap_err();
    assert!(!error.is_transient() && !error.to_string().contains("hush"), "{error}");
}

#[tokio::test]
async fn a_user_who_may_not_make_functions_has_all_else() {
    let database = Database::fresh().await;
    let user = format!("t{}", &uuid::Uuid::new_v4().simple().to_string()[..16]);
    let mut administrator = database.application().await;
    administrator.query_drop(format!("CREATE USER {user}@'%' IDENTIFIED BY 'hush'")).await.unwrap();
    let grants = "SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, INDEX, CREATE VIEW";
    let url = database.url();
    let (_, name) = url.rsplit_once('/').unwrap();
    administrator.query_drop(format!("GRANT {grants} ON {name}.* TO {user}@'%'")).await.unwrap();
    let url = database.url_as(&user, "hush");
    let written = async {
        MysqlStore::connect(Config::new(url)).await?.append(vec![Message::new("orders", "1").into()]).await
    };
    let written = written.await;
    administrator.query_drop(format!("DROP USER {user}@'%'")).await.unwrap();
    assert!(written.unwrap()[0].is_ok());
    let functions = "SELECT count(*) FROM information_schema.routines WHERE routine_schema = database()";
    assert_eq!(number(&mut administrator, functions).await, 0);
    assert!(
        store::mysql::pending(&database.url()).await.unwrap().is_empty(),
        "the steps themselves were made"
    );
}
