//! Reading one table of settings: every getter takes its key or complains, and goes on.
//!
//! Going on after a mistake is the point: a person should see all that is wrong with a file at once. A getter
//! that complained answers the default, which nobody will use.

use std::cell::RefCell;
use std::time::Duration;

use super::tree::{Node, Origin, Table, Value};
use super::{Complaint, units};

/// Where mistakes are gathered.
pub(super) type Complaints = RefCell<Vec<Complaint>>;

/// One table being read.
pub(super) struct Section<'a> {
    path: String,
    origin: Origin,
    table: Table,
    complaints: &'a Complaints,
}

/// A value and where it stood, for checks that come later.
pub(super) struct Found<T> {
    pub(super) value: T,
    pub(super) origin: Origin,
}

impl<'a> Section<'a> {
    /// Reads `node` as a table with these keys and no others.
    pub(super) fn new(path: &str, node: Option<Node>, known: &[&str], complaints: &'a Complaints) -> Self {
        let (mut table, origin) = match node {
            None => (Table::new(), Origin::BuiltIn),
            Some(Node { value: Value::Table(table), origin }) => (table, origin),
            Some(Node { value, origin }) => {
                let text = format!("expected a table of settings, found {}", value.kind());
                complaints.borrow_mut().push(Complaint {
                    setting: path.to_owned(),
                    origin: origin.clone(),
                    text,
                });
                (Table::new(), origin)
            }
        };
        let unknown: Vec<String> =
            table.keys().filter(|key| !known.contains(&key.as_str())).cloned().collect();
        for key in unknown {
            let Some(node) = table.remove(&key) else { continue };
            let text = format!("unknown setting; {}", nearest(&key, known));
            complaints.borrow_mut().push(Complaint { setting: join(path, &key), origin: node.origin, text });
        }
        Self { path: path.to_owned(), origin, table, complaints }
    }

    /// Where this table was written.
    pub(super) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The full name of a key of this table.
    pub(super) fn name(&self, key: &str) -> String {
        join(&self.path, key)
    }

    /// Whether the key was written.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Where the key was written, or its table if it was not.
    pub(super) fn origin_of(&self, key: &str) -> Origin {
        self.table.get(key).map_or_else(|| self.origin.clone(), |node| node.origin.clone())
    }

    /// The value of the key, left where it is.
    pub(super) fn peek(&self, key: &str) -> Option<&Value> {
        self.table.get(key).map(|node| &node.value)
    }

    /// Takes the key as it stands.
    pub(super) fn take(&mut self, key: &str) -> Option<Node> {
        self.table.remove(key)
    }

    /// Says that `key` is wrong.
    pub(super) fn complain(&self, key: &str, origin: Origin, text: impl Into<String>) {
        let setting = if key.is_empty() { self.path.clone() } else { self.name(key) };
        self.complaints.borrow_mut().push(Complaint { setting, origin, text: text.into() });
    }

    /// A text.
    pub(super) fn text(&mut self, key: &str) -> Option<Found<String>> {
        let Node { value, origin } = self.take(key)?;
        match value {
            Value::Text(value) => Some(Found { value, origin }),
            other => {
                self.complain(key, origin, format!("expected a text in quotes, found {}", other.kind()));
                None
            }
        }
    }

