//! The schema, step by step, each applied once, in order, all missing ones in one transaction.

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::config::Config;
use super::connection::Connections;
use super::error::Trouble;
use super::wake::TRIGGER;
use crate::Error;

/// One step of the schema.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// Counted from 1 without gaps.
    pub version: u32,
    /// What it does, in a few words.
    pub name: &'static str,
    /// The statements.
    pub sql: &'static str,
}

/// Every step, oldest first. A step that was released is never changed; a new one is added.
pub const MIGRATIONS: [Migration; 7] = [
    Migration { version: 1, name: "outbox", sql: include_str!("migrations/1_outbox.sql") },
    Migration { version: 2, name: "inbox", sql: include_str!("migrations/2_inbox.sql") },
    Migration { version: 3, name: "versions", sql: include_str!("migrations/3_versions.sql") },
    Migration { version: 4, name: "forgotten", sql: include_str!("migrations/4_forgotten.sql") },
    Migration { version: 5, name: "reserved", sql: include_str!("migrations/5_reserved.sql") },
    Migration { version: 6, name: "done", sql: include_str!("migrations/6_done.sql") },
    Migration { version: 7, name: "keys", sql: include_str!("migrations/7_keys.sql") },
];

/// The oldest server that has all that is used here.
const OLDEST: i32 = 150_000;

/// Taken, with the schema's name, by whoever changes it, so that several processes may start at once.
const LOCK: i32 = 0x706f_7374;

const TABLE: &str = "CREATE TABLE IF NOT EXISTS postrider_migrations (
    version    integer PRIMARY KEY,
    name       text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)";

/// Brings the database at `url` up to date and says which steps that took.
///
/// # Errors
/// When the database cannot be used, or is from a newer program.
pub async fn migrate(url: &str) -> Result<Vec<Migration>, Error> {
    let client = reach(url).await?;
    check_server(&client).await?;
    Ok(apply(&client).await?)
}

/// The steps that the database at `url` has not seen yet. Changes nothing.
///
/// # Errors
/// When the database cannot be used, or is from a newer program.
pub async fn pending(url: &str) -> Result<Vec<Migration>, Error> {
    Ok(missing(&reach(url).await?).await?)
}

/// The whole schema as SQL, for those who apply it with a tool of their own: it says of itself that it is there.
pub fn schema() -> String {
    let steps = MIGRATIONS.map(|step| {
        format!(
            "-- {version}: {name}\n{sql}\nINSERT INTO postrider_migrations (version, name) VALUES ({version}, '{name}');\n",
            version = step.version,
            name = step.name,
            sql = step.sql
        )
    });
    format!("{TABLE};\n\n{}", steps.join("\n"))
}

async fn reach(url: &str) -> Result<Client, Error> {
    Ok(Connections::open(&Config::new(url))?.dedicated().await?)
}

/// Refuses a server on which messages would be lost or could not be claimed.
pub(super) async fn check_server(client: &Client) -> Result<(), Error> {
    let row = client
        .query_typed_one(
            "SELECT current_setting('server_version_num')::int, current_setting('server_version'),
                    pg_is_in_recovery(), current_setting('transaction_read_only')::bool,
                    current_setting('server_encoding')",
            &[],
        )
        .await
        .map_err(Trouble::from)?;
    if row.get::<_, i32>(0) < OLDEST {
        let found: String = row.get(1);
        return Err(Error::Refused(format!("the server is PostgreSQL {found}: use 15 or newer")));
    }
    if row.get(2) {
        return Err(Error::Refused(
            "the server is a replica, which lags behind and cannot be written to: name the primary"
                .to_owned(),
        ));
    }
    if row.get(3) {
        return Err(Error::Refused(
            "the database is read-only: name the primary, or set default_transaction_read_only to off for this user"
                .to_owned(),
        ));
    }
    let encoding: String = row.get(4);
    if encoding != "UTF8" {
        return Err(Error::Refused(format!(
            "the database's encoding is {encoding}, which cannot hold every message: use a database in UTF8"
        )));
    }
    Ok(())
}

/// Makes sure that the schema is there.
pub(super) async fn prepare(client: &Client, may_change: bool) -> Result<(), Error> {
    if may_change {
        for step in apply(client).await? {
            tracing::info!(version = step.version, name = step.name, "the schema was brought up to date");
        }
        return Ok(());
    }
    match missing(client).await?.first() {
        None => Ok(()),
        Some(step) => Err(Error::Broken(format!(
            "the schema lacks step {} ({}): run `postrider migrate`",
            step.version, step.name
        ))),
    }
}

/// Makes the trigger that wakes sleeping relays, unless it is there: making it waits for all writers.
pub(super) async fn hang_doorbell(client: &Client, may_change: bool) -> Result<(), Error> {
    let there = client
        .query_typed_one(
            "SELECT EXISTS (SELECT 1 FROM pg_trigger
                            WHERE tgrelid = 'outbox_events'::regclass AND tgname = 'outbox_doorbell')",
            &[],
        )
        .await
        .map_err(Trouble::from)?;
    if there.get(0) {
        return Ok(());
    }
    if !may_change {
        return Err(Error::Broken(format!("the doorbell's trigger is missing: run `{TRIGGER}`")));
    }
    Ok(client.batch_execute(TRIGGER).await.map_err(Trouble::from)?)
}

async fn apply(client: &Client) -> Result<Vec<Migration>, Trouble> {
    if missing(client).await?.is_empty() {
        return Ok(Vec::new());
    }
    client.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED").await?;
    match apply_missing(client).await {
        Ok(steps) => {
            client.batch_execute("COMMIT").await?;
            Ok(steps)
        }
        Err(trouble) => {
            client.batch_execute("ROLLBACK").await?;
            Err(trouble)
        }
    }
}

/// Waits until nobody else changes the schema, and keeps others from it until the transaction ends.
pub(super) async fn alone(client: &Client) -> Result<(), Trouble> {
    let lock = "SELECT pg_advisory_xact_lock($1, hashtext(current_schema()))";
    client.execute_typed(lock, &[(&LOCK, Type::INT4)]).await?;
    Ok(())
}

async fn apply_missing(client: &Client) -> Result<Vec<Migration>, Trouble> {
    alone(client).await?;
    client.batch_execute(TABLE).await?;
    // Looked at again under the lock: another process may have been faster.
    let steps = missing(client).await?;
    for step in &steps {
        client.batch_execute(step.sql).await?;
        let version = i32::try_from(step.version).expect("versions are small");
        client
            .execute_typed(
                "INSERT INTO postrider_migrations (version, name) VALUES ($1, $2)",
                &[(&version, Type::INT4), (&step.name, Type::TEXT)],
            )
            .await?;
    }
    Ok(steps)
}

async fn missing(client: &Client) -> Result<Vec<Migration>, Trouble> {
    let known = MIGRATIONS.last().map_or(0, |last| last.version);
    let exists =
        client.query_typed_one("SELECT to_regclass('postrider_migrations') IS NOT NULL", &[]).await?;
    let found = if exists.get(0) {
        let row =
            client.query_typed_one("SELECT coalesce(max(version), 0) FROM postrider_migrations", &[]).await?;
        u32::try_from(row.get::<_, i32>(0)).unwrap_or(0)
    } else {
        0
    };
    if found > known {
        return Err(Trouble::Store(Error::Broken(format!(
            "the schema is at step {found} and this program knows {known}: use a newer program"
        ))));
    }
    Ok(MIGRATIONS.iter().filter(|step| step.version > found).copied().collect())
}
