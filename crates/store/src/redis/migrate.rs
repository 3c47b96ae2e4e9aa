//! Making a new store ready, and the functions that other languages call.

use ::redis::{RedisError, Value, cmd};
use uuid::Uuid;

use super::RedisStore;
use super::script::{Script, script};
use crate::Error;

/// Of the keys and of what is in them. A program refuses a store of a newer one.
const VERSION: i64 = 1;

/// Lanes of a new store.
const LANES: u16 = 16;

script!(MIGRATE: "prelude.lua", "migrate.lua");

/// Sends one message: `EVAL <this> 1 <prefix> <topic> <key> <payload> [id] [headers] [type] [content type] [millis]`.
static SEND: std::sync::LazyLock<Script> = std::sync::LazyLock::new(|| {
    Script::new(
        concat!(
            include_str!("prelude.lua"),
            include_str!("append.lua"),
            include_str!("send.lua"),
            include_str!("send_one.lua")
        )
        .to_owned(),
    )
});

/// The library of functions, with its version: an older program does not put its own in the place of a newer one's.
const LIBRARY: &str = concat!(
    "#!lua name=postrider\n-- version 2\n",
    include_str!("prelude.lua"),
    include_str!("hold.lua"),
    include_str!("append.lua"),
    include_str!("send.lua"),
    include_str!("acknowledge.lua"),
    include_str!("inbox/desk.lua"),
    include_str!("inbox/once.lua"),
    include_str!("inbox/versions.lua"),
    include_str!("functions.lua"),
);

/// The text of the script that sends one message, for `EVAL` in programs and servers without functions.
pub fn send_script() -> &'static str {
    SEND.code()
}

/// The library with `postrider_send`, `postrider_once`, `postrider_newer` and `postrider_swap`, for `FUNCTION LOAD` by people who load it themselves.
pub fn library() -> &'static str {
    LIBRARY
}

impl RedisStore {
    /// Makes what a store needs before its first message.
    pub(super) async fn prepare(&self) -> Result<(), Error> {
        let mut call = self.script(&MIGRATE);
        call.arg(VERSION).arg(Uuid::new_v4().simple().to_string()).arg(LANES);
        let found = self.write(&call).await?.number()?;
        if found > VERSION {
            return Err(Error::Broken(format!(
                "the store at {} is of a newer program (version {found}, this one knows {VERSION}): update this program",
                self.prefix
            )));
        }
        if self.server.has_functions() {
            // Only other languages need them: a server that forbids FUNCTION is a store all the same.
            if let Err(error) = self.load_functions().await {
                tracing::warn!(%error, "the functions postrider_… could not be loaded; EVAL works without them");
            }
        }
        Ok(())
    }

    async fn load_functions(&self) -> Result<(), RedisError> {
        let mut connection = self.connection.clone();
        let known: Value = cmd("FUNCTION")
            .arg("LIST")
            .arg("LIBRARYNAME")
            .arg("postrider")
            .arg("WITHCODE")
            .query_async(&mut connection)
            .await?;
        let known = code_of(known);
        if known.as_deref() == Some(LIBRARY) || known.as_deref().map_or(0, version_of) > version_of(LIBRARY) {
            return Ok(());
        }
        cmd("FUNCTION").arg("LOAD").arg("REPLACE").arg(LIBRARY).exec_async(&mut connection).await
    }
}

/// The code in the answer of FUNCTION LIST: a list of names and values for each library.
fn code_of(answer: Value) -> Option<String> {
    let Value::Array(libraries) = answer else { return None };
    let Some(Value::Array(fields)) = libraries.into_iter().next() else { return None };
    let mut fields = fields.into_iter();
    while let (Some(name), Some(value)) = (fields.next(), fields.next()) {
        if let (Value::BulkString(name), Value::BulkString(code)) = (name, value)
            && name == b"library_code"
        {
            return String::from_utf8(code).ok();
        }
    }
    None
}

fn version_of(library: &str) -> u32 {
    let version = library.lines().nth(1).and_then(|line| line.strip_prefix("-- version "));
    version.and_then(|version| version.parse().ok()).unwrap_or(0)
}
