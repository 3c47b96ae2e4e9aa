//! Versioned updates: a stale message does not overwrite a newer one, on every store and by whatever means it is asked.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

#[cfg(feature = "mysql")]
mod mysql_database;
#[cfg(feature = "postgres")]
mod postgres_server;
#[cfg(feature = "redis")]
mod redis_place;

use testkit::versions::{Question, one_of_many_swaps, stale_ones_are_told};

#[cfg(feature = "sqlite")]
mod sqlite {
    use rusqlite::{Connection, named_params};
    use store::sqlite::{SqliteStore, newer, swap};
    use tempfile::TempDir;

    use super::*;

    fn open() -> (TempDir, String) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("store.db");
        SqliteStore::open(&path).unwrap();
        (folder, path.to_str().unwrap().to_owned())
    }

    fn connect(path: &str) -> Connection {
        let application = Connection::open(path).unwrap();
        application.busy_timeout(std::time::Duration::from_secs(20)).unwrap();
        application
    }

    fn ask(application: &Connection, question: Question) -> bool {
        let Question { scope, entity, expected, version } = question;
        match expected {
            None => newer(application, scope, entity, version).unwrap(),
            Some(expected) => swap(application, scope, entity, expected, version).unwrap(),
        }
    }

    #[tokio::test]
    async fn stale_versions_are_told_in_rust() {
        let (_folder, path) = open();
        let mut application = connect(&path);
        stale_ones_are_told(async |question| ask(&application, question)).await;
        one_of_many_swaps(|question| {
            let path = path.clone();
            async move { ask(&connect(&path), question) }
        })
        .await;
        let transaction = application.transaction().unwrap();
        assert!(newer(&transaction, "prices", "42", 11).unwrap());
        transaction.rollback().unwrap();
        assert!(newer(&application, "prices", "42", 11).unwrap(), "what was rolled back was never applied");
    }

    /// The statements as the guide has them, for other languages.
    fn from_the_guide(name: &str) -> String {
        let guide = include_str!("../../../docs/guide/stores.md");
        let (_, versions) = guide.split_once("### Versions").unwrap();
        let (_, statement) = versions.split_once(&format!("-- {name}\n")).expect(name);
        statement.split_once(';').unwrap().0.to_owned()
    }

    #[tokio::test]
    async fn stale_versions_are_told_by_the_statements_of_the_guide() {
        let (_folder, path) = open();
        let application = connect(&path);
        let (newer, swap) = (from_the_guide("newer"), from_the_guide("swap"));
        let ask = |question: Question| {
            let Question { scope, entity, expected, version } = question;
            let answered = match expected {
                None => application.prepare(&newer).unwrap().exists(
                    named_params! { ":scope": scope, ":entity": entity, ":version": version },
                ),
                Some(expected) => application.prepare(&swap).unwrap().exists(
                    named_params! { ":scope": scope, ":entity": entity, ":expected": expected, ":version": version },
                ),
            };
            answered.unwrap()
        };
        stale_ones_are_told(async |question| ask(question)).await;
        let nothing = named_params! { ":scope": "prices", ":entity": "42", ":version": None::<i64> };
        application.prepare(&newer).unwrap().exists(nothing).unwrap_err();
        let nothing =
            named_params! { ":scope": "prices", ":entity": "42", ":expected": None::<i64>, ":version": 50 };
        application.prepare(&swap).unwrap().exists(nothing).unwrap_err();
    }

    #[cfg(feature = "sqlx")]
    #[tokio::test]
    async fn stale_versions_are_told_by_sqlx() {
        use sqlx::{Connection as _, SqliteConnection};
        use store::sqlite::sqlx::{newer, swap};
        let (_folder, path) = open();
        let mut application = SqliteConnection::connect(&format!("sqlite://{path}")).await.unwrap();
        stale_ones_are_told(async |Question { scope, entity, expected, version }| match expected {
            None => newer(&mut application, scope, entity, version).await.unwrap(),
            Some(expected) => swap(&mut application, scope, entity, expected, version).await.unwrap(),
        })
        .await;
    }
}

#[cfg(feature = "postgres")]
mod postgres {
    use store::postgres::{newer, swap};
    use tokio_postgres::Client;

    use super::postgres_server::Database;
    use super::*;

    async fn ask(application: &Client, question: Question) -> bool {
        let Question { scope, entity, expected, version } = question;
        match expected {
            None => newer(application, scope, entity, version).await.unwrap(),
            Some(expected) => swap(application, scope, entity, expected, version).await.unwrap(),
        }
    }

