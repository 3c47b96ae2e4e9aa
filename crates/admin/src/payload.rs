//! A payload as people and programs see it: JSON as JSON, text as text, anything else as base64.
//!
//! JSON passes through as it was written. Read into a tree and written again it would lose the digits of
//! large numbers and repeated fields, and an operator would mend something that was never sent.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use utoipa::ToSchema;

/// How a payload is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// It is JSON and stands as it is.
    #[default]
    Json,
    /// It is text, in a JSON string.
    Text,
    /// It is bytes, as base64 in a JSON string.
    Base64,
}

/// A payload and how it is shown.
#[derive(Clone, Debug)]
pub struct Payload {
    /// The JSON that shows it.
    pub value: Box<RawValue>,
    /// How to read that.
    pub encoding: Encoding,
}

impl Payload {
    /// How `bytes` of the media type `content_type` are shown.
    pub fn show(bytes: &Bytes, content_type: &str) -> Self {
        let text = std::str::from_utf8(bytes).ok();
        if let Some(value) =
            text.filter(|_| is_json(content_type)).and_then(|text| serde_json::from_str(text).ok())
        {
            return Self { value, encoding: Encoding::Json };
        }
        match text {
            Some(text) => Self { value: string(text), encoding: Encoding::Text },
            None => Self { value: string(&STANDARD.encode(bytes)), encoding: Encoding::Base64 },
        }
    }
}

/// The bytes that `value` stands for. The error says what `encoding` expects.
pub(crate) fn bytes_of(value: &RawValue, encoding: Encoding) -> Result<Bytes, &'static str> {
    let text = || serde_json::from_str::<String>(value.get());
    match encoding {
        Encoding::Json => Ok(Bytes::copy_from_slice(value.get().as_bytes())),
        Encoding::Text => text().map(Bytes::from).map_err(|_| "a string"),
        Encoding::Base64 => text()
            .ok()
            .and_then(|text| STANDARD.decode(text).ok())
            .map(Bytes::from)
            .ok_or("a string of base64"),
    }
}

/// JSON without the white space that means nothing: what two writers of the same content agree on.
pub(crate) fn compact(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let (mut quoted, mut escaped) = (false, false);
    for letter in json.chars() {
        if quoted {
            quoted = escaped || letter != '"';
            escaped = !escaped && letter == '\\';
        } else if letter.is_ascii_whitespace() {
            continue;
        } else {
            quoted = letter == '"';
        }
        out.push(letter);
    }
    out
}

/// How deep arrays and objects are nested.
pub(crate) fn depth(json: &str) -> usize {
    let (mut depth, mut most) = (0_usize, 0);
    let (mut quoted, mut escaped) = (false, false);
    for byte in json.bytes() {
        if quoted {
            quoted = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
            continue;
        }
        match byte {
            b'"' => quoted = true,
            b'[' | b'{' => {
                depth += 1;
                most = most.max(depth);
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    most
}

fn is_json(content_type: &str) -> bool {
    let media = content_type.split(';').next().unwrap_or_default().trim();
    media.eq_ignore_ascii_case("application/json") || media.to_ascii_lowercase().ends_with("+json")
}

fn string(text: &str) -> Box<RawValue> {
    to_raw_value(text).expect("a string is always JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(bytes: &'static [u8], content_type: &str) -> (String, Encoding) {
        let payload = Payload::show(&Bytes::from_static(bytes), content_type);
        (payload.value.get().to_owned(), payload.encoding)
    }

    #[test]
    fn a_payload_is_shown_as_json_text_or_base64() {
        assert_eq!(shown(b"{\"a\": 1}", "application/json"), ("{\"a\": 1}".into(), Encoding::Json));
        assert_eq!(shown(b"1", "application/vnd.x+json; v=1"), ("1".into(), Encoding::Json));
        assert_eq!(shown(b"hello", "application/json"), ("\"hello\"".into(), Encoding::Text));
        assert_eq!(shown(b"1", "text/plain"), ("\"1\"".into(), Encoding::Text));
        assert_eq!(shown(b"\xff\x00", "application/json"), ("\"/wA=\"".into(), Encoding::Base64));
    }

    #[test]
    fn large_numbers_keep_their_digits() {
        let digits = b"123456789012345678901234567890.10";
        assert_eq!(shown(digits, "application/json").0.as_bytes(), digits);
    }

    #[test]
    fn what_is_shown_is_read_back() {
        for (bytes, content_type) in [(&b"{}"[..], "application/json"), (b"a\"b", "text/x"), (b"\xff", "x/y")]
        {
            let bytes = Bytes::from_static(bytes);
            let payload = Payload::show(&bytes, content_type);
            assert_eq!(bytes_of(&payload.value, payload.encoding), Ok(bytes));
        }
    }

    #[test]
    fn white_space_between_tokens_means_nothing_and_within_strings_everything() {
        assert_eq!(compact("{ \"a b\" : [ 1 , \"\\\" x\" ] }"), "{\"a b\":[1,\"\\\" x\"]}");
        assert_eq!(compact(r#""a\\" "#), r#""a\\""#);
    }

    #[test]
    fn depth_counts_nesting_outside_strings() {
        assert_eq!(depth("[[{\"[[[[\": 1}], []]"), 3);
        assert_eq!(depth("1"), 0);
    }
}
