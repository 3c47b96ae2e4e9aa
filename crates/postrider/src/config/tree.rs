//! Settings as a tree in which every key and value remembers where it was written.
//!
//! A person who mistyped a key needs the line or the variable, not the name of a Rust type; so the tree is read
//! by hand ([`super::read`]) instead of by a derived deserialiser that forgets both.

use std::collections::BTreeMap;
use std::fmt;

use toml::de::{DeTable, DeValue};

/// Where a setting was written. Sorted, mistakes are told in the order in which a person finds them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// In the program.
    BuiltIn,
    /// In the file, at this line and column.
    File {
        /// Counted from 1.
        line: usize,
        /// Counted from 1, in characters.
        column: usize,
    },
    /// In this environment variable.
    Variable(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn => f.write_str("built-in settings"),
            Self::File { line, column } => write!(f, "line {line}, column {column}"),
            Self::Variable(name) => f.write_str(name),
        }
    }
}

/// A value and where it was written.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    /// What was written.
    pub(crate) value: Value,
    /// Where.
    pub(crate) origin: Origin,
}

/// What a setting can be.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// Settings by name.
    Table(Table),
    /// A list.
    Array(Vec<Node>),
    /// A text.
    Text(String),
    /// A whole number.
    Integer(i64),
    /// Yes or no.
    Bool(bool),
    /// A number with a fraction.
    Fraction(f64),
    /// Something that no setting takes, such as a date.
    Other(&'static str),
}

/// Settings by name.
pub(crate) type Table = BTreeMap<String, Node>;

impl Value {
    /// The word for this kind of value in a sentence.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Table(_) => "a table",
            Self::Array(_) => "a list",
            Self::Text(_) => "a text",
            Self::Integer(_) => "a whole number",
            Self::Fraction(_) => "a number with a fraction",
            Self::Bool(_) => "true or false",
            Self::Other(kind) => kind,
        }
    }
}

/// What is not TOML, and where.
#[derive(Debug)]
pub(crate) struct Unreadable {
    /// Where it stops making sense.
    pub(crate) origin: Origin,
    /// Why.
    pub(crate) reason: String,
}

