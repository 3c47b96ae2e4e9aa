//! How processes on one machine notice that another one is dead without waiting for its leases to end.
//!
//! Each process that holds leases also holds the lock of a small file beside the database. The system frees the
//! lock when the process ends, however it ends; whoever can take it knows that its leases are nobody's. A process
//! that hangs keeps its lock: for it, the lease decides.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use uuid::Uuid;

/// The lock that this process holds while it lives.
#[derive(Debug)]
pub struct Presence {
    neighbours: Neighbours,
    /// What was not given back is left to whoever finds this unlocked.
    _lock: File,
}

/// The presences beside this process's own. Looking at them needs no lock, so whoever may outlive the lock for a
/// moment has this instead.
#[derive(Clone, Debug)]
pub struct Neighbours {
    folder: PathBuf,
    own: String,
}

impl Presence {
    /// Shows that this process lives, to all who use the database at this path.
    ///
    /// # Errors
    /// When the file cannot be made or locked; says which.
    pub fn announce(database: &Path) -> io::Result<Self> {
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
        let file = announce().map_err(|error: io::Error| {
            let path = folder.join(&name);
            io::Error::new(error.kind(), format!("cannot make the presence file {}: {error}", path.display()))
        })?;
        Ok(Self { neighbours: Neighbours { folder, own: name }, _lock: file })
    }

    /// The others.
    pub fn neighbours(&self) -> Neighbours {
        self.neighbours.clone()
    }
}

impl Neighbours {
    /// What this process is known by.
    pub fn own(&self) -> &str {
        &self.own
    }

    /// The presences whose processes have ended. Their files stay until [`clear`](Self::clear).
    pub fn dead(&self) -> Vec<String> {
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

    /// Removes the files of presences of which the database knows nothing any more.
    pub fn clear(&self, dead: &[String]) {
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