    #[tokio::test]
    async fn stale_versions_are_told_in_rust() {
        let database = std::sync::Arc::new(Database::fresh().await);
        database.open().await;
        let mut application = database.application().await;
        stale_ones_are_told(async |question| ask(&application, question).await).await;
        one_of_many_swaps(|question| {
            let database = database.clone();
            async move { ask(&database.application().await, question).await }
        })
        .await;
        let transaction = application.transaction().await.unwrap();
        assert!(newer(&transaction, "prices", "42", 11).await.unwrap());
        transaction.rollback().await.unwrap();
        assert!(
            newer(&application, "prices", "42", 11).await.unwrap(),
            "what was rolled back was never applied"
        );
    }

    #[tokio::test]
    async fn stale_versions_are_told_by_plain_sql() {
        let database = Database::fresh().await;
        database.open().await;
        let application = database.application().await;
        let call = async |call: String| application.query_one(&call, &[]).await;
        stale_ones_are_told(async |question| call(super::call(question)).await.unwrap().get(0)).await;
        call("SELECT postrider_newer('prices', '42', NULL)".to_owned()).await.unwrap_err();
        call("SELECT postrider_swap('prices', '42', NULL, 50)".to_owned()).await.unwrap_err();
    }

    #[cfg(feature = "sqlx")]
    #[tokio::test]
    async fn stale_versions_are_told_by_sqlx() {
        use sqlx::{Connection, PgConnection};
        use store::postgres::sqlx::{newer, swap};
        let database = Database::fresh().await;
        database.open().await;
        let mut application = PgConnection::connect(&database.url()).await.unwrap();
        stale_ones_are_told(async |Question { scope, entity, expected, version }| match expected {
            None => newer(&mut application, scope, entity, version).await.unwrap(),
            Some(expected) => swap(&mut application, scope, entity, expected, version).await.unwrap(),
        })
        .await;
    }
}

#[cfg(feature = "mysql")]
mod mysql {
    use mysql_async::prelude::Queryable;
    use mysql_async::{Conn, TxOpts};
    use store::mysql::{Config, MysqlStore, newer, swap};

    use super::mysql_database::Database;
    use super::*;

    async fn fresh() -> Database {
        let database = Database::fresh().await;
        MysqlStore::connect(Config::new(database.url())).await.unwrap();
        database
    }

    async fn ask(application: &mut Conn, question: Question) -> bool {
        let Question { scope, entity, expected, version } = question;
        match expected {
            None => newer(application, scope, entity, version).await.unwrap(),
            Some(expected) => swap(application, scope, entity, expected, version).await.unwrap(),
        }
    }

    async fn call(application: &mut Conn, question: Question) -> bool {
        application.query_first(super::call(question)).await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn stale_versions_are_told_in_rust() {
        let database = fresh().await;
        let mut application = database.application().await;
        stale_ones_are_told(async |question| ask(&mut application, question).await).await;
        let mut transaction = application.start_transaction(TxOpts::default()).await.unwrap();
        assert!(newer(&mut transaction, "prices", "42", 11).await.unwrap());
        transaction.rollback().await.unwrap();
        assert!(
            newer(&mut application, "prices", "42", 11).await.unwrap(),
            "what was rolled back was never applied"
        );
    }

    #[tokio::test]
    async fn stale_versions_are_told_by_plain_sql() {
        let database = std::sync::Arc::new(fresh().await);
        let mut application = database.application().await;
        stale_ones_are_told(async |question| call(&mut application, question).await).await;
        one_of_many_swaps(|question| {
            let database = database.clone();
            async move { call(&mut database.application().await, question).await }
        })
        .await;
        application.query_drop("SELECT postrider_newer('prices', '42', NULL)").await.unwrap_err();
        application.query_drop("SELECT postrider_swap('prices', '42', NULL, 50)").await.unwrap_err();

        // In a transaction that has read the old version before another one was committed.
        let mut slow = database.application().await;
        let mut transaction = slow.start_transaction(TxOpts::default()).await.unwrap();
        let seen: Option<i64> =
            transaction.query_first("SELECT version FROM inbox_versions WHERE entity = '42'").await.unwrap();
        assert_eq!(seen, Some(10));
        let later = Question { scope: "prices", entity: "42", expected: None, version: 12 };
        assert!(call(&mut application, later).await);
        let earlier: Option<bool> =
            transaction.query_first("SELECT postrider_newer('prices', '42', 11)").await.unwrap();
        assert_eq!(earlier, Some(false), "what others have committed counts, whatever this one saw before");
        transaction.rollback().await.unwrap();
    }

    #[cfg(feature = "sqlx")]
    #[tokio::test]
    async fn stale_versions_are_told_by_sqlx() {
        use sqlx::{Connection, MySqlConnection};
        use store::mysql::sqlx::{newer, swap};
        let database = fresh().await;
        let mut application = MySqlConnection::connect(&database.url()).await.unwrap();
        stale_ones_are_told(async |Question { scope, entity, expected, version }| match expected {
            None => newer(&mut application, scope, entity, version).await.unwrap(),
            Some(expected) => swap(&mut application, scope, entity, expected, version).await.unwrap(),
        })
        .await;
    }
}

/// The function of PostgreSQL's and of MySQL's, as any language calls it.
#[cfg(any(feature = "postgres", feature = "mysql"))]
fn call(Question { scope, entity, expected, version }: Question) -> String {
    match expected {
        None => format!("SELECT postrider_newer('{scope}', '{entity}', {version})"),
        Some(expected) => format!("SELECT postrider_swap('{scope}', '{entity}', {expected}, {version})"),
    }
}

#[cfg(feature = "redis")]
mod redis {
    use ::redis::{Connection, RedisResult};

