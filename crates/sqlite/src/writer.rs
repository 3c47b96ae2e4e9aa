//! The thread that owns the writing connection and shares its commits among all who wait.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::oneshot;

use crate::Error;

/// A transaction takes in further jobs for this long at most: past it, the flush that they share costs
/// less than the wait that the first of them would feel.
const SHARING: Duration = Duration::from_millis(20);

/// How long the lock is left free between two transactions when jobs follow each other without pause.
const GAP: Duration = Duration::from_micros(100);

#[derive(Debug)]
pub(crate) struct Writer {
    jobs: Option<Sender<Box<dyn Job>>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    pub(crate) fn start(connection: Connection) -> Result<Self, Error> {
        let (jobs, waiting) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("sqlite-writer".to_owned())
            .spawn(move || run(&connection, &waiting))
            .map_err(|error| Error::Statement(format!("cannot start the writer thread: {error}")))?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }

    pub(crate) async fn submit<T, E, F>(&self, job: F) -> Result<T, E>
    where
        F: FnOnce(&Connection) -> Result<T, E> + Send + 'static,
        T: Send + 'static,
        E: From<Error> + Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        let task = Task { job: Some(job), result: None, answer };
        let jobs = self.jobs.as_ref().expect("only dropping takes it");
        jobs.send(Box::new(task)).map_err(|_| E::from(Error::Closed))?;
        answered.await.unwrap_or_else(|_| Err(E::from(Error::Closed)))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs.take();
        if let Some(thread) = self.thread.take() {
            // A job that owns the last handle of its own file drops it on this very thread.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// A write that waits for its commit.
trait Job: Send {
    /// Does the work. `false`: undo it.
    fn run(&mut self, connection: &Connection) -> bool;
    /// Tells the caller how it ended.
    fn finish(self: Box<Self>, committed: Result<(), Error>);
}

struct Task<F, T, E> {
    job: Option<F>,
    result: Option<Result<T, E>>,
    answer: oneshot::Sender<Result<T, E>>,
}

impl<F, T, E> Job for Task<F, T, E>
where
    F: FnOnce(&Connection) -> Result<T, E> + Send,
    T: Send,
    E: From<Error> + Send,
{
    fn run(&mut self, connection: &Connection) -> bool {
        let job = self.job.take().expect("a job runs once");
        let result = catch_unwind(AssertUnwindSafe(|| job(connection))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            Err(E::from(Error::Panicked(text.unwrap_or_else(|| "no text".to_owned()))))
        });
        let keep = result.is_ok();
        self.result = Some(result);
        keep
    }

    fn finish(self: Box<Self>, committed: Result<(), Error>) {
        let result = match (self.result, committed) {
            // A job that failed by itself keeps its own error: it changed nothing either way.
            (Some(Err(error)), _) => Err(error),
            (Some(Ok(value)), Ok(())) => Ok(value),
            (_, Err(error)) => Err(E::from(error)),
            (None, Ok(())) => Err(E::from(Error::Closed)),
        };
        let _ = self.answer.send(result);
    }
}

fn run(connection: &Connection, waiting: &Receiver<Box<dyn Job>>) {
    while let Ok(first) = waiting.recv() {
        let mut next = Some(first);
        while let Some(job) = next.take() {
            transact(connection, job, waiting);
            next = waiting.try_recv().ok();
            if next.is_some() {
                std::thread::sleep(GAP);
            }
        }
    }
}

/// One transaction: `first` and everybody who is waiting.
fn transact(connection: &Connection, first: Box<dyn Job>, waiting: &Receiver<Box<dyn Job>>) {
    let execute = |sql: &str| -> Result<(), Error> {
        connection.prepare_cached(sql)?.execute([])?;
        Ok(())
    };
    if let Err(error) = execute("BEGIN IMMEDIATE") {
        // Whoever waits behind it would wait as long again, one after another. All of them first: one that hears of
        // this may try again at once, and that try must not be answered with the old error.
        let stuck: Vec<_> = std::iter::once(first).chain(waiting.try_iter()).collect();
        for job in stuck {
            job.finish(Err(error.clone()));
        }
        return;
    }
    let started = Instant::now();
    let mut done = Vec::new();
    let mut next = Some(first);
    let mut broken = None;
    while let Some(mut job) = next.take() {
        let ran = (|| {
            execute("SAVEPOINT job")?;
            if !job.run(connection) {
                execute("ROLLBACK TO job")?;
            }
            execute("RELEASE job")
        })();
        done.push(job);
        if let Err(error) = ran {
            // SQLite ended the transaction itself (disk full, say): everyone in it must hear.
            broken = Some(error);
            break;
        }
        if started.elapsed() < SHARING {
            next = waiting.try_recv().ok();
        }
    }
    let committed = broken.map_or_else(|| execute("COMMIT"), Err);
    if committed.is_err() && !connection.is_autocommit() {
        let _ = execute("ROLLBACK");
    }
    for job in done {
        job.finish(committed.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::File;

    fn open(folder: &tempfile::TempDir) -> File {
        File::open(folder.path().join("a/b/test.db"), |connection| {
            Ok(connection.execute_batch("CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY) STRICT")?)
        })
        .expect("a fresh file opens")
    }

    async fn insert(file: &File, n: i64) -> Result<(), Error> {
        file.write(move |c| Ok(c.execute("INSERT INTO t VALUES (?1)", [n]).map(drop)?)).await
    }

    async fn count(file: &File) -> i64 {
        file.read(|c| Ok::<_, Error>(c.query_row("SELECT count(*) FROM t", [], |row| row.get(0))?))
            .await
            .expect("a count")
    }

    #[tokio::test]
    async fn one_failing_job_undoes_only_itself() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = open(&folder);
        insert(&file, 1).await.expect("fresh");
        let (a, b, c) = tokio::join!(insert(&file, 2), insert(&file, 1), insert(&file, 3));
        assert!(a.is_ok() && c.is_ok());
        assert!(b.expect_err("1 is taken").to_string().contains("UNIQUE"));
        assert_eq!(count(&file).await, 3);
    }

    #[tokio::test]
    async fn a_panicking_job_is_undone_and_the_writer_lives_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = open(&folder);
        let result: Result<(), Error> = file
            .write(|c| {
                c.execute("INSERT INTO t VALUES (9)", [])?;
                panic!("on purpose");
            })
            .await;
        assert!(matches!(result, Err(Error::Panicked(text)) if text == "on purpose"));
        insert(&file, 1).await.expect("the writer is alive");
        assert_eq!(count(&file).await, 1);
    }

    #[tokio::test]
    async fn two_processes_worth_of_writers_get_their_turn() {
        let folder = tempfile::tempdir().expect("a folder");
        let (one, two) = (open(&folder), open(&folder));
        let write = |file, base: i64| async move {
            for n in 0..200 {
                insert(file, base + n).await.expect("never busy");
            }
        };
        tokio::join!(write(&one, 0), write(&two, 1_000));
        assert_eq!(count(&one).await, 400);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_lock_that_is_never_freed_fails_all_who_wait_together() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = std::sync::Arc::new(open(&folder));
        let other = file.connect().expect("another connection");
        other.execute_batch("BEGIN IMMEDIATE").expect("the lock");
        let started = Instant::now();
        let (a, b, c) = tokio::join!(insert(&file, 1), insert(&file, 2), insert(&file, 3));
        for result in [a, b, c] {
            assert!(matches!(result, Err(Error::Busy)));
        }
        assert!(started.elapsed() < crate::PATIENCE.mul_f64(1.5), "took {:?}", started.elapsed());
        other.execute_batch("ROLLBACK").expect("freed");
        insert(&file, 1).await.expect("the lock is free");
    }

    #[tokio::test]
    async fn a_file_that_is_no_database_is_refused_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("notes.txt");
        std::fs::write(&path, "this is not a database, and it is long enough to have a header".repeat(20))
            .expect("written");
        let error = File::open(&path, |_| Ok(())).expect_err("no database").to_string();
        assert!(error.contains("notes.txt") && error.contains("not a database"), "{error}");
    }
}
