//! Handlers that are programs: the payload on standard input, everything else in the environment.
//!
//! Exit codes are those of sysexits.h, which mail systems have used for this very question for decades.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use store::{Arrival, Handled};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use super::{BadHandler, retry};

/// How long a program may run when nothing else is said.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Its last words are waited for this long after it ended: a process that it left behind may hold the pipe.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Characters of standard error that are kept.
const SHOWN: usize = 500;

/// "The data was wrong": this message will never succeed.
const EX_DATAERR: i32 = 65;

/// Runs a program for each message.
///
/// Exit code 0 is done, 65 (`EX_DATAERR`) says that the message will never succeed, and any other, 75
/// (`EX_TEMPFAIL`) among them, that it should be tried again. A program that cannot be started pauses the group.
#[derive(Clone, Debug)]
pub struct CommandHandler {
    program: String,
    arguments: Vec<String>,
    timeout: Duration,
}

impl CommandHandler {
    /// Runs `program` with `arguments`. No shell is involved.
    pub fn new(program: impl Into<String>, arguments: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let arguments = arguments.into_iter().map(Into::into).collect();
        Self { program: program.into(), arguments, timeout: TIMEOUT }
    }

    /// The words of a command line: apart by spaces, with quotes around words that have some. Nothing is expanded.
    ///
    /// # Errors
    /// When the first word, the program, is missing, or a quote is not closed.
    pub fn words(line: &str) -> Result<Vec<String>, BadHandler> {
        let words = words(line)?;
        match words.first() {
            Some(program) if !program.is_empty() => Ok(words),
            _ => Err(BadHandler("the command names no program".to_owned())),
        }
    }

    /// How long it may run. Then it is killed, and the message is tried again.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Its time limit, and a moment to kill it and hear its last words.
    pub(crate) fn limit(&self) -> Duration {
        self.timeout + Duration::from_secs(2)
    }

    pub(crate) async fn handle(&self, group: &str, arrival: &Arrival) -> Handled {
        match self.start(group, arrival, Stdio::null()) {
            Ok(child) => self.run(child, arrival).await,
            Err(handled) => handled,
        }
    }

    /// The same, for those who want to know what it wrote, `most` bytes of it, when it is done with a message.
    pub(crate) async fn ask(&self, group: &str, arrival: &Arrival, most: usize) -> Result<Vec<u8>, Handled> {
        let mut child = self.start(group, arrival, Stdio::piped())?;
        let listen = tokio::spawn(all(child.stdout.take(), most));
        let abort = listen.abort_handle();
        let handled = self.run(child, arrival).await;
        if handled != Handled::Done {
            abort.abort();
            return Err(handled);
        }
        match tokio::time::timeout(LAST_WORDS, listen).await {
            Ok(Ok(Ok(Some(written)))) => Ok(written),
            Ok(Ok(Ok(None))) => Err(retry(self.said(&format!("wrote more than {most} bytes"), ""))),
            Ok(Ok(Err(error))) => Err(retry(self.said("cannot be heard", &error.to_string()))),
            _ => {
                abort.abort();
                let what = "left a process behind that holds its standard output open";
                Err(retry(self.said(what, "")))
            }
        }
    }

    async fn run(&self, mut child: Child, arrival: &Arrival) -> Handled {
        let payload = arrival.message.payload.clone();
        let stdin = child.stdin.take();
        let stderr = child.stderr.take();
        let feed = async move {
            if let Some(mut stdin) = stdin {
                // A program may end without reading all of it; that is its own business.
                let _ = stdin.write_all(&payload).await;
            }
        };
        let listen = tokio::spawn(last_words(stderr));
        let ended = tokio::time::timeout(self.timeout, async { tokio::join!(feed, child.wait()).1 }).await;
        if ended.is_err() {
            // By its own handle, so that no other process with a recycled id can be hit.
            let _ = child.kill().await;
        }
        let abort = listen.abort_handle();
        let words = match tokio::time::timeout(LAST_WORDS, listen).await {
            Ok(Ok(words)) => words,
            _ => {
                abort.abort();
                String::new()
            }
        };
        match ended {
            Ok(Ok(status)) => self.judge(status, &words),
            Ok(Err(error)) => retry(format!("`{}` could not be waited for: {error}", self.program)),
            Err(_) => retry(self.said(&format!("was killed after {:?}", self.timeout), &words)),
        }
    }

