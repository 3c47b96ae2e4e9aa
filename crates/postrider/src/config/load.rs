//! Finding the settings: a file, then the environment on top of it.

use std::fmt;
use std::path::{Path, PathBuf};

use super::check::check;
use super::read::read;
use super::tree::{self, Origin, Table};
use super::{BUILT_IN, Complaint, Config};

/// The file that is used when none is named.
const USUAL_FILE: &str = "postrider.toml";

/// What environment variables that are settings begin with.
const PREFIX: &str = "POSTRIDER__";

/// Settings that may be used.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// The settings.
    pub(crate) config: Config,
    /// The file they came from.
    pub(crate) file: Option<PathBuf>,
    /// The variables that took part.
    pub(crate) variables: Vec<String>,
    /// What works but may surprise.
    pub(crate) warnings: Vec<Complaint>,
}

/// Why there are no settings to use.
#[derive(Debug)]
pub(crate) struct Rejected {
    /// The file they came from.
    pub(crate) file: Option<PathBuf>,
    /// All that is wrong.
    pub(crate) complaints: Vec<Complaint>,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place =
            self.file.as_ref().map_or_else(|| "the settings".to_owned(), |file| file.display().to_string());
        match self.complaints.as_slice() {
            [only] => write!(f, "{place}: {only}"),
            all => {
                write!(f, "{place}: {} things are wrong", all.len())?;
                all.iter().try_for_each(|complaint| write!(f, "\n  {complaint}"))
            }
        }
    }
}

impl std::error::Error for Rejected {}

/// Loads the settings of `named`, or of the usual file if there is one, or the built-in ones.
pub(crate) fn load(
    named: Option<&Path>,
    variables: impl IntoIterator<Item = (String, String)>,
) -> Result<Loaded, Rejected> {
    let file = match named {
        Some(path) => Some(path.to_owned()),
        None => Some(PathBuf::from(USUAL_FILE)).filter(|path| path.exists()),
    };
    let written = match &file {
        Some(path) => read_file(path).map_err(|complaints| Rejected { file: file.clone(), complaints })?,
        None => Table::new(),
    };
    from_parts(file, written, variables)
}

fn from_parts(
    file: Option<PathBuf>,
    written: Table,
    variables: impl IntoIterator<Item = (String, String)>,
) -> Result<Loaded, Rejected> {
    let mut settings = built_in();
    settings.extend(written);
    let mut used = Vec::new();
    let mut wrong = Vec::new();
    // Sorted, so that of POSTRIDER__A='{…}' and POSTRIDER__A__B=… the longer one is put on top.
    let mut variables: Vec<_> = variables.into_iter().filter(|(name, _)| name.starts_with(PREFIX)).collect();
    variables.sort();
    for (name, value) in variables {
        let path: Vec<&str> = name[PREFIX.len()..].split("__").collect();
        if path.iter().any(|segment| segment.is_empty()) {
            wrong.push(Complaint {
                setting: String::new(),
                origin: Origin::Variable(name.clone()),
                text: "write it as POSTRIDER__SECTION__SETTING, such as POSTRIDER__RELAY__LEASE".to_owned(),
            });
            continue;
        }
        tree::put(&mut settings, &path, tree::parse_variable(&name, &value));
        used.push(name);
    }

    let (config, places, complaints) = read(settings);
    wrong.extend(complaints);
    // Checks between settings would only repeat what is wrong with one of them.
    let mut warnings = Vec::new();
    if wrong.is_empty() {
        let findings = check(&config, &places);
        wrong = findings.mistakes;
        warnings = findings.warnings;
    }
    wrong.sort_by(|a, b| a.origin.cmp(&b.origin));
    if wrong.is_empty() {
        Ok(Loaded { config, file, variables: used, warnings })
    } else {
        Err(Rejected { file, complaints: wrong })
    }
}

fn built_in() -> Table {
    fn forget_places(table: &mut Table) {
        for node in table.values_mut() {
            node.origin = Origin::BuiltIn;
            match &mut node.value {
                tree::Value::Table(inner) => forget_places(inner),
                tree::Value::Array(items) => items.iter_mut().for_each(|item| item.origin = Origin::BuiltIn),
                _ => {}
            }
        }
    }
    let mut table = tree::parse(BUILT_IN).expect("the built-in settings are TOML: a test reads them");
    forget_places(&mut table);
    table
}

fn read_file(path: &Path) -> Result<Table, Vec<Complaint>> {
    let complaint = |origin, text| Complaint { setting: String::new(), origin, text };
    let text = std::fs::read_to_string(path).map_err(|error| {
        let text = match error.kind() {
            std::io::ErrorKind::NotFound => {
                "there is no such file: check --config or POSTRIDER_CONFIG".to_owned()
            }
            std::io::ErrorKind::InvalidData => "the file is not UTF-8 text".to_owned(),
            _ => format!("cannot be read: {error}"),
        };
        vec![complaint(Origin::BuiltIn, text)]
    })?;
    tree::parse(&text).map_err(|errors| {
        errors
            .into_iter()
            .map(|error| complaint(error.origin, format!("not TOML: {}", error.reason)))
            .collect()
    })
}

#[cfg(test)]
mod tests;
