//! How processes on one machine notice that another one is dead without waiting for its leases to end.
//!
//! Each open broker holds the lock of a small file beside the database. The system frees the lock when the
//! process ends, however it ends; whoever can take it knows that the members of that process are gone. A
//! process that hangs keeps its lock: for it, the lease decides.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::Error;

/// The lock that this process holds while its broker is open.
#[derive(Debug)]
pub(super) struct Presence {
    folder: PathBuf,
    name: String,
    /// Members that were not closed are left to whoever finds this unlocked.
    _lock: File,
}

impl Presence {
    /// Shows that this process lives.
    pub(super) fn announce(database: &Path) -> Result<Self, Error> {
        let mut folder = database.as_os_str().to_owned();
        folder.push("-presence");
        let folder = PathBuf::from(folder);
        let name = Uuid::now_v7().simple().to_string();
        // Locked under a name that nobody looks at, so that it is never seen unlocked while it lives.
        let hidden = folder.join(format!(".{name}"));
        let announce = || {
            fs::create_dir_all(&folder)?;
            let file = OpenOptions::new().write(true).create_new(true).open(&hidden)?;
            file.lock()?;
            fs::rename(&hidden, folder.join(&name))?;
            Ok(file)
        };
        let file = announce().map_err(|error: std::io::Error| Error::Presence {
            path: folder.join(&name).display().to_string(),
            reason: error.to_string(),
        })?;
        Ok(Self { folder, name, _lock: file })
    }

    /// What members of this process are known by.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The presences whose processes have ended. Their files stay until [`clear`](Self::clear).
    pub(super) fn dead(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Vec::new() };
        entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| !name.starts_with('.') && *name != self.name && self.is_dead(name))
            .collect()
    }

    fn is_dead(&self, name: &str) -> bool {
        // Any doubt means that it lives: its lease decides then.
        let Ok(file) = OpenOptions::new().write(true).open(self.folder.join(name)) else { return false };
        file.try_lock().is_ok()
    }

    /// Removes the files of presences whose members are gone from the database.
    pub(super) fn clear(&self, dead: &[String]) {
        for name in dead {
            // Another process may have been faster.
            let _ = fs::remove_file(self.folder.join(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_presence_is_dead_once_its_holder_is_gone_and_not_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let database = folder.path().join("broker.db");
        let one = Presence::announce(&database).expect("one");
        let two = Presence::announce(&database).expect("two");
        assert_eq!((one.dead(), two.dead()), (vec![], vec![]));
        let name = two.name().to_owned();
        drop(two);
        assert_eq!(one.dead(), vec![name.clone()]);
        one.clear(&[name]);
        assert_eq!(one.dead(), Vec::<String>::new());
    }
}
