//! Whether a server's programs are on this machine, and how they come to it.
//!
//! Root installs what is missing; anybody else is told the one command that does. Nothing is skipped: tests that
//! did not run look like tests that passed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::Server;
use super::home::is_root;

/// What is missing, as people call it, and the packages that bring it.
type Missing = (&'static str, &'static [&'static str]);

/// What may be missing: a name for people, its Debian packages, and whether it is there.
struct Need {
    name: &'static str,
    packages: &'static [&'static str],
    there: fn() -> bool,
}

/// What tests use beside the servers, and what their build does.
const TOOLS: [Need; 6] = [
    Need {
        name: "OpenSSL's headers",
        packages: &["libssl-dev", "pkg-config"],
        there: || find("pkg-config").is_some() && Path::new("/usr/include/openssl/ssl.h").is_file(),
    },
    Need {
        name: "psycopg",
        packages: &["python3-psycopg"],
        there: || Path::new("/usr/lib/python3/dist-packages/psycopg").is_dir(),
    },
    Need { name: "faketime", packages: &["faketime"], there: || find("faketime").is_some() },
    // It builds the client of somebody who reads what we send to NATS.
    Need { name: "Go", packages: &["golang-go"], there: || find("go").is_some() },
    Need { name: "kcat", packages: &["kcat"], there: || find("kcat").is_some() },
    Need { name: "pgbouncer", packages: &["pgbouncer"], there: || find("pgbouncer").is_some() },
];

/// Brings the programs of the servers that lack them.
pub(super) fn install(servers: &[&'static dyn Server]) -> Result<()> {
    let missing = || -> Vec<Missing> {
        let lacks = servers.iter().filter(|server| !server.installed());
        lacks.map(|server| (server.name(), server.packages())).collect()
    };
    bring(&missing)
}

/// Brings what the tests use beside the servers.
pub(super) fn tools() -> Result<()> {
    let missing = || -> Vec<Missing> {
        TOOLS.iter().filter(|tool| !(tool.there)()).map(|tool| (tool.name, tool.packages)).collect()
    };
    bring(&missing)
}

fn bring(missing: &dyn Fn() -> Vec<Missing>) -> Result<()> {
    match decide(&missing(), is_root(), find("apt-get").is_some()) {
        Decision::Nothing => Ok(()),
        Decision::Refuse(reason) => bail!(reason),
        Decision::Install(packages) => {
            eprintln!("installing {}", packages.join(" "));
            let status = Command::new("sh")
                .args(["-c", include_str!("install.sh"), "install"])
                .args(&packages)
                .stdin(Stdio::null())
                // Standard output is for the URLs alone.
                .stdout(std::io::stderr())
                .status()
                .context("cannot run sh")?;
            let by_hand = format!("apt-get update && apt-get install {}", packages.join(" "));
            ensure!(status.success(), "the packages could not be installed; by hand: {by_hand}");
            if let Some((_, packages)) = missing().first() {
                bail!("{} is installed, but its programs are not where Debian has them", packages.join(" "));
            }
            Ok(())
        }
    }
}

#[derive(Debug, PartialEq)]
enum Decision {
    Nothing,
    Install(Vec<&'static str>),
    /// With what the reader is to do.
    Refuse(String),
}

fn decide(missing: &[Missing], root: bool, debian: bool) -> Decision {
    let packages: Vec<&str> = missing.iter().flat_map(|(_, packages)| *packages).copied().collect();
    let packaged = packages.join(" ");
    let names: Vec<_> = missing.iter().map(|(name, _)| *name).collect();
    let names = names.join(", ");
    match (packages.is_empty(), debian, root) {
        (true, ..) => Decision::Nothing,
        (_, true, true) => Decision::Install(packages),
        (_, true, false) => Decision::Refuse(format!(
            "not installed: {names}. Run: sudo apt-get update && sudo apt-get install {packaged}"
        )),
        (_, false, _) => Decision::Refuse(format!(
            "not installed: {names}. Without apt-get they cannot be installed from here: install what Debian calls \
             {packaged}, or give the tests URLs in POSTRIDER_TEST_POSTGRES and its like"
        )),
    }
}

/// A program, wherever it is usual to have programs.
pub(super) fn find(program: &str) -> Option<PathBuf> {
    folders().into_iter().map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// A program that [`Server::installed`] has seen.
pub(super) fn found(program: &str) -> Result<PathBuf> {
    find(program).with_context(|| format!("{program} is not installed any more"))
}

/// The caller's path, and the folders of servers, which are not on an ordinary user's path.
pub(super) fn folders() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    let mut folders: Vec<_> = std::env::split_paths(&path).filter(|folder| folder.is_absolute()).collect();
    folders.extend(usual.iter().map(|folder| Path::new(folder).to_owned()));
    folders
}

#[cfg(test)]
mod tests {
    use super::super::{ALL, mariadb::MariaDb, redis::Redis};
    use super::*;

    fn need(server: &'static dyn Server) -> Missing {
        (server.name(), server.packages())
    }

    #[test]
    fn where_nothing_is_missing_nothing_is_done() {
        for (root, debian) in [(true, true), (true, false), (false, true), (false, false)] {
            assert_eq!(decide(&[], root, debian), Decision::Nothing);
        }
    }

    #[test]
    fn root_on_debian_installs_what_is_missing_and_no_more() {
        let decided = decide(&[need(&MariaDb), need(&Redis)], true, true);
        assert_eq!(decided, Decision::Install(vec!["mariadb-server", "redis-server"]));
    }

    #[test]
    fn an_ordinary_user_is_told_the_command() {
        let Decision::Refuse(reason) = decide(&[need(&Redis)], false, true) else {
            panic!("it may not install")
        };
        assert!(reason.ends_with("sudo apt-get update && sudo apt-get install redis-server"), "{reason}");
        assert!(!reason.contains('\n'), "one line: {reason}");
    }

    #[test]
    fn without_apt_get_everybody_is_told_what_to_bring() {
        for root in [true, false] {
            let Decision::Refuse(reason) = decide(&ALL.map(need), root, false) else {
                panic!("there is nothing to run")
            };
            assert!(reason.contains("mariadb-server") && reason.contains("POSTRIDER_TEST_"), "{reason}");
        }
    }
}
