//! Scripts: how they are put together, called, and found again when Redis has forgotten them.

use std::time::Duration;

use ::redis::aio::ConnectionManager;
use ::redis::{Arg, Cmd, ErrorKind, RedisError, ServerErrorKind, ToRedisArgs, Value};

use super::RedisStore;
use super::reply::Reader;
use crate::{Error, Lease};

/// How long an answer may take before the connection is thought to be broken.
pub(super) const ANSWER: Duration = Duration::from_secs(10);

/// How long to wait for replicas.
const REPLICATION: Duration = Duration::from_secs(1);

/// One script. Redis knows it by its hash, until it is restarted or told to forget.
pub(super) struct Script {
    code: String,
    hash: String,
}

impl Script {
    pub(super) fn new(code: String) -> Self {
        let hash = ::redis::Script::new(&code).get_hash().to_owned();
        Self { code, hash }
    }

    pub(super) fn code(&self) -> &str {
        &self.code
    }
}

/// A script made of Lua files: the parts it uses, and at the end what it does.
macro_rules! script {
    ($name:ident: $($file:literal),+) => {
        static $name: std::sync::LazyLock<$crate::redis::script::Script> = std::sync::LazyLock::new(|| {
            $crate::redis::script::Script::new(concat!($(include_str!($file)),+).to_owned())
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
    pub(super) fn new(script: &'a Script, prefix: &str) -> Self {
        let mut command = Cmd::new();
        command.arg("EVALSHA").arg(&script.hash).arg(1).arg(prefix);
        Self { script, command }
    }

    pub(super) fn arg(&mut self, arg: impl ToRedisArgs) -> &mut Self {
        self.command.arg(arg);
        self
    }

    /// Nothing is '', a text is '=' and itself: an empty text is something.
    pub(super) fn optional(&mut self, text: Option<&[u8]>) -> &mut Self {
        match text {
            None => self.arg(""),
            Some(text) => self.arg([b"=", text].concat()),
        }
    }

    pub(super) fn flag(&mut self, flag: bool) -> &mut Self {
        self.arg(if flag { "1" } else { "0" })
    }

    pub(super) fn leases(&mut self, leases: &[Lease]) -> &mut Self {
        self.arg(leases.len());
        for lease in leases {
            self.arg(lease.lane).arg(lease.epoch).arg(lease.id.to_string());
        }
        self
    }

    /// The same with the whole text of the script, for a server that does not know it.
    fn in_full(&self) -> Cmd {
        let mut command = Cmd::new();
        command.arg("EVAL").arg(&self.script.code);
        for arg in self.command.args_iter().skip(2) {
            if let Arg::Simple(bytes) = arg {
                command.arg(bytes);
            }
        }
        command
    }
}

impl RedisStore {
    pub(super) fn script<'a>(&self, script: &'a Script) -> Call<'a> {
        Call::new(script, &self.prefix)
    }

    /// Calls a script that writes nothing that must not be lost.
    pub(super) async fn read(&self, call: &Call<'_>) -> Result<Reader, Error> {
        Ok(run(&mut self.connection.clone(), call).await?.into())
    }

    /// The same on the heartbeat's own connection.
    pub(super) async fn beat_by(&self, call: &Call<'_>) -> Result<Reader, Error> {
        Ok(run(&mut self.heart().await?, call).await?.into())
    }

    /// Calls a script whose writes must be on as many replicas as the configuration asks for.
    pub(super) async fn write(&self, call: &Call<'_>) -> Result<Reader, Error> {
        let (answer, shortfall) = self.replicate(call).await?;
        shortfall.map_or(Ok(answer), Err)
    }

    /// The same, for callers that must undo what too few replicas have: the answer, and the error if there are.
    pub(super) async fn replicate(&self, call: &Call<'_>) -> Result<(Reader, Option<Error>), Error> {
        if self.replicas == 0 {
            return Ok((self.read(call).await?, None));
        }
        let connection = &mut self.writer.clone();
        let replicated = match self.with_wait(connection, &call.command).await {
            Err(error) if forgotten(&error) => self.with_wait(connection, &call.in_full()).await,
            other => other,
        };
        if let Err(error) = &replicated {
            leave_replica(connection, error).await;
        }
        let (answer, replicas) = replicated?;
        let shortfall = (replicas < self.replicas).then(|| too_few(replicas, self.replicas));
        Ok((answer.into(), shortfall))
    }

    /// The command and the number of replicas that have it, in one round trip.
    async fn with_wait(
        &self,
        connection: &mut ConnectionManager,
        command: &Cmd,
    ) -> Result<(Value, u32), RedisError> {
        let millis = u64::try_from(REPLICATION.as_millis()).unwrap_or(u64::MAX);
        let mut pipe = ::redis::pipe();
        pipe.add_command(command.clone()).cmd("WAIT").arg(self.replicas).arg(millis);
        pipe.query_async(connection).await
    }
}

async fn run(connection: &mut ConnectionManager, call: &Call<'_>) -> Result<Value, RedisError> {
    let answer = match call.command.query_async(connection).await {
        Err(error) if forgotten(&error) => call.in_full().query_async(connection).await,
        other => other,
    };
    if let Err(error) = &answer {
        leave_replica(connection, error).await;
    }
    answer
}

/// A primary that became a replica keeps its connections: ends this one, so that the next call asks again who is there.
async fn leave_replica(connection: &mut ConnectionManager, error: &RedisError) {
    if error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly) {
        let _: Result<Value, RedisError> = ::redis::cmd("QUIT").query_async(connection).await;
    }
}

/// Redis was restarted, failed over, or was told to forget its scripts: nothing was done.
fn forgotten(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

fn too_few(replicas: u32, wanted: u32) -> Error {
    let reason = format!(
        "it is written, but only {replicas} of {wanted} replicas had it after {} s: it may be lost if the primary \
         fails now; with an idempotency key the call can be repeated",
        REPLICATION.as_secs()
    );
    Error::Unavailable { reason, retry_after: REPLICATION }
}
