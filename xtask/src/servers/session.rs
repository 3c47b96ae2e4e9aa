//! Servers for one run of the tests: what it started goes with it, what it found stays.

use anyhow::Result;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::home::{Home, State};
use super::process::Process;
use super::{ALL, Server, Urls, down, install, tell, up};

/// Runs `tests` with every server's URL, under the name of the environment variable in which tests look for it.
///
/// A variable that is set already names a server of somebody's own: none is started in its place.
pub(crate) fn with_servers(tests: impl FnOnce(&Urls) -> Result<()>) -> Result<()> {
    install::tools()?;
    let wanted: Vec<_> = ALL.iter().copied().filter(|server| !given(&variable(server.name()))).collect();
    if wanted.is_empty() {
        return tests(&Urls::new());
    }
    let ours = Ours::among(&wanted)?;
    ours.stop_when_interrupted()?;
    let names: Vec<_> = wanted.iter().map(|server| server.name().to_owned()).collect();
    let result = up(&names, None).and_then(|urls| {
        tell(&urls)?;
        let urls = urls.into_iter().map(|(name, url)| (variable(&name), url));
        tests(&urls.collect())
    });
    let stopped = ours.stop(result.is_ok());
    // What the tests found is the news; a server that would not stop comes second.
    result.and(stopped)
}

fn variable(name: &str) -> String {
    format!("POSTRIDER_TEST_{}", name.to_uppercase())
}

/// An empty variable gives nothing; `testkit` reads it in the same way.
fn given(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|url| !url.is_empty())
}

/// The servers that did not run before this run, and so must not run after it.
#[derive(Debug, Clone)]
struct Ours {
    /// Their data was there before.
    old: Vec<String>,
    /// Everything of theirs is this run's.
    new: Vec<String>,
}

impl Ours {
    fn among(servers: &[&'static dyn Server]) -> Result<Self> {
        let home = Home::open(None)?;
        let mut ours = Self { old: Vec::new(), new: Vec::new() };
        for &server in servers {
            let name = server.name().to_owned();
            match State::read(&home.place_of_past(server))? {
                None => ours.new.push(name),
                Some(state) if state.process.is_some_and(|process: Process| process.alive()) => {}
                Some(_) => ours.old.push(name),
            }
        }
        Ok(ours)
    }

    /// After a failure the data stays, for somebody will want to look at it.
    fn stop(&self, wipe: bool) -> Result<()> {
        // No names would mean all of them.
        for (names, wipe) in
            [(&self.old, false), (&self.new, wipe)].into_iter().filter(|(names, _)| !names.is_empty())
        {
            down(names, None, wipe)?;
        }
        if !wipe {
            eprintln!("`cargo xtask servers status` says where the servers' data and logs are");
        }
        Ok(())
    }

    fn stop_when_interrupted(&self) -> Result<()> {
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let ours = self.clone();
        std::thread::spawn(move || {
            let Some(signal) = signals.forever().next() else { return };
            if let Err(error) = ours.stop(false) {
                eprintln!("the servers may still run: {error:#}");
            }
            std::process::exit(128 + signal);
        });
        Ok(())
    }
}
