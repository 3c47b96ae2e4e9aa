//! `target/servers.json`: where `testkit` looks for servers that were started by hand.

use std::path::PathBuf;

use anyhow::Result;

use super::Urls;
use super::home::{lock, replace, workspace};

/// Tells the tests of these, and of those that they know already.
pub(super) fn add(urls: &Urls) -> Result<()> {
    change(|known| known.extend(urls.clone()))
}

/// Forgets the server at this URL; one of the same name elsewhere stays known.
pub(super) fn remove(url: &str) -> Result<()> {
    change(|known| known.retain(|_, known| known != url))
}

fn change(how: impl FnOnce(&mut Urls)) -> Result<()> {
    let file = file();
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    // Servers stop side by side, and those of several homes share this file.
    let _alone = lock(&file.with_extension("lock"), || ())?;
    // One that cannot be read helps nobody: it is written anew.
    let known = std::fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let mut urls: Urls = known.unwrap_or_default();
    how(&mut urls);
    replace(&file, &serde_json::to_vec_pretty(&urls)?)
}

/// In the clone even where the build is elsewhere: this is where the tests look.
fn file() -> PathBuf {
    workspace().join("target/servers.json")
}