    /// A text that `parse` understands.
    pub(super) fn parsed<T>(
        &mut self,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<Found<T>> {
        let Found { value, origin } = self.text(key)?;
        match parse(&value) {
            Ok(value) => Some(Found { value, origin }),
            Err(text) => {
                self.complain(key, origin, text);
                None
            }
        }
    }

    /// A duration that is not nothing.
    pub(super) fn duration(&mut self, key: &str, default: Duration) -> Duration {
        let least = |text: &str| match units::duration(text)? {
            Duration::ZERO => Err("must be longer than nothing".to_owned()),
            duration => Ok(duration),
        };
        self.parsed(key, least).map_or(default, |found| found.value)
    }

    /// A size that is not nothing.
    pub(super) fn size(&mut self, key: &str, default: usize) -> usize {
        let least = |text: &str| match units::size(text)? {
            0 => Err("must be larger than nothing".to_owned()),
            size => Ok(size),
        };
        self.parsed(key, least).map_or(default, |found| found.value)
    }

    /// A whole number between two bounds.
    pub(super) fn number(&mut self, key: &str, least: u32, most: u32, default: u32) -> u32 {
        let Some(Node { value, origin }) = self.take(key) else { return default };
        match value {
            Value::Integer(number) => match u32::try_from(number) {
                Ok(number) if (least..=most).contains(&number) => number,
                _ => {
                    self.complain(key, origin, format!("{number} is not between {least} and {most}"));
                    default
                }
            },
            other => {
                self.complain(key, origin, format!("expected a whole number, found {}", other.kind()));
                default
            }
        }
    }

    /// A share: more than nothing and less than all.
    pub(super) fn share(&mut self, key: &str, default: f64) -> f64 {
        let Some(Node { value, origin }) = self.take(key) else { return default };
        match value {
            Value::Fraction(share) if share > 0.0 && share < 1.0 => share,
            Value::Fraction(_) | Value::Integer(_) => {
                self.complain(key, origin, "use a share between 0 and 1, such as 0.5");
                default
            }
            other => {
                let found = other.kind();
                self.complain(key, origin, format!("expected a share such as 0.5, found {found}"));
                default
            }
        }
    }

    /// Yes or no.
    pub(super) fn flag(&mut self, key: &str, default: bool) -> bool {
        let Some(Node { value, origin }) = self.take(key) else { return default };
        match value {
            Value::Bool(yes) => yes,
            other => {
                self.complain(key, origin, format!("expected true or false, found {}", other.kind()));
                default
            }
        }
    }

    /// One of these words.
    pub(super) fn word<T: Copy>(&mut self, key: &str, words: &[(&str, T)], default: T) -> T {
        let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
        let choose = |text: &str| {
            words
                .iter()
                .find(|(name, _)| *name == text)
                .map(|(_, value)| *value)
                .ok_or_else(|| format!("`{text}` is not a choice here; {}", nearest(text, &names)))
        };
        self.parsed(key, choose).map_or(default, |found| found.value)
    }

    /// A list of texts, or one text; each with its place.
    pub(super) fn texts(&mut self, key: &str) -> Vec<Found<String>> {
        let Some(Node { value, origin }) = self.take(key) else { return Vec::new() };
        let items = match value {
            Value::Text(value) => return vec![Found { value, origin }],
            Value::Array(items) => items,
            other => {
                self.complain(key, origin, format!("expected a list of texts, found {}", other.kind()));
                return Vec::new();
            }
        };
        let mut texts = Vec::new();
        for Node { value, origin } in items {
            match value {
                Value::Text(value) => texts.push(Found { value, origin }),
                other => {
                    self.complain(key, origin, format!("expected texts in quotes, found {}", other.kind()))
                }
            }
        }
        texts
    }
}

/// The nearest of what is valid, and all of it when nothing is near.
pub(super) fn nearest(wrong: &str, known: &[&str]) -> String {
    let wrong = wrong.to_lowercase();
    // The one sees words that begin alike, the other letters that changed places.
    let likeness = |name: &str| {
        strsim::jaro_winkler(&wrong, name).max(strsim::normalized_damerau_levenshtein(&wrong, name))
    };
    let best = known.iter().map(|name| (likeness(name), *name)).max_by(|a, b| a.0.total_cmp(&b.0));
    match best {
        Some((likeness, name)) if likeness > 0.6 => format!("did you mean `{name}`?"),
        Some(_) => format!("what can be set here is {}", known.join(", ")),
        None => "nothing can be set here".to_owned(),
    }
}

fn join(path: &str, key: &str) -> String {
    // A name with a dot in it would read as two.
    let key = if key.contains('.') { format!("\"{key}\"") } else { key.to_owned() };
    if path.is_empty() { key } else { format!("{path}.{key}") }
}
