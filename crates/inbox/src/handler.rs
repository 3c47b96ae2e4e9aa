//! What a group does with a message: the kinds of handler, and the seam for handlers of one's own.

pub(crate) mod command;
#[cfg(feature = "http")]
pub(crate) mod http;

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt;
use message::Message;
use store::{Arrival, Handled, Work};

use self::command::CommandHandler;
#[cfg(feature = "http")]
use self::http::HttpHandler;

/// Does the work of a message outside the store's transaction.
///
/// # Contract
/// 1. A message may be handled again after a crash: the same id means the same work.
/// 2. Messages of one topic and key are handled one at a time; others at the same time.
/// 3. [`Handled::Unavailable`] is for when no message could be handled now; it blames none of them. A message that
///    is answered like this again and again while others are handled is to blame after all: that costs it one
///    attempt, as [`Handled::Retry`] would.
#[async_trait]
pub trait Handle: Send + Sync {
    /// Does the work of `arrival` for `group`.
    ///
    /// # Cancel safety
    /// It is dropped when it takes too long, and the message is tried again.
    async fn handle(&self, group: &str, arrival: &Arrival) -> Handled;
}

/// How a transaction of several messages went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Together {
    /// Whether all of them are done; if not, none is.
    pub done: bool,
    /// For how long it was open: what it locked was locked for no longer.
    pub open: Duration,
}

/// Does the work of messages in transactions that make their marks too.
///
/// # Contract
/// 1. [`all`](Self::all) does the work of all of these, in order, and marks them, in one transaction, or does nothing.
/// 2. [`one`](Self::one) does so with one message. One that was done before is [`Handled::Done`], and nothing is done again.
/// 3. Messages of one topic and key are given one call after another.
#[async_trait]
pub trait Transact: Send + Sync {
    /// Does the work of several messages.
    ///
    /// # Cancel safety
    /// It is dropped when it takes too long, and each message is tried alone.
    async fn all(&self, group: &str, arrivals: &[&Arrival]) -> Together;

    /// Does the work of one message.
    ///
    /// # Cancel safety
    /// It is dropped when it takes too long, and the message is tried again.
    async fn one(&self, group: &str, arrival: &Arrival) -> Handled;
}

/// What a closure answers: a [`Handled`], or a plain `Result` whose error means "try again".
pub trait Verdict {
    /// The answer in the inbox's words.
    fn handled(self) -> Handled;
}

impl Verdict for Handled {
    fn handled(self) -> Handled {
        self
    }
}

impl<E: fmt::Display> Verdict for Result<(), E> {
    fn handled(self) -> Handled {
        match self {
            Ok(()) => Handled::Done,
            Err(error) => Handled::Retry { error: error.to_string(), after: None },
        }
    }
}

/// What a run of a handler showed.
#[derive(Debug)]
pub(crate) struct Ran {
    /// What it said of the message.
    pub(crate) handled: Handled,
    /// Whether somebody was there to take the message. If not, what was said is no message's doing.
    pub(crate) reached: bool,
}

/// How a group handles its messages.
#[derive(Clone)]
pub enum Handler {
    /// Writes a line to the log.
    Log,
    /// Runs one SQL statement in the transaction of the mark; see [`Work::Sql`] for its parameters.
    Sql(String),
    /// Runs a piece of Lua in the script of the mark, on an inbox in Redis; see [`Work::Script`].
    Script(String),
    /// POSTs the message to a URL.
    #[cfg(feature = "http")]
    Http(HttpHandler),
    /// Runs a program with the payload on its standard input.
    Command(CommandHandler),
    /// Anything that makes its marks in transactions of its own.
    Transact(Arc<dyn Transact>),
    /// Anything else.
    Custom(Arc<dyn Handle>),
}

impl Handler {
    /// A handler made of a closure, such as `|message| async move { charge(message).await }`.
    pub fn closure<F, R, V>(work: F) -> Self
    where
        F: Fn(Message) -> R + Send + Sync + 'static,
        R: Future<Output = V> + Send + 'static,
        V: Verdict + Send + 'static,
    {
        Self::Custom(Arc::new(Closure(work)))
    }

    /// Its word in the configuration.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Sql(_) => "sql",
            Self::Script(_) => "script",
            #[cfg(feature = "http")]
            Self::Http(_) => "http",
            Self::Command(_) => "command",
            Self::Transact(_) | Self::Custom(_) => "closure",
        }
    }

    /// The work, when the store itself can do it in the transaction of the mark.
    pub(crate) fn in_store(&self) -> Option<Work> {
        match self {
            Self::Log => Some(Work::Mark),
            Self::Sql(statement) => Some(Work::Sql(statement.clone())),
            Self::Script(script) => Some(Work::Script(script.clone())),
            _ => None,
        }
    }

    /// How long it may take with one message, when the handler itself says so.
    pub(crate) fn limit(&self) -> Option<Duration> {
        match self {
            #[cfg(feature = "http")]
            Self::Http(handler) => Some(handler.limit()),
            Self::Command(handler) => Some(handler.limit()),
            _ => None,
        }
    }

    /// Runs it on one message, for `limit` at most. A handler that panics or hangs fails that message only.
    pub(crate) async fn run(&self, group: &str, arrival: &Arrival, limit: Duration) -> Ran {
        let reached = |handled| Ran { handled, reached: true };
        let work = async {
            match self {
                Self::Log | Self::Sql(_) | Self::Script(_) => reached(Handled::Done),
                #[cfg(feature = "http")]
                Self::Http(handler) => handler.handle(group, arrival).await,
                Self::Command(handler) => {
                    let handled = handler.handle(group, arrival).await;
                    // It says so only of a program that cannot be started.
                    Ran { reached: !matches!(handled, Handled::Unavailable { .. }), handled }
                }
                Self::Transact(handler) => reached(handler.one(group, arrival).await),
                Self::Custom(handler) => reached(handler.handle(group, arrival).await),
            }
        };
        match tokio::time::timeout(limit, AssertUnwindSafe(work).catch_unwind()).await {
            Ok(Ok(ran)) => ran,
            Ok(Err(panic)) => reached(retry(format!("the handler panicked: {}", panic_text(panic.as_ref())))),
            Err(_) => reached(retry(format!("the handler took longer than {limit:?}"))),
        }
    }
}

impl fmt::Debug for Handler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The kind alone: a URL or a statement may hold a secret.
        f.debug_tuple("Handler").field(&self.kind()).finish()
    }
}

/// A handler that cannot be used as it is written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadHandler(pub(crate) String);

pub(crate) fn retry(error: String) -> Handled {
    Handled::Retry { error, after: None }
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".to_owned())
}

struct Closure<F>(F);

#[async_trait]
impl<F, R, V> Handle for Closure<F>
where
    F: Fn(Message) -> R + Send + Sync,
    R: Future<Output = V> + Send,
    V: Verdict + Send,
{
    async fn handle(&self, _group: &str, arrival: &Arrival) -> Handled {
        (self.0)(arrival.message.clone()).await.handled()
    }
}
