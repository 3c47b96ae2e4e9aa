//! The README and the guide, held against the program: what they show must be what there is.
//!
//! Prose rots because nothing runs it. Here its program, its commands with their options, its settings and its requests are
//! taken out of the text and tried.

#![cfg(unix)]

mod harness;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use harness::Folder;
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The README and every page of the guide, by name.
fn documents() -> Vec<(String, String)> {
    let guide = std::fs::read_dir(root().join("docs/guide")).expect("there is a guide");
    let mut names: Vec<String> = guide
        .flatten()
        .map(|entry| format!("docs/guide/{}", entry.file_name().to_string_lossy()))
        .filter(|name| name.ends_with(".md"))
        .collect();
    names.push("README.md".to_owned());
    names.sort();
    assert!(names.len() > 4, "the guide is missing: {names:?}");
    names.into_iter().map(|name| (name.clone(), read(&name))).collect()
}

/// The fenced blocks of a document that are marked with `language`.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<(bool, String)> = None;
    for line in text.lines() {
        match (&mut open, line.trim_start().strip_prefix("```")) {
            (None, Some(marked)) => open = Some((marked == language, String::new())),
            (None, None) => {}
            (Some(_), Some(_)) => {
                blocks.extend(open.take().filter(|(wanted, _)| *wanted).map(|(_, block)| block))
            }
            (Some((_, block)), None) => {
                block.push_str(line);
                block.push('\n');
            }
        }
    }
    assert!(open.is_none(), "a block is not closed");
    blocks
}

/// What a document tells its reader to type after `postrider`: lines with a prompt, and words between backticks.
fn command_lines(text: &str) -> Vec<String> {
    let typed = blocks(text, "console").concat().replace("\\\n", " ");
    let typed = typed.lines().filter_map(|line| line.strip_prefix("$ ").map(str::to_owned));
    let prose: String = text.split("```").step_by(2).collect();
    let quoted: Vec<String> =
        prose.split('`').skip(1).step_by(2).map(|span| span.replace('\n', " ")).collect();
    typed.chain(quoted).filter_map(|line| after_the_name(&line)).collect()
}

fn after_the_name(line: &str) -> Option<String> {
    let line = line.replace("cargo run --release -- ", "postrider ");
    // Variables may stand before the name of the program.
    let mut words = line.split_whitespace().skip_while(|word| word.starts_with("POSTRIDER_"));
    let rest: Vec<&str> = (words.next() == Some("postrider")).then(|| words.collect())?;
    let end = rest.iter().position(|word| ["|", ">", "&&"].contains(word)).unwrap_or(rest.len());
    let rest = rest[..end].join(" ");
    Some(rest.split(';').next().unwrap_or_default().to_owned())
}

/// The subcommand of a command line, and the options that it is given.
fn taken_apart(line: &str) -> (Vec<String>, Vec<String>) {
    const DEEPER: [&str; 3] = ["dead", "config", "lanes"];
    let (mut command, mut options): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    let mut words = line.split_whitespace();
    while let Some(word) = words.next() {
        let word = word.trim_matches(['…', '[', ']']);
        if word == "--config" || word == "-c" {
            words.next();
        } else if word.starts_with('-') && word.len() > 1 {
            options.push(word.split('=').next().unwrap_or(word).to_owned());
        } else if command.is_empty() || (command.len() == 1 && DEEPER.contains(&command[0].as_str())) {
            // A capital is a placeholder: `dead requeue MESSAGE`.
            if !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase()) {
                command.push(word.to_owned());
            }
        }
    }
    (command, options)
}

#[test]
fn the_program_in_the_readme_is_the_example_that_runs() {
    let shown = blocks(&read("README.md"), "rust");
    assert_eq!(shown.len(), 1, "the README has one program");
    assert_eq!(shown[0], read("crates/postrider/examples/first_outbox.rs"));
}

#[test]
fn every_command_and_option_that_is_named_exists() {
    let folder = Folder::new();
    let mut helps: BTreeMap<Vec<String>, String> = BTreeMap::new();
    let mut tried = 0;
    for (name, text) in documents() {
        for line in command_lines(&text) {
            let (command, options) = taken_apart(&line);
            let help = helps.entry(command.clone()).or_insert_with(|| {
                let mut arguments: Vec<&str> = command.iter().map(String::as_str).collect();
                arguments.push("--help");
                let run = folder.run(&arguments);
                assert_eq!(run.code, 0, "{name}: `postrider {line}`: {run:?}");
                run.out
            });
            let known: Vec<&str> = help.split([' ', ',', '\n', '.']).map(str::trim).collect();
            for option in &options {
                assert!(
                    known.contains(&option.as_str()),
                    "{name}: `postrider {line}` has no {option}: {help}"
                );
            }
            tried += 1;
        }
    }
    assert!(tried > 30, "only {tried} command lines were found: they are looked for in the wrong way");
    for expected in ["serve", "send", "status", "list", "dead", "lanes", "migrate", "schema", "routes"] {
        let found = helps.keys().any(|command| command.first().is_some_and(|word| word == expected));
        assert!(found, "the guide says nothing of `postrider {expected}`");
    }
}

