//! Runs the real command in a folder of its own and talks to its real servers.
//!
//! Nothing here sleeps to let things happen: it waits for a condition, with a limit after which the test fails and says
//! what it saw last.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use reqwest::blocking::Client;
use serde_json::Value;
use tempfile::TempDir;

/// How long anything may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A folder in which `postrider` is run.
pub(crate) struct Folder {
    folder: TempDir,
    variables: Vec<(String, String)>,
}

/// What a run of the command left.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Folder {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder for the test"), variables: Vec::new() }
    }

    /// A folder with these settings in its `postrider.toml`.
    pub(crate) fn with(settings: &str) -> Self {
        let folder = Self::new();
        folder.write("postrider.toml", settings);
        folder
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, content).expect("the folder can be written");
        path
    }

    /// Sets an environment variable for every run from now on.
    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("POSTRIDER")) {
            command.env_remove(name);
        }
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .env_remove("RUST_LOG")
            .envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs the command to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Run {
        self.run_with(arguments, "")
    }

    /// Runs the command to its end with `input` on its standard input.
    pub(crate) fn run_with(&self, arguments: &[&str], input: &str) -> Run {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        // A command that does not read its input closes the pipe, which is no failure of the test.
        let _ = child.stdin.take().expect("it is piped").write_all(input.as_bytes());
        let output = child.wait_with_output().expect("the command ends");
        Run {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Runs the command with `--json`, which must succeed.
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        let mut with = vec!["--json"];
        with.extend(arguments);
        let run = self.run(&with);
        assert_eq!(run.code, 0, "{arguments:?}: {run:?}");
        serde_json::from_str(&run.out).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {run:?}"))
    }

    /// Starts `serve` on free ports and waits until it says where it listens.
    pub(crate) fn serve(&self, arguments: &[&str]) -> Server {
        let mut with =
            vec!["--json", "serve", "--listen-producer", "127.0.0.1:0", "--listen-consumer", "127.0.0.1:0"];
        with.extend(arguments);
        let log = self.path().join(format!("serve-{}.log", self.logs()));
        let mut child = self
            .command(&with)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).expect("the folder can be written"))
            .spawn()
            .expect("the command starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("it is piped"))
            .read_line(&mut line)
            .expect("a line of output");
        let banner: Value = serde_json::from_str(&line).unwrap_or_else(|error| {
            panic!("{error}: {line:?}: {}", std::fs::read_to_string(&log).unwrap_or_default())
        });
        let url = |part: &str| banner[part].as_str().unwrap_or_default().to_owned();
        Server { producer: url("producer"), consumer: url("consumer"), child, log, client: Client::new() }
    }

    fn logs(&self) -> usize {
        let entries = std::fs::read_dir(self.path()).expect("the folder can be read");
        entries.flatten().filter(|entry| entry.file_name().to_string_lossy().ends_with(".log")).count()
    }
}

impl Run {
    /// The run failed with this exit code and said these words.
    #[track_caller]
    pub(crate) fn failed(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "should say {word:?}: {self:?}");
        }
        assert!(!self.err.contains("panicked"), "{self:?}");
    }

    /// The run succeeded and its answer has these words.
    #[track_caller]
    pub(crate) fn answered(&self, words: &[&str]) {
        assert_eq!(self.code, 0, "{self:?}");
        for word in words {
            assert!(self.out.contains(word), "should say {word:?}: {self:?}");
        }
    }
}

/// A running `serve`. Killed when it is dropped, so that a failed test leaves nothing behind.
pub(crate) struct Server {
    pub(crate) producer: String,
    pub(crate) consumer: String,
    pub(crate) log: PathBuf,
    child: Child,
    client: Client,
}

impl Server {
    pub(crate) fn get(&self, url: &str) -> (u16, Value) {
        let response = self.client.get(url).send().expect("the server answers");
        (response.status().as_u16(), response.json().expect("the answer is JSON"))
    }

    pub(crate) fn post(&self, url: &str, body: &str) -> (u16, Value) {
        let request = self.client.post(url).header("content-type", "application/json").body(body.to_owned());
        let response = request.send().expect("the server answers");
        (response.status().as_u16(), response.json().expect("the answer is JSON"))
    }

    /// Asks until the answer is as wanted.
    #[track_caller]
    pub(crate) fn until(&self, url: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        until(|| {
            last = self.get(url).1;
            wanted(&last)
        })
        .unwrap_or_else(|()| panic!("{url} never was as wanted: {last}\n{}", self.said()));
        last
    }

    /// What it has logged so far.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends a signal by name.
    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(status.expect("there is a kill command").success());
    }

    /// Waits for its end and answers its exit code.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        let mut code = None;
        until(|| {
            let ended = self.child.try_wait().expect("it can be waited for");
            code = ended.map(|status| status.code());
            ended.is_some()
        })
        .unwrap_or_else(|()| panic!("it does not end: {}", self.said()));
        code.flatten()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Asks again and again until it is so, or until patience is over.
pub(crate) fn until(mut so: impl FnMut() -> bool) -> Result<(), ()> {
    let start = Instant::now();
    while !so() {
        if start.elapsed() > PATIENCE {
            return Err(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Speaks HTTP by hand, for requests that no client would send.
pub(crate) fn raw(address: &str, request: &str) -> String {
    let mut stream = std::net::TcpStream::connect(address.trim_start_matches("http://")).expect("it listens");
    // A server that has read enough hangs up before all is written: that is an answer too.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}
