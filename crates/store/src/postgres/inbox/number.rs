//! The named parameters of a handler's statement (`:id`, `:payload` …), where PostgreSQL knows none.

use crate::statement::PARAMETERS;

/// `sql` with what `place` makes of 1, 2 … in the places of its named parameters, and their names. Each place has its own
/// number, so that one parameter may be a text here and JSON there. A semicolon at its end is left out.
pub(super) fn number(
    sql: &str,
    place: impl Fn(usize) -> String,
) -> Result<(String, Vec<&'static str>), String> {
    let mut out = String::with_capacity(sql.len());
    let mut names = Vec::new();
    let mut rest = sql;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '\'' => quoted(rest, '\'', out.ends_with(['e', 'E'])),
            '"' => quoted(rest, '"', false),
            '-' if rest.starts_with("--") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest[2..].find("*/").map_or(rest.len(), |end| end + 4),
            '$' => match dollar_quoted(rest) {
                Some(length) => length,
                None if rest[1..].starts_with(|c: char| c.is_ascii_digit()) => {
                    return Err(format!("it has a numbered parameter: use {}", PARAMETERS.join(", ")));
                }
                None => 1,
            },
            ';' => {
                rest = &rest[1..];
                continue;
            }
            ':' if rest.starts_with("::") => 2,
            ':' => match parameter(rest) {
                0 => 1,
                length => {
                    let name = &rest[..length];
                    let known = PARAMETERS.iter().find(|known| **known == name);
                    let known = known.ok_or_else(|| {
                        format!("it has the parameter `{name}`: use {}", PARAMETERS.join(", "))
                    })?;
                    names.push(*known);
                    out.push_str(&place(names.len()));
                    rest = &rest[length..];
                    continue;
                }
            },
            other => other.len_utf8(),
        };
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    Ok((out, names))
}

/// How long a parameter's name is, with its colon; nothing for a bare colon (`[1:2]`).
fn parameter(rest: &str) -> usize {
    let name = &rest[1..];
    if !name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
        return 0;
    }
    1 + name.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(name.len())
}

/// How long a quoted text or name is; in an `E''` text a backslash keeps the quote after it from ending it.
fn quoted(rest: &str, quote: char, escapes: bool) -> usize {
    let mut skip = false;
    for (place, c) in rest.char_indices().skip(1) {
        if skip {
            skip = false;
        } else if c == '\\' && escapes {
            skip = true;
        } else if c == quote {
            return place + 1;
        }
    }
    rest.len()
}

/// How long a `$tag$ … $tag$` text is, if it is one.
fn dollar_quoted(rest: &str) -> Option<usize> {
    let end = 1 + rest[1..].find('$')?;
    let tag = &rest[..=end];
    let name = &tag[1..end];
    if name.starts_with(|c: char| c.is_ascii_digit())
        || !name.chars().all(|c| c.is_alphanumeric() || c == '_')
    {
        return None;
    }
    Some(rest[tag.len()..].find(tag).map_or(rest.len(), |at| at + 2 * tag.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dollar(place: usize) -> String {
        format!("${place}")
    }

    #[test]
    fn parameters_are_numbered_wherever_they_stand() {
        let cases = [
            ("SELECT :id", "SELECT $1", vec![":id"]),
            ("VALUES (:payload, :id,:key)", "VALUES ($1, $2,$3)", vec![":payload", ":id", ":key"]),
            ("SELECT :id::uuid, :id", "SELECT $1::uuid, $2", vec![":id", ":id"]),
            ("SELECT ':id', \":key\", :id", "SELECT ':id', \":key\", $1", vec![":id"]),
            ("SELECT 'it''s :id' -- :id\n, :id", "SELECT 'it''s :id' -- :id\n, $1", vec![":id"]),
            ("SELECT E'\\':id' /* :id */", "SELECT E'\\':id' /* :id */", vec![]),
            ("SELECT $$:id$$, $a$ :id $a$, :id", "SELECT $$:id$$, $a$ :id $a$, $1", vec![":id"]),
            ("SELECT a[1:2], :seq", "SELECT a[1:2], $1", vec![":seq"]),
            ("SELECT ';', :id; -- done", "SELECT ';', $1 -- done", vec![":id"]),
        ];
        for (sql, expected, names) in cases {
            assert_eq!(number(sql, dollar), Ok((expected.to_owned(), names)), "{sql}");
        }
    }

    #[test]
    fn what_is_no_parameter_of_ours_is_refused() {
        for (sql, expected) in
            [("SELECT :colour", ":colour"), ("SELECT $1", "numbered"), ("SELECT :idx", ":idx")]
        {
            let error = number(sql, dollar).expect_err(sql);
            assert!(error.contains(expected) && error.contains(":payload"), "{error}");
        }
    }
}
