//! `send`: write a message to the outbox.

use std::io::Read;

use admin::{Desk, IdFrom, SendRequest};
use serde_json::value::{RawValue, to_raw_value};

use super::arguments::Send;
use super::failure::Failure;
use super::output::Output;

/// Writes the message and says its id.
pub(super) async fn send(desk: &Desk, options: Send, output: &mut Output) -> Result<(), Failure> {
    let bytes = read_argument(&options.message, desk.limits().payload)?;
    let message = as_json(bytes, options.text)?;
    let mut request = SendRequest::new(options.topic, message);
    request.kind = options.kind;
    request.key = options.key;
    request.headers = options.headers.into_iter().collect();
    request.message_id = options.id;
    request.id_from = options.id_from.map(|from| match from.as_str() {
        "content" => IdFrom::CONTENT,
        fields => IdFrom::Fields(fields.split(',').map(|field| field.trim().to_owned()).collect()),
    });
    request.consumer_group = options.group;
    request.deliver_after = options.deliver_after;
    request.expires_after = options.expires_after;
    let answer = desk.send(request, options.idempotency_key.as_deref()).await?;
    output.answer(&answer, |output| {
        output.line(answer.message_id.to_string())?;
        if answer.repeated {
            output.note("it had been written before; nothing was written now")?;
        }
        Ok(())
    })
}

/// The bytes that an argument stands for: itself, a file (`@file`) or the standard input (`-`).
pub(super) fn read_argument(argument: &str, limit: usize) -> Result<Vec<u8>, Failure> {
    let source: Box<dyn Read> = match argument.strip_prefix('@') {
        Some(file) => Box::new(
            std::fs::File::open(file)
                .map_err(|error| Failure::usage(format!("cannot read {file}: {error}")))?,
        ),
        None if argument == "-" => Box::new(std::io::stdin()),
        None => return Ok(argument.as_bytes().to_vec()),
    };
    let mut bytes = Vec::new();
    // One byte more than the limit, so that the desk can tell what is too large without reading a whole disk.
    source
        .take(limit as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| Failure::usage(format!("cannot read {argument}: {error}")))?;
    Ok(bytes)
}

fn as_json(bytes: Vec<u8>, text: bool) -> Result<Box<RawValue>, Failure> {
    let written = String::from_utf8(bytes)
        .map_err(|_| Failure::usage("the message is not UTF-8 text: send bytes as base64 in a text"))?;
    if !text && let Ok(value) = serde_json::from_str::<Box<RawValue>>(written.trim()) {
        return Ok(value);
    }
    to_raw_value(&written).map_err(|error| Failure::usage(format!("the message cannot be JSON: {error}")))
}
