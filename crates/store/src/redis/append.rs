//! Writing messages: by a script of ours, in the application's MULTI, or in the application's own script.

use ::redis::{Pipeline, Script, cmd};
use async_trait::async_trait;
use message::{Invalid, Limits, Message, check_topic};

use super::migrate::send_script;
use super::reply::odd;
use super::script::{Call, script};
use super::{Config, RedisStore};
use crate::column::{groups_json, headers_json};
use crate::{Append, Appended, Error, NewMessage, Turned};

/// Messages, and bytes of payload, that one script stores: others wait while it runs.
const MOST: usize = 1_000;
const BYTES: usize = 8 << 20;

script!(APPEND: "prelude.lua", "append.lua", "append_all.lua");

#[async_trait]
impl Append for RedisStore {
    /// Up to 1,000 messages are one atomic step; more are several, and an error may leave the first ones stored.
    async fn append(&self, messages: Vec<NewMessage>) -> Result<Vec<Result<Appended, Turned>>, Error> {
        let mut results = Vec::with_capacity(messages.len());
        for part in parts(&messages) {
            self.append_part(part, &mut results).await?;
        }
        self.ring();
        Ok(results)
    }
}

impl RedisStore {
    async fn append_part(
        &self,
        messages: &[NewMessage],
        results: &mut Vec<Result<Appended, Turned>>,
    ) -> Result<(), Error> {
        let checked: Vec<Result<(), Invalid>> =
            messages.iter().map(|new| check_topic(&new.message.topic)).collect();
        let mut call = self.script(&APPEND);
        call.arg(checked.iter().filter(|result| result.is_ok()).count());
        for (new, _) in messages.iter().zip(&checked).filter(|(_, result)| result.is_ok()) {
            write(&mut call, new);
        }
        let mut answer = self.write(&call).await?;
        for (new, valid) in messages.iter().zip(checked) {
            results.push(match valid {
                Err(invalid) => Err(invalid.into()),
                Ok(()) => {
                    let mut result = answer.list()?;
                    let word = result.text()?;
                    match word.as_str() {
                        "new" => Ok(Appended::New(new.message.id)),
                        "repeated" => Ok(Appended::Repeated(message::MessageId(result.uuid()?))),
                        "key" => Err(Turned::KeyTaken),
                        "id" => Err(Turned::IdTaken(new.message.id)),
                        _ => return Err(odd("an append")),
                    }
                }
            });
        }
        Ok(())
    }
}

/// Cuts what is to be stored into parts that do not keep others waiting for long.
fn parts(messages: &[NewMessage]) -> impl Iterator<Item = &[NewMessage]> {
    let mut bytes = 0;
    let mut count = 0;
    messages.chunk_by(move |before, _| {
        bytes += before.message.size();
        count += 1;
        let together = bytes < BYTES && count < MOST;
        if !together {
            (bytes, count) = (0, 0);
        }
        together
    })
}

