//! `dead edit`: mend a dead letter and send it again.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use admin::{Desk, EditRequest, Encoding, MessageView};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::value::{RawValue, to_raw_value};

use super::super::ACTOR;
use super::super::arguments::Edit;
use super::super::failure::{Exit, Failure};
use super::super::output::Output;
use super::super::send::read_argument;

/// Mends the message as the options say, or as a person does in an editor.
pub(in super::super) async fn edit(desk: &Desk, options: Edit, output: &mut Output) -> Result<(), Failure> {
    let dead = desk.dead_show(&options.id).await?.message;
    let named = options.payload.is_some() || options.content_type.is_some() || !options.headers.is_empty();
    let payload = match &options.payload {
        Some(argument) => Some(read_argument(argument, desk.limits().payload)?),
        None if named => None,
        None => Some(in_editor(&dead)?),
    };
    let content_type = options.content_type.clone().unwrap_or_else(|| dead.content_type.clone());
    let written = payload.map(|bytes| written(bytes, &content_type)).transpose()?;
    let (payload, payload_encoding) =
        written.map_or((None, Encoding::Json), |(value, how)| (Some(value), how));
    let headers = (!options.headers.is_empty()).then(|| options.headers.into_iter().collect());
    let request = EditRequest { payload, payload_encoding, content_type: options.content_type, headers };
    let answer = desk.edit(&options.id, request, ACTOR).await?;
    output.answer(&answer, |output| output.line(format!("{} mended and requeued", answer.message_id)))
}

/// Bytes as the desk takes them: JSON where the media type says so, else text, else base64.
fn written(bytes: Vec<u8>, content_type: &str) -> Result<(Box<RawValue>, Encoding), Failure> {
    let raw = |text: &str| {
        to_raw_value(text).map_err(|error| Failure::usage(format!("the payload cannot be written: {error}")))
    };
    let media = content_type.split(';').next().unwrap_or_default().trim();
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => return Ok((raw(&STANDARD.encode(error.as_bytes()))?, Encoding::Base64)),
    };
    if media != "application/json" && !media.ends_with("+json") {
        return Ok((raw(&text)?, Encoding::Text));
    }
    serde_json::from_str::<Box<RawValue>>(text.trim()).map(|value| (value, Encoding::Json)).map_err(|error| {
        Failure::usage(format!(
            "the payload is not JSON ({error}), and the message is {media}: mend it, or add --content-type text/plain"
        ))
    })
}

fn in_editor(dead: &MessageView) -> Result<Vec<u8>, Failure> {
    let editor =
        ["VISUAL", "EDITOR"].iter().find_map(|name| std::env::var(name).ok()).filter(|name| !name.is_empty());
    let (Some(editor), true) = (editor, std::io::stdin().is_terminal()) else {
        return Err(Failure::usage(
            "say what to change with --payload, --content-type or --header; on a terminal, $EDITOR opens the payload",
        ));
    };
    if dead.payload_encoding == Encoding::Base64 {
        return Err(Failure::usage("the payload is not text: give the new one with --payload @file"));
    }
    let before = match dead.payload_encoding {
        Encoding::Text => serde_json::from_str::<String>(dead.payload.get()).unwrap_or_default(),
        _ => dead.payload.get().to_owned(),
    };
    let file = Scratch::new(&format!("postrider-{}.txt", dead.message_id), before.as_bytes())?;
    let mut words = editor.split_whitespace();
    let status = std::process::Command::new(words.next().unwrap_or_default())
        .args(words)
        .arg(file.path())
        .status()
        .map_err(|error| Failure::usage(format!("cannot start the editor `{editor}`: {error}")))?;
    let after = std::fs::read(file.path())
        .map_err(|error| Failure::new(Exit::Unexpected, format!("cannot read what was edited: {error}")))?;
    if !status.success() || after == before.as_bytes() {
        return Err(Failure::new(
            Exit::Refused,
            "nothing was changed; `dead requeue` sends it again as it is",
        ));
    }
    Ok(after)
}

/// A file for the editor that nobody else can read and that is gone afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, content: &[u8]) -> Result<Self, Failure> {
        let path = std::env::temp_dir().join(name);
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        options.open(&path).and_then(|mut file| file.write_all(content)).map_err(|error| {
            Failure::new(Exit::Unexpected, format!("cannot write {}: {error}", path.display()))
        })?;
        Ok(Self(path))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The editor may have moved it away; then there is nothing to remove.
        let _ = std::fs::remove_file(&self.0);
    }
}
