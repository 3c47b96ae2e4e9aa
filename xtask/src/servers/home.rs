//! The folder that holds the servers' data, logs and the notes by which a later run finds them.
//!
//! It lies outside the clone: root does not run servers, and the users that do can often not enter a clone. For a
//! server named `redis` it holds `redis/` (its data), `redis.log` and `redis.json` (port and process). Settings in
//! `redis.added`, if somebody put them there, are added to the usual ones.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::Server;
use super::process::Process;

/// Open, and this run's alone until dropped.
pub(super) struct Home {
    folder: PathBuf,
    _alone: File,
}

impl Home {
    /// Makes it where it does not exist.
    pub(super) fn open(folder: Option<&Path>) -> Result<Self> {
        ensure!(
            Path::new("/proc/self/stat").exists(),
            "servers can be started on Linux only: give the tests URLs in POSTRIDER_TEST_POSTGRES and its like"
        );
        let asked = folder.map_or_else(usual, Path::to_owned);
        if !asked.exists() {
            std::fs::create_dir_all(&asked).with_context(|| format!("cannot make {}", asked.display()))?;
            std::fs::set_permissions(&asked, PermissionsExt::from_mode(0o755))?;
        }
        if folder.is_none() {
            own(&asked)?;
        }
        let folder = asked.canonicalize()?;
        if is_root() {
            enterable(&folder)?;
        }
        let alone = lock(&folder.join("lock"), || eprintln!("waiting for another `cargo xtask servers`"))?;
        Ok(Self { folder, _alone: alone })
    }

    /// Only where it exists: who stops or looks makes nothing.
    pub(super) fn find(folder: Option<&Path>) -> Result<Option<Self>> {
        let exists = folder.map_or_else(usual, Path::to_owned).exists();
        exists.then(|| Self::open(folder)).transpose()
    }

    /// The server's part, run by the user that its package made where this user is root.
    pub(super) fn place(&self, server: &dyn Server) -> Result<Place> {
        let runs_as = if is_root() { Some(Owner::named(server.user())?) } else { None };
        Ok(Place { runs_as, ..self.place_of_past(server) })
    }

    /// The server's part, for looking and stopping: the package need not be there any more.
    pub(super) fn place_of_past(&self, server: &dyn Server) -> Place {
        let file = |suffix: &str| self.folder.join(format!("{}{suffix}", server.name()));
        Place { data: file(""), log: file(".log"), state: file(".json"), runs_as: None }
    }
}

/// One server's part of the home.
pub(super) struct Place {
    pub(super) data: PathBuf,
    pub(super) log: PathBuf,
    state: PathBuf,
    runs_as: Option<Owner>,
}

impl Place {
    /// A program run as the server's user, and with nothing of ours: what a server does must not depend on
    /// `PGOPTIONS` or `TZ` of whoever started it.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = clean(program);
        command.current_dir(self.data.parent().unwrap_or(&self.data));
        if let Some(Owner { user, group }) = self.runs_as {
            command.uid(user).gid(group);
        }
        command
    }

    /// Settings that somebody added to this server, in its own form: those of Kafka and RabbitMQ stand in their files, those
    /// of the others are arguments, one in a line.
    pub(super) fn added(&self) -> String {
        std::fs::read_to_string(self.data.with_extension("added")).unwrap_or_default()
    }

    /// Makes the data folder, whole or not at all.
    pub(super) fn create(&self, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let unfinished = self.data.with_extension("unfinished");
        if unfinished.exists() {
            std::fs::remove_dir_all(&unfinished)?;
        }
        std::fs::create_dir(&unfinished)?;
        std::fs::set_permissions(&unfinished, PermissionsExt::from_mode(0o700))?;
        if let Some(Owner { user, group }) = self.runs_as {
            std::os::unix::fs::chown(&unfinished, Some(user), Some(group))?;
        }
        fill(&unfinished)?;
        std::fs::rename(&unfinished, &self.data)?;
        Ok(())
    }

    /// Starts a server that outlives this run and its terminal's Ctrl-C.
    pub(super) fn spawn(&self, mut command: Command) -> Result<Process> {
        let log = OpenOptions::new().create(true).append(true).open(&self.log)?;
        command.stdout(log.try_clone()?).stderr(log).process_group(0);
        let child = command.spawn().with_context(|| format!("cannot start {:?}", command.get_program()))?;
        let ended = || format!("it ended at once; the end of its log ({}):", self.log.display());
        Process::of(child.id()).with_context(|| format!("{}\n{}", ended(), self.log_end()))
    }

    /// The last lines of the log: what a server that failed had to say.
    pub(super) fn log_end(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        last_lines(&String::from_utf8_lossy(&log), 8)
    }

    /// Removes everything that the server left.
    pub(super) fn wipe(&self) -> Result<()> {
        if self.data.exists() {
            std::fs::remove_dir_all(&self.data)
                .with_context(|| format!("cannot remove {}", self.data.display()))?;
        }
        if self.log.exists() {
            std::fs::remove_file(&self.log)?;
        }
        // Last: without it a wipe cut short would leave a folder that no later wipe dares to touch.
        std::fs::remove_file(&self.state)?;
        Ok(())
    }
}

/// What a later run must know of a server.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) port: u16,
    pub(super) process: Option<Process>,
}

impl State {
    pub(super) fn read(place: &Place) -> Result<Option<Self>> {
        if !place.state.exists() {
            return Ok(None);
        }
        let unread = || format!("{} is not a note of `servers up`: remove it", place.state.display());
        Ok(Some(serde_json::from_slice(&std::fs::read(&place.state)?).with_context(unread)?))
    }

    pub(super) fn write(&self, place: &Place) -> Result<()> {
        replace(&place.state, &serde_json::to_vec(self)?)
    }
}