    fn start(&self, group: &str, arrival: &Arrival, stdout: Stdio) -> Result<Child, Handled> {
        let message = &arrival.message;
        let headers = serde_json::to_string(&message.headers).unwrap_or_default();
        let variables: [(&str, Option<String>); 11] = [
            ("POSTRIDER_MESSAGE_ID", Some(message.id.to_string())),
            ("POSTRIDER_IDEMPOTENCY_KEY", Some(format!("{group}:{}", message.id))),
            ("POSTRIDER_GROUP", Some(group.to_owned())),
            ("POSTRIDER_TOPIC", Some(message.topic.clone())),
            ("POSTRIDER_KEY", message.key.clone()),
            ("POSTRIDER_TYPE", message.kind.clone()),
            ("POSTRIDER_CONTENT_TYPE", Some(message.content_type.clone())),
            ("POSTRIDER_HEADERS", Some(headers)),
            ("POSTRIDER_OCCURRED_AT", Some(message.occurred_at.to_rfc3339())),
            ("POSTRIDER_SEQ", arrival.seq.map(|seq| seq.to_string())),
            ("POSTRIDER_DELIVERY", Some(arrival.delivery.to_string())),
        ];
        let mut command = Command::new(OsStr::new(&self.program));
        command.args(&self.arguments).stdin(Stdio::piped()).stdout(stdout).stderr(Stdio::piped());
        command.kill_on_drop(true);
        for (name, value) in variables {
            match value {
                Some(value) if value.contains('\0') => {
                    let error = format!("{name} has a NUL byte, which no environment can carry");
                    return Err(Handled::Dead { error });
                }
                Some(value) => command.env(name, value),
                // Or a variable of our own environment would be taken for the message's.
                None => command.env_remove(name),
            };
        }
        command.spawn().map_err(|error| match error.kind() {
            ErrorKind::ArgumentListTooLong => Handled::Dead {
                error: format!("the headers of this message do not fit in the environment: {error}"),
            },
            _ => Handled::Unavailable { error: format!("`{}` cannot be started: {error}", self.program) },
        })
    }

    fn judge(&self, status: ExitStatus, words: &str) -> Handled {
        match status.code() {
            Some(0) => Handled::Done,
            Some(EX_DATAERR) => Handled::Dead { error: self.said("ended with code 65", words) },
            Some(code) => retry(self.said(&format!("ended with code {code}"), words)),
            None => retry(self.said(&format!("was ended by a {status}"), words)),
        }
    }

    fn said(&self, what: &str, words: &str) -> String {
        let program = &self.program;
        if words.is_empty() { format!("`{program}` {what}") } else { format!("`{program}` {what}: {words}") }
    }
}

/// All that a program wrote; nothing where it is more than `most`. It is read to the end all the same, or the program would
/// wait for it.
async fn all(stream: Option<impl AsyncRead + Unpin>, most: usize) -> std::io::Result<Option<Vec<u8>>> {
    let Some(mut stream) = stream else { return Ok(Some(Vec::new())) };
    let mut written = Vec::new();
    let mut chunk = [0; 4096];
    let mut fits = true;
    loop {
        let read = stream.read(&mut chunk).await?;
        if read == 0 {
            return Ok(fits.then_some(written));
        }
        fits &= written.len() + read <= most;
        if fits {
            written.extend_from_slice(&chunk[..read]);
        }
    }
}

/// The end of what a program wrote, however much that is.
async fn last_words(stream: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut stream) = stream else { return String::new() };
    let mut tail = Vec::new();
    let mut chunk = [0; 4096];
    while let Ok(read @ 1..) = stream.read(&mut chunk).await {
        tail.extend_from_slice(&chunk[..read]);
        // Four bytes are the longest character.
        let excess = tail.len().saturating_sub(SHOWN * 4);
        tail.drain(..excess);
    }
    let text = String::from_utf8_lossy(&tail);
    let text = text.trim();
    let skip = text.chars().count().saturating_sub(SHOWN);
    text.chars().skip(skip).collect()
}