#[test]
fn every_file_of_settings_in_the_guide_is_good() {
    let mut checked = 0;
    for (name, text) in documents() {
        for settings in blocks(&text, "toml") {
            let run = Folder::with(&settings).run(&["config", "check"]);
            assert_eq!(run.code, 0, "{name}: {run:?}\n{settings}");
            assert!(
                !run.err.contains("warning") && !run.out.contains("warning"),
                "{name}: {run:?}\n{settings}"
            );
            checked += 1;
        }
    }
    assert!(checked > 1, "only {checked} files were found");
}

#[test]
fn every_setting_is_in_the_guide() {
    fn names(value: &Value, found: &mut Vec<String>) {
        for (name, inner) in value.as_object().into_iter().flatten() {
            match name.as_str() {
                "retention" => {
                    let kept = inner.as_object().into_iter().flatten();
                    found.extend(kept.map(|(kind, _)| format!("retention.{kind}")));
                }
                _ => {
                    found.push(name.clone());
                    names(inner, found);
                }
            }
        }
    }
    let guide = read("docs/guide/configuration.md");
    let settings = Folder::new().json(&["config", "show"]);
    let mut found = Vec::new();
    for (section, value) in settings.as_object().expect("a table") {
        match section.as_str() {
            // Their tables have names that a user chooses.
            "brokers" | "routes" | "consumers" => {
                value.as_object().into_iter().flatten().for_each(|(_, table)| names(table, &mut found));
            }
            _ => names(value, &mut found),
        }
    }
    assert!(found.len() > 20, "{found:?}");
    for name in found {
        assert!(guide.contains(&format!("`{name}`")), "docs/guide/configuration.md has no `{name}`");
    }
}

#[test]
fn the_requests_of_the_readme_are_accepted() {
    let folder = Folder::new();
    let server = folder.serve(&[]);
    let typed = blocks(&read("README.md"), "console").concat().replace("\\\n", " ");
    let mut asked = 0;
    for line in typed.lines().filter_map(|line| line.strip_prefix("$ curl ")) {
        let url = line.split('"').find(|part| part.starts_with("http://")).expect("a URL in quotes");
        let url = url
            .replace("http://localhost:5299", &server.producer)
            .replace("http://localhost:5287", &server.consumer);
        let body = line.split_once("-d '").and_then(|(_, rest)| rest.split_once('\'')).map(|(body, _)| body);
        let (status, answer) = match body {
            Some(body) => server.post(&url, body),
            None => server.get(&url),
        };
        assert!((200..300).contains(&status), "{line}: {status} {answer}");
        asked += 1;
    }
    assert!(asked > 1, "only {asked} requests were found");
}

#[test]
fn every_call_of_the_api_is_in_the_guide_and_no_other() {
    let guide = read("docs/guide/http-api.md");
    let folder = Folder::new();
    let server = folder.serve(&[]);
    let mut described = Vec::new();
    for listener in [&server.producer, &server.consumer] {
        let (_, description) = server.get(&format!("{listener}/openapi.json"));
        let paths = description["paths"].as_object().expect("paths").clone();
        described.extend(paths.into_iter().flat_map(|(path, calls)| {
            let methods: Vec<String> =
                calls.as_object().into_iter().flatten().map(|(name, _)| name.to_uppercase()).collect();
            methods.into_iter().map(move |method| format!("{method} {path}"))
        }));
    }
    assert!(described.len() > 20, "{described:?}");
    for call in &described {
        let short = call.replace("/{id}/discard", "/{id}/requeue`, `…/discard");
        assert!(
            guide.contains(&format!("`{call}`")) || guide.contains(&short),
            "docs/guide/http-api.md has no {call}"
        );
    }
    for span in guide.split('`').filter(|span| span.contains(" /api/") && !span.contains('\n')) {
        assert!(described.iter().any(|call| call == span), "there is no call {span}");
    }
}
