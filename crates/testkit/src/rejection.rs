//! Running a case where it must fail.

use std::future::Future;
use std::sync::{Arc, Once};
use std::time::Duration;
use std::{panic, thread};

use tokio::sync::Semaphore;

/// A case that still runs after this has not passed.
const TIME_LIMIT: Duration = Duration::from_secs(300);

/// Cases that run at a time: a server has other things to do, and a case's time limit is for itself.
const SIDE_BY_SIDE: usize = 8;

/// Runs `case` to its end, on a runtime of its own.
///
/// # Panics
/// When the case does, or when it does not end.
pub(crate) fn run<F>(case: F)
where
    F: Future<Output = ()> + Send + 'static,
{
    runtime().block_on(async {
        tokio::time::timeout(TIME_LIMIT, case).await.expect("the case should end within five minutes");
    });
}

/// Runs all `cases` side by side and names those that passed, or whose saboteur did nothing. Of those that fail, as they
/// must, nothing is shown.
///
/// # Panics
/// When there is such a case.
pub(crate) fn all_must_fail<F>(cases: Vec<(&'static str, F)>)
where
    F: Future<Output = Struck> + Send + 'static,
{
    quiet();
    let blind: Vec<String> = runtime_of(SABOTAGED).block_on(async {
        let places = Arc::new(Semaphore::new(SIDE_BY_SIDE));
        let start = |(name, case)| {
            let places = Arc::clone(&places);
            let run = async move {
                let _place = places.acquire_owned().await.expect("nobody closes it");
                tokio::time::timeout(TIME_LIMIT, case).await
            };
            (name, tokio::spawn(run))
        };
        let running: Vec<_> = cases.into_iter().map(start).collect();
        let mut blind = Vec::new();
        for (name, case) in running {
            match case.await {
                Ok(Ok(Struck(Err(())))) => {}
                Ok(Ok(Struck(Ok(())))) => blind.push(format!("{name} passes although its rule is broken")),
                Ok(Err(_)) => blind.push(format!("{name} does not end")),
                Err(failed) => blind.push(format!("{name}: {failed}")),
            }
        }
        blind
    });
    assert!(blind.is_empty(), "these cases do not see their saboteur: {blind:#?}");
}

tokio::task_local! {
    /// Whether the saboteur of the case that runs has struck.
    static STRUCK: Arc<dyn Fn() -> bool + Send + Sync>;
}

/// Long enough for anything that happens at all, on a machine that has much to do. Once a rule is broken nobody waits so
/// long for what will not come.
pub(crate) fn patience() -> Duration {
    let struck = STRUCK.try_with(|struck| struck()).unwrap_or(false);
    Duration::from_secs(if struck { 10 } else { 60 })
}

/// How a case ended that was run against its saboteur: `Err` when it failed, as it must.
pub(crate) struct Struck(pub(crate) Result<(), ()>);

/// Runs `case` and says whether it failed, once its saboteur has struck. A case that was waived has nothing to break.
///
/// # Panics
/// When the case failed before `struck` was true: then it failed for another reason, which proves nothing.
pub(crate) async fn sabotaged<F>(
    case: F,
    waived: impl FnOnce() -> bool,
    struck: impl Fn() -> bool + Send + Sync + 'static,
) -> Struck
where
    F: Future<Output = ()> + Send + 'static,
{
    let struck: Arc<dyn Fn() -> bool + Send + Sync> = Arc::new(struck);
    let result = tokio::spawn(STRUCK.scope(Arc::clone(&struck), case)).await;
    if waived() && result.is_ok() {
        return Struck(Err(()));
    }
    assert!(struck(), "its saboteur never came to do its work: {result:?}");
    Struck(result.map_err(drop))
}

/// The name of threads on which a panic is what everybody waits for.
const SABOTAGED: &str = "sabotaged";

/// Keeps the panics of sabotaged cases from hiding the one line that matters.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if thread::current().name() != Some(SABOTAGED) {
                usual(info);
            }
        }));
    });
}

fn runtime() -> tokio::runtime::Runtime {
    runtime_of("case")
}

fn runtime_of(thread: &str) -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .thread_name(thread)
        .worker_threads(4)
        .enable_all()
        .build()
        .expect("a runtime can be started")
}
