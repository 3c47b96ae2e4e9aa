//! Rules of the tree that compilers and linters do not know: each with its reason.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

/// A file longer than this is more than one person reads at a sitting.
const LONGEST: usize = 600;

/// Names that say nothing about what is inside.
const EMPTY_NAMES: [&str; 7] = ["core", "common", "util", "utils", "types", "helpers", "manager"];

/// Checks every source file and document that git knows.
pub(crate) fn tidy() -> Result<()> {
    println!("\n── tidy");
    let listed =
        std::process::Command::new("git").args(["ls-files", "-co", "--exclude-standard"]).output()?;
    ensure!(listed.status.success(), "git could not list the files");
    let files: Vec<PathBuf> = String::from_utf8(listed.stdout)?.lines().map(PathBuf::from).collect();
    let mut problems = Vec::new();
    for file in files.iter().filter(|file| file.exists()) {
        if file.extension().is_some_and(|extension| extension == "rs") {
            source(file, &std::fs::read_to_string(file)?, &mut problems);
        }
        if file.extension().is_some_and(|extension| extension == "md") {
            document(file, &std::fs::read_to_string(file)?, &mut problems);
        }
    }
    for problem in &problems {
        println!("{problem}");
    }
    ensure!(problems.is_empty(), "{} untidy places", problems.len());
    Ok(())
}

fn source(file: &Path, text: &str, problems: &mut Vec<String>) {
    let shown = file.display();
    let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    if EMPTY_NAMES.contains(&stem) {
        problems.push(format!("{shown}: `{stem}` says nothing about what is inside: name it by its work"));
    }
    if !text.starts_with("//!") {
        problems.push(format!("{shown}: opens without `//!`: say what the file is and why it exists"));
    }
    let lines = text.lines().count();
    if lines > LONGEST {
        problems.push(format!("{shown}: {lines} lines: make two files of it"));
    }
    for (number, line) in text.lines().enumerate() {
        let open = ["todo", "unimplemented"].iter().any(|word| line.contains(&format!("{word}!(")));
        if open || line.contains(concat!("TO", "DO")) || line.contains(concat!("FIX", "ME")) {
            problems.push(format!("{shown}:{}: unfinished work does not land", number + 1));
        }
    }
}

/// Links between documents must lead somewhere.
fn document(file: &Path, text: &str, problems: &mut Vec<String>) {
    let folder = file.parent().unwrap_or(Path::new(""));
    for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let target = link.split('#').next().unwrap_or_default();
        let outside = target.contains("://") || target.starts_with("mailto:");
        if !target.is_empty() && !outside && !folder.join(target).exists() {
            problems.push(format!("{}: the link to {target} leads nowhere", file.display()));
        }
    }
}
