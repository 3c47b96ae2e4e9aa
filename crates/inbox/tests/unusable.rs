//! Statements that the database cannot use, for one message or for all, on real servers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod database;
mod world;

use std::sync::Arc;

use database::{Database, connect};
use inbox::{Condition, Group, Handler};
use message::{Message, RetryPolicy};
use mysql_async::prelude::Queryable;
use store::mysql::MysqlStore;
use store::postgres::PostgresStore;
use store::{Inbox, InboxRules, Page};
use world::{GROUP, TOPIC, World, rules, until};

/// What runs statements as the application would.
enum Application {
    Postgres(tokio_postgres::Client),
    Mariadb(tokio::sync::Mutex<mysql_async::Conn>),
}

impl Application {
    async fn run(&self, sql: &str) {
        match self {
            Self::Postgres(client) => client.batch_execute(sql).await.unwrap(),
            Self::Mariadb(connection) => connection.lock().await.query_drop(sql).await.unwrap(),
        }
    }

    async fn number(&self, sql: &str) -> i64 {
        match self {
            Self::Postgres(client) => client.query_one(sql, &[]).await.unwrap().get(0),
            Self::Mariadb(connection) => connection.lock().await.query_first(sql).await.unwrap().unwrap(),
        }
    }
}

/// A store on a server, a broker with one partition, and a procedure that trips over some payloads.
struct Place {
    world: World,
    inbox: Arc<dyn Inbox>,
    application: Application,
    handler: &'static str,
    _database: Database,
}

/// `tries` is counted also by a transaction that is rolled back.
const POSTGRES: &str = "
    CREATE SEQUENCE tries;
    CREATE TABLE charges (id text, payload text);
    CREATE FUNCTION charge(id text, payload text) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM nextval('tries');
        IF payload = 'poison' THEN
            EXECUTE 'SELECT * FROM ' || quote_ident(payload);
        ELSIF payload = 'slow' THEN
            PERFORM pg_sleep(60);
        END IF;
        INSERT INTO charges VALUES (id, payload);
    END $$";

const MARIADB: [&str; 3] = [
    "CREATE SEQUENCE tries NOCACHE",
    "CREATE TABLE charges (id VARCHAR(36), payload TEXT)",
    "CREATE PROCEDURE charge(id VARCHAR(36), payload TEXT)
     BEGIN
         DO nextval(tries);
         IF payload = 'poison' THEN
             EXECUTE IMMEDIATE concat('SELECT * FROM ', payload);
         END IF;
         INSERT INTO charges VALUES (id, payload);
     END",
];

impl Place {
    async fn postgres() -> Self {
        let database = Database::postgres().await;
        let url = database.url();
        store::postgres::migrate(&url).await.unwrap();
        let application = connect(&url).await;
        application.batch_execute(POSTGRES).await.unwrap();
        let limit = format!("ALTER DATABASE {} SET statement_timeout = '1s'", database.name());
        application.batch_execute(&limit).await.unwrap();
        let inbox = PostgresStore::connect(store::postgres::Config::new(&url)).await.unwrap();
        Self {
            world: World::with_partitions(1),
            inbox: Arc::new(inbox),
            application: Application::Postgres(application),
            handler: "SELECT charge(:id, :payload)",
            _database: database,
        }
    }

    async fn mariadb() -> Self {
        let database = Database::mariadb().await;
        let mut connection = mysql_async::Conn::from_url(database.url()).await.unwrap();
        for statement in MARIADB {
            connection.query_drop(statement).await.unwrap();
        }
        let config = store::mysql::Config::new(database.url());
        Self {
            world: World::with_partitions(1),
            inbox: Arc::new(MysqlStore::connect(config).await.unwrap()),
            application: Application::Mariadb(tokio::sync::Mutex::new(connection)),
            handler: "CALL charge(:id, :payload)",
            _database: database,
        }
    }

    fn start(&self) -> inbox::Running {
        let handler = Handler::Sql(self.handler.to_owned());
        let retry = RetryPolicy { max_attempts: 2, ..rules().retry };
        let rules = InboxRules { retry, ..rules() };
        self.world.start(Group::new(GROUP, Arc::clone(&self.inbox), handler, rules))
    }

    async fn counted(&self) -> (u64, u64, u64) {
        let counts = self.inbox.inbox_counts(GROUP).await.unwrap();
        (counts.processed, counts.parked, counts.dead)
    }

    /// One message that trips over its payload, another of its key, and many others.
    async fn hold_up_nobody(&self, payload: &str, error: &str) {
        let other = |number: i32| Message::new(TOPIC, number.to_string()).key(format!("k{number}"));
        let culprit = Message::new(TOPIC, payload.to_owned()).key("a");
        let mut messages = vec![other(0), culprit.clone(), Message::new(TOPIC, "behind").key("a")];
        messages.extend((1..40).map(other));
        self.world.publish(&messages).await;
        let running = self.start();
        until(|| async { matches!(self.counted().await, (40, parked, dead) if parked + dead == 2) }).await;
        // It dies of its own attempts, and only the one behind it waits.
        until(|| async { self.counted().await == (40, 1, 1) }).await;
        let all = Page { after: None, limit: 10, newest_first: false };
        let parked = self.inbox.parked(GROUP, all).await.unwrap().items;
        assert_eq!(parked[0].arrival.message.id, culprit.id);
        assert!(parked[0].error.contains("others are handled and this one is not"), "{}", parked[0].error);
        assert!(parked[0].error.contains(error), "{}", parked[0].error);
        assert_eq!(self.application.number("SELECT count(*) FROM charges").await, 40, "each once");
        until(|| async { running.status().condition == Condition::Running }).await;
        running.drain().await;
    }

    /// All of them trip: the table is away.
    async fn cost_nobody_an_attempt(&self) {
        let running = self.start();
        self.application.run("ALTER TABLE charges RENAME TO away").await;
        let other = |number: i32| Message::new(TOPIC, number.to_string()).key(format!("k{number}"));
        self.world.publish(&(0..40).map(other).collect::<Vec<_>>()).await;
        // More than make a suspect.
        let tries = match self.application {
            Application::Postgres(_) => "SELECT last_value FROM tries",
            Application::Mariadb(_) => "SELECT next_not_cached_value FROM tries",
        };
        let before = self.application.number(tries).await;
        until(|| async {
            let is_paused = matches!(running.status().condition, Condition::Paused { .. });
            is_paused && self.application.number(tries).await >= before + 5
        })
        .await;
        assert_eq!(self.counted().await, (0, 0, 0));
        self.application.run("ALTER TABLE away RENAME TO charges").await;
        until(|| async { self.counted().await == (40, 0, 0) }).await;
        assert_eq!(self.application.number("SELECT count(*) FROM charges").await, 40, "each once");
        running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_makes_a_statement_unusable_holds_up_nobody_else_on_postgresql() {
    Place::postgres().await.hold_up_nobody("poison", "does not exist").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_always_takes_too_long_holds_up_nobody_else_on_postgresql() {
    Place::postgres().await.hold_up_nobody("slow", "statement timeout").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_makes_a_statement_unusable_holds_up_nobody_else_on_mariadb() {
    Place::mariadb().await.hold_up_nobody("poison", "doesn't exist").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_is_unusable_for_all_costs_no_attempt_on_postgresql() {
    Place::postgres().await.cost_nobody_an_attempt().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_is_unusable_for_all_costs_no_attempt_on_mariadb() {
    Place::mariadb().await.cost_nobody_an_attempt().await;
}
