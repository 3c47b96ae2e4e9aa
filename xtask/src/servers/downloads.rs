//! What is fetched once and used by every server of its kind: folders that outlive the servers' own.
//!
//! They lie beside the homes, where the users that run servers can enter, and appear whole or not at all.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::home::lock;

/// The folder of this name; `fill` is asked only where it is not there yet.
pub(super) fn folder(name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let all = all();
    if !all.exists() {
        std::fs::create_dir_all(&all).with_context(|| format!("cannot make {}", all.display()))?;
        std::fs::set_permissions(&all, PermissionsExt::from_mode(0o755))?;
    }
    // Its name can be guessed, in a folder where anyone can write.
    let found = all.symlink_metadata()?;
    ensure!(found.is_dir() && found.uid() == user(), "{} is not a folder of this user", all.display());
    let whole = all.join(name);
    if whole.exists() {
        return Ok(whole);
    }
    // Several servers may be started at once, and each by its own process.
    let _alone = lock(&all.join(format!("{name}.lock")), || eprintln!("waiting for another download"))?;
    if whole.exists() {
        return Ok(whole);
    }
    let unfinished = all.join(format!("{name}.unfinished"));
    if unfinished.exists() {
        std::fs::remove_dir_all(&unfinished)?;
    }
    std::fs::create_dir(&unfinished)?;
    fill(&unfinished)?;
    std::fs::rename(&unfinished, &whole)?;
    Ok(whole)
}

/// Whether it is there already.
pub(super) fn has(name: &str) -> bool {
    all().join(name).exists()
}

fn all() -> PathBuf {
    // Survives a restart of the machine, and everybody can enter it, unlike root's own cache.
    Path::new("/var/tmp").join(format!("postrider-downloads-{}", user()))
}

fn user() -> u32 {
    std::fs::metadata("/proc/self").map_or(u32::MAX, |this| this.uid())
}