/// The arguments of one message, as `read_message` reads them.
pub(super) fn write(call: &mut Call<'_>, new: &NewMessage) {
    let message = &new.message;
    let once = new.once.as_ref();
    call.optional(once.map(|once| once.key.as_bytes()));
    call.arg(once.map(|once| hex(&once.fingerprint)).unwrap_or_default());
    call.arg(message.id.to_string()).arg(&message.topic).arg(&message.payload[..]);
    call.arg(message.occurred_at.timestamp_millis());
    call.optional(message.kind.as_deref().map(str::as_bytes));
    call.optional(message.key.as_deref().map(str::as_bytes));
    // What is usual is not kept for each message.
    let content_type =
        (message.content_type != Message::DEFAULT_CONTENT_TYPE).then_some(&message.content_type);
    call.optional(content_type.map(|text| text.as_bytes()));
    let headers = (!message.headers.is_empty()).then(|| headers_json(message));
    call.optional(headers.as_deref().map(str::as_bytes));
    let groups = new.ack_groups.as_deref().map(groups_json);
    call.optional(groups.as_deref().map(str::as_bytes));
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Adds the writing of `message` to the application's own MULTI, for applications that use the `redis` crate: their
/// keys and the message are written together or not at all. Adds nothing to the results of `pipe`.
///
/// `prefix` is that of the store ([`RedisStore::prefix`]). On a cluster the application's keys must carry its hash tag.
/// Call [`RedisStore::ring`] afterwards if the relay is in the same process.
///
/// ```no_run
/// # async fn example(mut connection: redis::aio::ConnectionManager) -> Result<(), Box<dyn std::error::Error>> {
/// let mut pipe = redis::pipe();
/// pipe.atomic().hset("order:42", "total", 10).ignore();
/// store::redis::append(&mut pipe, "{postrider}", &message::Message::new("orders", "{}").key("42"))?;
/// pipe.exec_async(&mut connection).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// When the message could not be stored: Redis does not undo the rest of a MULTI for that, so it is seen beforehand.
/// An id that is taken is only seen by Redis, after the rest was done: leave it fresh.
pub fn append(pipe: &mut Pipeline, prefix: &str, message: &Message) -> Result<(), Error> {
    message.check(&Limits::default()).map_err(|invalid| Error::Refused(invalid.to_string()))?;
    let prefix = Config { prefix: prefix.to_owned(), ..Config::new("") }.checked_prefix()?;
    // Changes nothing; but Redis refuses the whole MULTI when it is full and a command in it needs memory, and it does
    // not know that of a script.
    let mut room = cmd("SETRANGE");
    room.arg(format!("{prefix}:full")).arg(0).arg("");
    // In full: a hash that Redis has forgotten would fail after the rest of the MULTI was done.
    let mut send = cmd("EVAL");
    send.arg(send_script()).arg(1).arg(&prefix);
    send.arg(&message.topic).arg(message.key.as_deref().unwrap_or_default()).arg(&message.payload[..]);
    send.arg(message.id.to_string()).arg(headers_json(message));
    send.arg(message.kind.as_deref().unwrap_or_default()).arg(&message.content_type);
    send.arg(message.occurred_at.timestamp_millis().max(0));
    pipe.add_command(room).ignore().add_command(send).ignore();
    Ok(())
}

/// A script of the application's own that writes its keys and sends messages in one step: `body` may call
/// `postrider.send(topic, key, payload, id, headers, type, content_type)`, of which all after the payload may be left
/// out, and has `KEYS` and `ARGV` as always. `send` answers the id, or raises an error before it writes anything;
/// Redis does not undo what the script wrote before that, so call it first, or check first.
///
/// For updates that carry a version there are `postrider.newer(scope, entity, version)`, whether it is newer than any that
/// was applied, and `postrider.swap(scope, entity, expected, version)`, whether `expected` was applied last (0: none). If
/// so, the version is remembered when the script has succeeded; an error of the script's leaves the old one.
///
/// # Errors
/// When `prefix` cannot be one of a store.
pub fn script(prefix: &str, body: &str) -> Result<Script, Error> {
    let prefix = Config { prefix: prefix.to_owned(), ..Config::new("") }.checked_prefix()?;
    Ok(Script::new(&format!(
        "{}begin('{prefix}')\nopen_versions()\n\
         local postrider = {{ send = send, newer = newer, swap = swap }}\n\
         local function work()\n{body}\nend\nlocal answer = work()\n\
         if type(answer) ~= 'table' or not answer.err then close_versions() end\nreturn answer",
        concat!(
            include_str!("prelude.lua"),
            include_str!("append.lua"),
            include_str!("send.lua"),
            include_str!("inbox/versions.lua")
        ),
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_bounded_and_lose_nothing() {
        let small = |count: usize| -> Vec<NewMessage> {
            (0..count).map(|_| NewMessage::from(Message::new("t", "1"))).collect()
        };
        let sizes = |messages: &[NewMessage]| parts(messages).map(<[_]>::len).collect::<Vec<_>>();
        assert_eq!(sizes(&small(0)), [0_usize; 0]);
        assert_eq!(sizes(&small(2_500)), [1_000, 1_000, 500]);
        let large: Vec<NewMessage> = (0..5).map(|_| Message::new("t", vec![0; BYTES / 2]).into()).collect();
        assert_eq!(sizes(&large), [2, 2, 1]);
    }
}
