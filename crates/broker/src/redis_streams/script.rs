//! Scripts, and the link to a Redis that may be away: connected on first use, and anew after anything went wrong.
//!
//! Every script here may run twice: what it did the first time it finds done. So a call whose connection broke is made
//! once more on a new one, and a restart of Redis or an idle connection that a firewall cut is nobody's trouble.

use std::fmt;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, RedisError, ToRedisArgs, Value};
use tokio::time::Instant;

use super::error::Error;
use super::server;

/// A Lua script. Redis knows it by its hash, until it is restarted or told to forget.
pub(super) struct Script {
    code: &'static str,
    hash: String,
}

impl Script {
    pub(super) fn new(code: &'static str) -> Self {
        Self { code, hash: redis::Script::new(code).get_hash().to_owned() }
    }
}

/// A script made of the words that all of them use and what this one does.
macro_rules! script {
    ($name:ident: $file:literal) => {
        static $name: std::sync::LazyLock<$crate::redis_streams::script::Script> =
            std::sync::LazyLock::new(|| {
                $crate::redis_streams::script::Script::new(concat!(
                    include_str!("prelude.lua"),
                    include_str!($file)
                ))
            });
    };
}
pub(super) use script;

/// A script and its arguments.
pub(super) struct Call<'a> {
    script: &'a Script,
    command: Cmd,
}

impl<'a> Call<'a> {
    /// A call of `script` on the keys that begin with `tag`.
    pub(super) fn new(script: &'a Script, tag: &str) -> Self {
        let mut command = Cmd::new();
        command.arg("EVALSHA").arg(&script.hash).arg(1).arg(tag);
        Self { script, command }
    }

    pub(super) fn arg(&mut self, arg: impl ToRedisArgs) -> &mut Self {
        self.command.arg(arg);
        self
    }
}

/// Replicas that must have what a call wrote, and how long to wait for them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replicas {
    pub(super) wanted: u32,
    pub(super) patience: Duration,
}

/// A way to one Redis. Calls share a connection.
pub(super) struct Link {
    client: Client,
    patience: Duration,
    /// Whether a server that may lose messages is refused.
    careful: bool,
    connection: Mutex<Option<MultiplexedConnection>>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The address alone: the rest may hold a password.
        f.debug_tuple("Link").field(&self.client.get_connection_info().addr().to_string()).finish()
    }
}

impl Link {
    /// A link on which no call takes longer than `patience`. Nothing is connected yet.
    pub(super) fn new(client: Client, patience: Duration, careful: bool) -> Self {
        Self { client, patience, careful, connection: Mutex::default() }
    }

    /// Runs a script.
    ///
    /// # Cancel safety
    /// A call that is dropped may run all the same.
    pub(super) async fn invoke(&self, call: &Call<'_>) -> Result<Value, Error> {
        let end = Instant::now() + self.patience;
        self.invoke_by(call, None, end).await.map(|(value, _)| value)
    }

    /// The same until `end`, and how many replicas have it.
    pub(super) async fn invoke_by(
        &self,
        call: &Call<'_>,
        replicas: Option<Replicas>,
        end: Instant,
    ) -> Result<(Value, u32), Error> {
        if end <= Instant::now() {
            return Err(Error::Away("there was no time left".to_owned()));
        }
        match self.once(call, replicas, end).await {
            Err(Error::Unanswered(reason)) if Instant::now() < end => {
                let again = self.once(call, replicas, end).await;
                // The first time it may have been done, whatever became of the second.
                again.map_err(|error| match error {
                    Error::Away(_) => Error::Unanswered(reason),
                    other => other,
                })
            }
            other => other,
        }
    }

    async fn once(
        &self,
        call: &Call<'_>,
        replicas: Option<Replicas>,
        end: Instant,
    ) -> Result<(Value, u32), Error> {
        let answer = async {
            let mut connection = self.connect(end).await?;
            match run(&mut connection, call, replicas).await {
                Err(error) if error.is_forgotten_script() => {
                    load(&mut connection, call.script).await?;
                    run(&mut connection, call, replicas).await
                }
                other => other,
            }
        };
        self.until(end, answer).await
    }

    /// Sends one command.
    pub(super) async fn query(&self, command: &Cmd) -> Result<Value, Error> {
        let end = Instant::now() + self.patience;
        let answer = async {
            let mut connection = self.connect(end).await?;
            command.query_async(&mut connection).await.map_err(|error| Error::asking(&error))
        };
        self.until(end, answer).await
    }

    /// Waits for an answer, and leaves a connection that is of no more use.
    async fn until<T>(
        &self,
        end: Instant,
        answer: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let late = |_| Err(Error::Unanswered(format!("nothing came within {:?}", self.patience)));
        let answer = tokio::time::timeout_at(end, answer).await.unwrap_or_else(late);
        if answer.as_ref().is_err_and(Error::spoils_the_connection) {
            *self.connection() = None;
        }
        answer
    }

    async fn connect(&self, end: Instant) -> Result<MultiplexedConnection, Error> {
        if let Some(connection) = self.connection().clone() {
            return Ok(connection);
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            // Ours ends a call; the driver's would be another one.
            .set_response_timeout(None)
            .set_pipeline_buffer_size(1_024)
            .set_write_backpressure_boundary(256 << 10);
        let connecting = self.client.get_multiplexed_async_connection_with_config(&config);
        let connecting = tokio::time::timeout_at(end, connecting).await;
        let Ok(connected) = connecting else {
            return Err(Error::Away(format!("no connection within {:?}", self.patience)));
        };
        let mut connection = connected.map_err(|error| Error::connecting(&error))?;
        if self.careful {
            let looked = tokio::time::timeout_at(end, server::check(&mut connection)).await;
            looked.unwrap_or_else(|_| Err(Error::Away("it says nothing about itself".to_owned())))?;
        }
        *self.connection() = Some(connection.clone());
        Ok(connection)
    }

    fn connection(&self) -> MutexGuard<'_, Option<MultiplexedConnection>> {
        self.connection.lock().expect("nothing panics while it holds the connection")
    }
}

async fn run(
    connection: &mut MultiplexedConnection,
    call: &Call<'_>,
    replicas: Option<Replicas>,
) -> Result<(Value, u32), Error> {
    let asking = |error: RedisError| Error::asking(&error);
    let Some(Replicas { wanted, patience }) = replicas else {
        return Ok((call.command.query_async(connection).await.map_err(asking)?, 0));
    };
    // In one round trip, and in this order: WAIT speaks of all that its own connection wrote before it.
    let mut pipe = redis::pipe();
    let millis = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX).max(1);
    pipe.add_command(call.command.clone()).cmd("WAIT").arg(wanted).arg(millis);
    pipe.query_async(connection).await.map_err(asking)
}

async fn load(connection: &mut MultiplexedConnection, script: &Script) -> Result<(), Error> {
    let loaded: Result<Value, RedisError> =
        redis::cmd("SCRIPT").arg("LOAD").arg(script.code).query_async(connection).await;
    loaded.map(drop).map_err(|error| match error.kind() {
        // Nothing was asked yet but to learn a script.
        ErrorKind::Io => Error::Away(error.to_string()),
        _ => Error::asking(&error),
    })
}