/// Reads a TOML document.
pub(crate) fn parse(text: &str) -> Result<Table, Vec<Unreadable>> {
    let (table, errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() {
        return Ok(from_table(table.get_ref(), &|span| place(text, span)));
    }
    let at = |error: &toml::de::Error| error.span().map_or(0, |span| span.start);
    let mut errors: Vec<_> = errors.into_iter().map(|error| (at(&error), error)).collect();
    errors.sort_by_key(|(at, _)| *at);
    let told = |(at, error): (usize, toml::de::Error)| Unreadable {
        origin: place(text, at),
        reason: error.message().to_owned(),
    };
    Err(errors.into_iter().map(told).collect())
}

/// Reads the value of an environment variable: TOML where it is TOML, else the text itself, so that
/// `7d` and `127.0.0.1:80` need no quotes within quotes.
pub(crate) fn parse_variable(name: &str, text: &str) -> Node {
    let origin = Origin::Variable(name.to_owned());
    let value = match DeValue::parse(text.trim()) {
        Ok(value) => match from_value(value.get_ref(), &|_| origin.clone()) {
            // A date is a text that happens to look like one: no setting takes it.
            Value::Other(_) => Value::Text(text.to_owned()),
            value => value,
        },
        Err(_) => Value::Text(text.to_owned()),
    };
    Node { value, origin }
}

fn from_table(table: &DeTable<'_>, origin: &dyn Fn(usize) -> Origin) -> Table {
    table
        .iter()
        .map(|(key, value)| {
            // The key's place, not the value's: that is where a person looks for it.
            let node = Node { value: from_value(value.get_ref(), origin), origin: origin(key.span().start) };
            (key.get_ref().to_string(), node)
        })
        .collect()
}

fn from_value(value: &DeValue<'_>, origin: &dyn Fn(usize) -> Origin) -> Value {
    match value {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or(Value::Other("a number too large"), Value::Integer),
        DeValue::Boolean(yes) => Value::Bool(*yes),
        DeValue::Float(number) => {
            let number = number.as_str().replace('_', "").parse();
            number.map_or(Value::Other("a number that is none"), Value::Fraction)
        }
        DeValue::Datetime(_) => Value::Other("a date"),
        DeValue::Array(items) => Value::Array(
            items
                .iter()
                .map(|item| Node {
                    value: from_value(item.get_ref(), origin),
                    origin: origin(item.span().start),
                })
                .collect(),
        ),
        DeValue::Table(table) => Value::Table(from_table(table, origin)),
    }
}

fn place(text: &str, at: usize) -> Origin {
    let before = text.get(..at.min(text.len())).unwrap_or(text);
    let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    Origin::File { line, column }
}

/// Puts `node` at `path`, making tables on the way and replacing what was there.
///
/// A segment finds an existing name whatever its case, and whether it has dashes or underscores: most
/// shells cannot export a name with a dash. A new name is taken in lower case.
pub(crate) fn put(table: &mut Table, path: &[&str], node: Node) {
    let Some((first, rest)) = path.split_first() else { return };
    let folded = |name: &str| name.to_ascii_lowercase().replace('-', "_");
    let name = table
        .keys()
        .find(|key| folded(key) == folded(first))
        .cloned()
        .unwrap_or_else(|| first.to_ascii_lowercase());
    if rest.is_empty() {
        table.insert(name, node);
        return;
    }
    let entry = table
        .entry(name)
        .or_insert_with(|| Node { value: Value::Table(Table::new()), origin: node.origin.clone() });
    if !matches!(entry.value, Value::Table(_)) {
        *entry = Node { value: Value::Table(Table::new()), origin: node.origin.clone() };
    }
    if let Value::Table(inner) = &mut entry.value {
        put(inner, rest, node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_knows_its_line_and_column() {
        let table = parse("# a\n[store]\n  url = \"x\"\n").expect("this is TOML");
        let Value::Table(store) = &table["store"].value else { panic!("a table") };
        assert_eq!(store["url"].origin, Origin::File { line: 3, column: 3 });
    }

    #[test]
    fn every_mistake_in_the_document_is_told() {
        let errors = parse("a = \nb = 1\nc = [\n").expect_err("this is not TOML");
        assert!(errors.len() >= 2, "{errors:?}");
        assert_eq!(errors[0].origin, Origin::File { line: 1, column: 5 });
    }

    #[test]
    fn a_variable_is_toml_or_else_text() {
        let value = |text| parse_variable("X", text).value;
        assert!(matches!(value("3"), Value::Integer(3)));
        assert!(matches!(value("true"), Value::Bool(true)));
        assert!(matches!(value("[\"a\", \"b\"]"), Value::Array(items) if items.len() == 2));
        assert!(matches!(value("{ log = true }"), Value::Table(_)));
        assert!(matches!(value("\"3\""), Value::Text(text) if text == "3"));
        assert!(matches!(value("7d"), Value::Text(text) if text == "7d"));
        assert!(matches!(value("127.0.0.1:80"), Value::Text(text) if text == "127.0.0.1:80"));
    }

    #[test]
    fn a_variable_finds_names_with_dashes_and_makes_new_ones() {
        let mut table = parse("[consumers.my-group]\nkeep_ids = \"7d\"\n").expect("this is TOML");
        put(&mut table, &["CONSUMERS", "MY_GROUP", "KEEP_IDS"], parse_variable("A", "9d"));
        put(&mut table, &["CONSUMERS", "other-group", "DEDUP"], parse_variable("B", "sql"));
        let Value::Table(consumers) = &table["consumers"].value else { panic!("a table") };
        assert_eq!(consumers.keys().collect::<Vec<_>>(), ["my-group", "other-group"]);
        let Value::Table(mine) = &consumers["my-group"].value else { panic!("a table") };
        assert!(matches!(&mine["keep_ids"].value, Value::Text(text) if text == "9d"));
    }
}
