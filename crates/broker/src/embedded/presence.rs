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
    neighbours: Neighbours,
    /// Members that were not closed are left to whoever finds this unlocked.
    _lock: File,
}

/// The presences beside this process's own. Looking at them needs no lock, so whoever may outlive the broker for
/// a moment has this and not the lock.
#[derive(Clone, Debug)]
pub(super) struct Neighbours {
    folder: PathBuf,
    own: String,
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
        Ok(Self { neighbours: Neighbours { folder, own: name }, _lock: file })
    }

    pub(super) fn neighbours(&self) -> Neighbours {
        self.neighbours.clone()
    }
}

impl Neighbours {
    /// What members of this process are known by.
    pub(super) fn own(&self) -> &str {
        &self.own
    }

    /// The presences whose processes have ended. Their files stay until [`clear`](Self::clear).
    pub(super) fn dead(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Vec::new() };
        entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| !name.starts_with('.') && *name != self.own && self.is_dead(name))
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
        let (beside_one, beside_two) = (one.neighbours(), two.neighbours());
        assert_eq!((beside_one.dead(), beside_two.dead()), (vec![], vec![]));
        drop(two);
        assert_eq!(beside_one.dead(), vec![beside_two.own().to_owned()]);
        beside_one.clear(&[beside_two.own().to_owned()]);
        assert_eq!(beside_one.dead(), Vec::<String>::new());
    }
}
