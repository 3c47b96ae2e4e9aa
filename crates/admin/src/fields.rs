//! Reads JSON requests so that a mistake is answered with the field, what it should be, and what it was.
//!
//! A derived reader would say "invalid type at line 1 column 17"; a person with a curl command needs the
//! name. Values stay as they were written until their field is asked for.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::Problem;

/// The fields of a JSON object, all of them known ones.
pub(crate) struct Fields<'a>(Vec<(String, &'a RawValue)>);

impl<'a> Fields<'a> {
    pub(crate) fn read(body: &'a [u8], known: &[&'static str]) -> Result<Self, Problem> {
        if body.iter().all(u8::is_ascii_whitespace) {
            return Err(not_json("The request has no body: send a JSON object".to_owned(), known));
        }
        let fields: Self = serde_json::from_slice(body).map_err(|error| {
            let first = body.iter().find(|byte| !byte.is_ascii_whitespace());
            let detail = match (error.classify(), first) {
                (serde_json::error::Category::Data, Some(byte)) if *byte != b'{' => {
                    format!("The request must be a JSON object, not {}", name_of(*byte))
                }
                _ => format!("The request is not valid JSON: {error}"),
            };
            not_json(detail, known)
        })?;
        for (at, (name, _)) in fields.0.iter().enumerate() {
            if !known.contains(&name.as_str()) {
                return Err(unknown(name, known));
            }
            if fields.0[..at].iter().any(|(earlier, _)| earlier == name) {
                return Err(Problem::bad_request(
                    "repeated-field",
                    "A field is given twice",
                    format!("The field `{name}` is given twice: leave one of them out."),
                ));
            }
        }
        Ok(fields)
    }

    /// The value of a field as it was written; JSON `null` is the same as nothing.
    pub(crate) fn raw(&self, name: &str) -> Option<&'a RawValue> {
        self.written(name).filter(|value| value.get() != "null")
    }

    /// The value of a field as it was written, `null` included.
    pub(crate) fn written(&self, name: &str) -> Option<&'a RawValue> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, value)| *value)
    }

    pub(crate) fn text(&self, name: &'static str) -> Result<Option<String>, Problem> {
        self.read_as(name, "a string")
    }

    pub(crate) fn flag(&self, name: &'static str) -> Result<Option<bool>, Problem> {
        self.read_as(name, "true or false")
    }

    pub(crate) fn texts(&self, name: &'static str) -> Result<Option<BTreeMap<String, String>>, Problem> {
        self.read_as(name, "an object whose values are strings")
    }

    pub(crate) fn required(&self, name: &'static str, example: &str) -> Result<String, Problem> {
        self.text(name)?.ok_or_else(|| missing(name, example))
    }

    /// The field read as `T`, which people know as `expected`.
    pub(crate) fn read_as<T: Deserialize<'a>>(
        &self,
        name: &'static str,
        expected: &str,
    ) -> Result<Option<T>, Problem> {
        let Some(value) = self.raw(name) else { return Ok(None) };
        serde_json::from_str(value.get()).map(Some).map_err(|_| wrong_type(name, expected, value))
    }
}

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::with_capacity(8);
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(Reader)
    }
}

pub(crate) fn missing(name: &'static str, example: &str) -> Problem {
    Problem::bad_request(
        "missing-field",
        "A field is missing",
        format!("The field `{name}` is missing: add it, for example \"{name}\": {example}."),
    )
}

pub(crate) fn wrong_type(name: &str, expected: &str, found: &RawValue) -> Problem {
    let found = found.get().as_bytes().first().map_or("nothing", |byte| name_of(*byte));
    // An object with a number in it is not "an object" to somebody who was asked for one of strings.
    let found = if expected.starts_with(found) { "not" } else { found };
    Problem::bad_request(
        "wrong-type",
        "A field has the wrong type",
        format!("The field `{name}` must be {expected}; it is {found}."),
    )
}

/// The name closest to `name`, if one is close enough to have been meant.
pub fn nearest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    known
        .iter()
        .map(|known| (strsim::jaro_winkler(&name.to_lowercase(), &known.to_lowercase()), *known))
        .filter(|(likeness, _)| *likeness >= 0.75)
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, known)| known)
}

fn unknown(name: &str, known: &[&'static str]) -> Problem {
    let shown: String = name.chars().take(64).collect();
    let all = known.join(", ");
    let hint = match nearest(name, known) {
        Some(meant) => format!("did you mean `{meant}`? The fields are {all}."),
        None => format!("the fields are {all}."),
    };
    Problem::bad_request(
        "unknown-field",
        "A field is not known",
        format!("There is no field `{}`: {hint}", shown.escape_debug()),
    )
}

fn not_json(detail: String, known: &[&'static str]) -> Problem {
    Problem::bad_request(
        "bad-json",
        "The body is not the JSON that is expected",
        format!("{detail}. Its fields are {}.", known.join(", ")),
    )
}

fn name_of(first: u8) -> &'static str {
    match first {
        b'"' => "a string",
        b'{' => "an object",
        b'[' => "a list",
        b't' | b'f' => "true or false",
        b'n' => "null",
        b'-' | b'0'..=b'9' => "a number",
        _ => "something that is not JSON",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: [&str; 3] = ["topic", "message", "headers"];

    fn refused(body: &str) -> String {
        match Fields::read(body.as_bytes(), &KNOWN) {
            Ok(_) => panic!("{body} was accepted"),
            Err(problem) => problem.detail,
        }
    }

    #[test]
    fn what_is_not_an_object_is_named() {
        assert!(refused("").starts_with("The request has no body"));
        assert!(refused("[1]").starts_with("The request must be a JSON object, not a list"));
        assert!(refused("\"x\"").starts_with("The request must be a JSON object, not a string"));
        assert!(refused("{\"topic\": ").starts_with("The request is not valid JSON"));
        assert!(refused("{'topic': 1}").starts_with("The request is not valid JSON"));
        assert!(refused("{\"topic\": \"a\"} x").starts_with("The request is not valid JSON"));
    }

    #[test]
    fn an_unknown_field_is_answered_with_the_nearest_one() {
        assert!(refused(r#"{"topik": "a"}"#).contains("did you mean `topic`?"));
        assert!(refused(r#"{"Topic": "a"}"#).contains("did you mean `topic`?"));
        assert!(refused(r#"{"zzz": "a"}"#).contains("the fields are topic, message, headers"));
        assert!(refused(r#"{"topic": "a", "topic": "b"}"#).contains("given twice"));
    }

    #[test]
    fn a_wrong_type_names_the_field_and_both_types() {
        let fields = Fields::read(br#"{"topic": 7, "headers": {"a": 1}}"#, &KNOWN).expect("an object");
        let topic = fields.text("topic").expect_err("a number").detail;
        assert_eq!(topic, "The field `topic` must be a string; it is a number.");
        let headers = fields.texts("headers").expect_err("a number inside").detail;
        assert_eq!(headers, "The field `headers` must be an object whose values are strings; it is not.");
    }
}