/// Numbers of a user and its group.
#[derive(Clone, Copy)]
struct Owner {
    user: u32,
    group: u32,
}

impl Owner {
    fn named(name: &str) -> Result<Self> {
        let number = |which: &str| -> Result<u32> {
            let output = Command::new("id").args([which, name]).output().context("cannot run id")?;
            ensure!(output.status.success(), "there is no user {name}: the server's package makes it");
            Ok(String::from_utf8(output.stdout)?.trim().parse()?)
        };
        Ok(Self { user: number("-u")?, group: number("-g")? })
    }
}

/// Whether this process may do everything.
pub(super) fn is_root() -> bool {
    user() == 0
}

fn user() -> u32 {
    std::fs::metadata("/proc/self").map_or(u32::MAX, |this| this.uid())
}

/// A program in an environment of nothing but a path.
pub(super) fn clean(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", std::env::join_paths(super::install::folders()).unwrap_or_default());
    command.stdin(Stdio::null());
    command
}

/// Runs a step of a preparation, and shows what it said only if it failed.
pub(super) fn run(mut command: Command) -> Result<()> {
    let program = command.get_program().to_owned();
    let output = command.output().with_context(|| format!("cannot start {}", program.display()))?;
    let said = [output.stdout, output.stderr].concat();
    let said = last_lines(&String::from_utf8_lossy(&said), 8);
    ensure!(output.status.success(), "{} failed:\n{said}", program.display());
    Ok(())
}

/// The last line of what a program says within five seconds, if it succeeds.
pub(super) fn answer(client: &Path, arguments: &[&str]) -> Option<String> {
    let output = clean(Path::new("timeout")).arg("5").arg(client).args(arguments).output().ok()?;
    let said = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    said.lines().last().map(str::to_owned)
}

/// Writes a file that others see either as it was or as it will be.
pub(super) fn replace(file: &Path, content: &[u8]) -> Result<()> {
    let new = file.with_extension("new");
    std::fs::write(&new, content).with_context(|| format!("cannot write {}", new.display()))?;
    std::fs::rename(&new, file)?;
    Ok(())
}

/// Where the clone is: where cargo says that it is now, or where it was built.
pub(super) fn workspace() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).parent().map_or_else(|| PathBuf::from("."), Path::to_owned)
}

/// A home for each clone and user, so that they do not stop each other's servers.
fn usual() -> PathBuf {
    let clone = format!("{}:{}", user(), workspace().display());
    // FNV-1a: the same on every toolchain, for a folder must be found again after an upgrade.
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = clone.bytes().fold(0xcbf2_9ce4_8422_2325, mix);
    // Root's own temporary folder is closed to others on some machines.
    let closed = is_root() && enterable(&std::env::temp_dir()).is_err();
    let temporary = if closed { PathBuf::from("/var/tmp") } else { std::env::temp_dir() };
    temporary.join(format!("postrider-servers-{hash:016x}"))
}

/// The usual home has a name that anyone can guess, in a folder where anyone can write.
fn own(folder: &Path) -> Result<()> {
    let found = folder.symlink_metadata()?;
    ensure!(
        found.is_dir() && found.uid() == user(),
        "{} is not a folder of this user: choose another with --home",
        folder.display()
    );
    Ok(())
}

/// Root's servers run as other users, who must get to their folder.
fn enterable(folder: &Path) -> Result<()> {
    for part in folder.ancestors() {
        let mode = part.metadata()?.mode();
        ensure!(
            mode & 0o001 != 0,
            "the servers' users cannot enter {} (mode {:o}): choose another folder with --home, or `chmod o+x` it",
            part.display(),
            mode & 0o777
        );
    }
    Ok(())
}

/// Holds the file until what is returned is dropped; calls `waiting` if somebody else holds it now.
pub(super) fn lock(file: &Path, waiting: impl FnOnce()) -> Result<File> {
    let lock = OpenOptions::new().create(true).append(true).open(file);
    let lock = lock.with_context(|| format!("cannot write {}", file.display()))?;
    match lock.try_lock() {
        Ok(()) => return Ok(lock),
        Err(TryLockError::WouldBlock) => waiting(),
        Err(TryLockError::Error(error)) => return Err(error.into()),
    }
    lock.lock()?;
    Ok(lock)
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_that_the_servers_users_cannot_enter_is_refused_with_the_way_out() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700)).expect("it is ours");
        let refused = enterable(folder.path()).expect_err("only we can enter it").to_string();
        assert!(refused.contains("mode 700") && refused.contains("--home"), "{refused}");
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o711)).expect("it is ours");
        enterable(folder.path()).expect("everyone can enter it");
    }

    #[test]
    fn a_data_folder_that_could_not_be_filled_is_not_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name| folder.path().join(name);
        let place = Place { data: file("x"), log: file("x.log"), state: file("x.json"), runs_as: None };
        place.create(|_| anyhow::bail!("no space")).expect_err("it was not filled");
        assert!(!place.data.exists());
        place.create(|data| Ok(std::fs::write(data.join("one"), "1")?)).expect("the second try");
        assert!(place.data.join("one").exists());
    }

    #[test]
    fn a_program_that_a_server_runs_sees_nothing_of_our_environment() {
        let seen = clean(Path::new("env")).output().expect("env is there").stdout;
        let seen = String::from_utf8(seen).expect("text");
        assert!(seen.lines().all(|line| line.starts_with("PATH=")), "{seen}");
    }

    #[test]
    fn the_end_of_a_short_log_is_all_of_it() {
        assert_eq!(last_lines("a\nb", 8), "a\nb");
        assert_eq!(last_lines("a\nb\nc", 2), "b\nc");
    }
}