fn words(line: &str) -> Result<Vec<String>, BadHandler> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for character in line.chars() {
        match (quote, character) {
            (Some(open), _) if character == open => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(character),
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, _) if character.is_whitespace() => words.extend(word.take()),
            (None, _) => word.get_or_insert_default().push(character),
        }
    }
    if let Some(open) = quote {
        return Err(BadHandler(format!("the command has a {open} that is not closed")));
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use message::Message;

    fn shell(script: &str) -> CommandHandler {
        CommandHandler::new("sh", ["-c", script])
    }

    async fn run(handler: CommandHandler) -> Handled {
        let message = Message::new("orders", r#"{"n":1}"#).key("k1").kind("OrderPlaced");
        handler.handle("billing", &Arrival { message, seq: Some(7), delivery: 2 }).await
    }

    #[tokio::test]
    async fn exit_codes_say_done_retry_or_dead_and_the_last_words_are_the_reason() {
        assert_eq!(run(shell("exit 0")).await, Handled::Done);
        let Handled::Dead { error } = run(shell("echo bad order >&2; exit 65")).await else {
            panic!("not dead")
        };
        assert_eq!(error, "`sh` ended with code 65: bad order");
        for code in [1, 75] {
            let handled = run(shell(&format!("exit {code}"))).await;
            assert_eq!(handled, retry(format!("`sh` ended with code {code}")));
        }
        let Handled::Retry { error, .. } = run(shell("kill -9 $$")).await else { panic!("not retried") };
        assert!(error.contains("signal"), "{error}");
    }

    #[tokio::test]
    async fn the_payload_is_on_standard_input_and_the_rest_in_the_environment() {
        let script = r#"test "$(cat)" = '{"n":1}' && test "$POSTRIDER_TOPIC/$POSTRIDER_KEY/$POSTRIDER_TYPE" = orders/k1/OrderPlaced \
            && test "$POSTRIDER_SEQ.$POSTRIDER_DELIVERY" = 7.2 && test "$POSTRIDER_IDEMPOTENCY_KEY" = "billing:$POSTRIDER_MESSAGE_ID""#;
        assert_eq!(run(shell(script)).await, Handled::Done);
    }

    #[tokio::test]
    async fn a_program_that_hangs_is_killed_and_one_that_is_missing_blames_no_message() {
        let handled = run(shell("exec sleep 60").timeout(Duration::from_millis(100))).await;
        assert_eq!(handled, retry("`sh` was killed after 100ms".to_owned()));
        let handled = run(CommandHandler::new("/no/such/program", [""; 0])).await;
        assert!(matches!(handled, Handled::Unavailable { .. }), "{handled:?}");
    }

    #[tokio::test]
    async fn a_program_that_does_not_read_and_talks_too_much_does_no_harm() {
        let message = Message::new("orders", vec![b'x'; 1 << 20]);
        let arrival = Arrival { message, seq: None, delivery: 0 };
        assert_eq!(shell("exec true").handle("g", &arrival).await, Handled::Done);
        let Handled::Retry { error, .. } = run(shell("seq 100000 >&2; exit 3")).await else {
            panic!("not retried")
        };
        assert!(error.ends_with("99999\n100000") && error.len() < 600, "{error}");
    }

    #[tokio::test]
    async fn a_message_that_no_environment_can_carry_is_dead() {
        let message = Message::new("orders", "{}").key("a\0b");
        let handled = shell("exit 0").handle("g", &Arrival { message, seq: None, delivery: 0 }).await;
        assert!(matches!(handled, Handled::Dead { .. }), "{handled:?}");
    }

    #[test]
    fn a_command_line_is_split_at_spaces_outside_quotes() {
        let split = |line: &str| words(line).expect("closed quotes");
        assert_eq!(split("notify --to 'all users' \"it's\" ''"), ["notify", "--to", "all users", "it's", ""]);
        assert!(words("notify 'open").is_err());
        assert!(CommandHandler::words("  ").is_err());
    }
}