    use super::redis_place::Place;
    use super::*;

    /// What a version is given for, and the command that applies it.
    fn fcall(
        place: &Place,
        connection: &mut Connection,
        question: Question,
        then: &[&str],
    ) -> RedisResult<bool> {
        let Question { scope, entity, expected, version } = question;
        let mut command = ::redis::cmd("FCALL");
        command.arg(if expected.is_some() { "postrider_swap" } else { "postrider_newer" }).arg(1);
        command.arg(place.prefix()).arg(scope).arg(entity).arg(expected).arg(version).arg(then);
        command.query(connection)
    }

    #[tokio::test]
    async fn stale_versions_are_told_by_functions() {
        let place = std::sync::Arc::new(Place::new());
        place.store().await;
        let mut connection = place.connection();
        stale_ones_are_told(async |question| fcall(&place, &mut connection, question, &[]).unwrap()).await;
        one_of_many_swaps(|question| {
            let place = place.clone();
            async move { fcall(&place, &mut place.connection(), question, &[]).unwrap() }
        })
        .await;
        for version in ["", "1.5", "nil", "9223372036854775808"] {
            let mut command = ::redis::cmd("FCALL");
            command.arg("postrider_newer").arg(1).arg(place.prefix()).arg("prices").arg("42").arg(version);
            command.exec(&mut connection).expect_err(version);
        }
    }

    #[tokio::test]
    async fn a_version_and_the_command_that_applies_it_are_one() {
        let place = Place::new();
        place.store().await;
        let mut connection = place.connection();
        let price = place.key("price");
        let question = |version| Question { scope: "prices", entity: "42", expected: None, version };
        let mut set = |version, to: &str| {
            fcall(&place, &mut connection, question(version), &["SET", &price, to]).unwrap()
        };
        assert!(set(1, "100") && set(2, "200") && !set(1, "100"));
        let read = |connection: &mut Connection| ::redis::cmd("GET").arg(&price).query::<i64>(connection);
        assert_eq!(read(&mut connection).unwrap(), 200);
        // What cannot be applied is not remembered: it may come again when it can.
        fcall(&place, &mut connection, question(3), &["LPUSH", &price, "300"]).unwrap_err();
        assert!(fcall(&place, &mut connection, question(3), &["SET", &price, "300"]).unwrap());
        assert_eq!(read(&mut connection).unwrap(), 300);
    }

    #[tokio::test]
    async fn stale_versions_are_told_in_scripts() {
        let place = Place::new();
        place.store().await;
        let mut connection = place.connection();
        let script = |body: &str| store::redis::script(place.prefix(), body).unwrap();
        let (newer, swap) = (
            script("return postrider.newer(ARGV[1], ARGV[2], ARGV[3]) and 1 or 0"),
            script("return postrider.swap(ARGV[1], ARGV[2], ARGV[3], ARGV[4]) and 1 or 0"),
        );
        stale_ones_are_told(async |Question { scope, entity, expected, version }| {
            let mut call = if expected.is_some() { &swap } else { &newer }.prepare_invoke();
            call.arg(scope).arg(entity).arg(expected).arg(version).invoke(&mut connection).unwrap()
        })
        .await;
        // Asked twice in one script it is the same version again; what fails afterwards leaves the old one.
        let twice = "local ask = function() return postrider.newer('prices', 'twice', 1) end\nreturn { ask(), ask() }";
        let answers: Vec<Option<bool>> = script(twice).invoke(&mut connection).unwrap();
        assert_eq!(answers, [Some(true), None]);
        for fails in ["error('later')", "return redis.error_reply('later')"] {
            let fails = format!("postrider.newer('prices', 'twice', 2)\n{fails}");
            script(&fails).invoke::<::redis::Value>(&mut connection).unwrap_err();
        }
        assert!(newer.arg("prices").arg("twice").arg(2).invoke::<bool>(&mut connection).unwrap());
    }
}
