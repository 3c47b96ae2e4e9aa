//! What makes messages of a message: an endpoint, a program or a closure.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use message::{Message, MessageId};
use store::{Arrival, Handled};

use super::answer;
use crate::handler::command::CommandHandler;
#[cfg(feature = "http")]
use crate::handler::http::HttpHandler;
use crate::handler::{Ran, panic_text, retry};

/// How long a closure may take with a message.
const CLOSURE_LIMIT: Duration = Duration::from_secs(30);

type Closure = dyn Fn(Message) -> BoxFuture<'static, Result<Vec<Message>, String>> + Send + Sync;

/// Makes messages of a message.
#[derive(Clone)]
pub struct Maker(Kind);

#[derive(Clone)]
enum Kind {
    #[cfg(feature = "http")]
    Http(HttpHandler),
    Command(CommandHandler),
    Closure(Arc<Closure>),
}

/// What a run of a maker came to.
pub(super) struct Run {
    /// Only where it is done.
    pub(super) made: Vec<Message>,
    pub(super) ran: Ran,
}

impl Maker {
    /// POSTs each message; the answer is `{"messages":[{"topic":…,"message":…}]}`, or nothing at all. What other answers
    /// mean is said by [`HttpHandler`].
    #[cfg(feature = "http")]
    pub fn http(handler: HttpHandler) -> Self {
        Self(Kind::Http(handler))
    }

    /// Runs a program for each message; each line of its standard output is `{"topic":…,"message":…}`. What its exit codes
    /// mean is said by [`CommandHandler`].
    pub fn command(handler: CommandHandler) -> Self {
        Self(Kind::Command(handler))
    }

    /// Calls `work` with each message. An error means that it is tried again.
    pub fn closure<F, R, E>(work: F) -> Self
    where
        F: Fn(Message) -> R + Send + Sync + 'static,
        R: Future<Output = Result<Vec<Message>, E>> + Send + 'static,
        E: fmt::Display,
    {
        let call = move |message| {
            let made = work(message);
            async move { made.await.map_err(|error| error.to_string()) }.boxed()
        };
        Self(Kind::Closure(Arc::new(call)))
    }

    /// Runs it on one message. One that panics or hangs fails that message only.
    pub(super) async fn run(&self, group: &str, arrival: &Arrival) -> Run {
        let limit = self.limit();
        match tokio::time::timeout(limit, AssertUnwindSafe(self.make(group, arrival)).catch_unwind()).await {
            Ok(Ok(run)) => run,
            Ok(Err(panic)) => failed(format!("the handler panicked: {}", panic_text(panic.as_ref()))),
            Err(_) => failed(format!("the handler took longer than {limit:?}")),
        }
    }

    async fn make(&self, group: &str, arrival: &Arrival) -> Run {
        let of = arrival.message.id;
        match &self.0 {
            #[cfg(feature = "http")]
            Kind::Http(handler) => match handler.ask(group, arrival, answer::MOST).await {
                Ok(body) => read(answer::of_body, &body, of),
                Err(ran) => Run { made: Vec::new(), ran },
            },
            Kind::Command(handler) => match handler.ask(group, arrival, answer::MOST).await {
                Ok(written) => read(answer::of_lines, &written, of),
                Err(handled) => {
                    // It says so only of a program that cannot be started.
                    let reached = !matches!(handled, Handled::Unavailable { .. });
                    Run { made: Vec::new(), ran: Ran { handled, reached } }
                }
            },
            Kind::Closure(work) => match work(arrival.message.clone()).await {
                Ok(made) => done(made),
                Err(error) => failed(error),
            },
        }
    }

    fn limit(&self) -> Duration {
        match &self.0 {
            #[cfg(feature = "http")]
            Kind::Http(handler) => handler.limit(),
            Kind::Command(handler) => handler.limit(),
            Kind::Closure(_) => CLOSURE_LIMIT,
        }
    }
}

fn read(read: fn(&[u8], MessageId) -> Result<Vec<Message>, String>, answer: &[u8], of: MessageId) -> Run {
    read(answer, of).map_or_else(failed, done)
}

fn done(made: Vec<Message>) -> Run {
    Run { made, ran: Ran { handled: Handled::Done, reached: true } }
}

fn failed(error: String) -> Run {
    Run { made: Vec::new(), ran: Ran { handled: retry(error), reached: true } }
}

impl fmt::Debug for Maker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The kind alone: a URL may hold a secret.
        let kind = match &self.0 {
            #[cfg(feature = "http")]
            Kind::Http(_) => "http",
            Kind::Command(_) => "command",
            Kind::Closure(_) => "closure",
        };
        f.debug_tuple("Maker").field(&kind).finish()
    }
}
