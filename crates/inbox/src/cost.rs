//! What deduplication costs: how long the store takes to say what is new, and to mark what is done.
//!
//! Where the handler works outside the store, both are calls of their own. Where the store does the work too, question,
//! work and mark are one transaction, and nobody can tell them apart: then the time of all three is what is known.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use store::{Error, Latency};

/// A call to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// What is new is reserved, the rest is recognised.
    Reserve,
    /// What was done outside is marked.
    Conclude,
    /// All of it with the work in one transaction.
    Process,
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::Conclude => "conclude",
            Self::Process => "process",
        }
    }
}

/// The times of a group's calls, since it was made.
#[derive(Debug, Default)]
pub(crate) struct Cost([Mutex<Latency>; 3]);

impl Cost {
    /// Makes a call and writes down how long it took, if it was answered.
    pub(crate) async fn of<T>(
        &self,
        step: Step,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let asked = Instant::now();
        let answer = call.await?;
        self.note(step, asked.elapsed());
        Ok(answer)
    }

    fn note(&self, step: Step, took: Duration) {
        self.0[step as usize].lock().unwrap_or_else(PoisonError::into_inner).note(took);
    }

    /// The times of these steps, by their names.
    pub(crate) fn known(&self, steps: &[Step]) -> Vec<(&'static str, Latency)> {
        let times = |step: Step| self.0[step as usize].lock().unwrap_or_else(PoisonError::into_inner).clone();
        steps.iter().map(|step| (step.name(), times(*step))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_calls_that_were_answered_are_timed() {
        let cost = Cost::default();
        let down = Error::Unavailable { reason: "down".to_owned(), retry_after: Duration::ZERO };
        cost.of(Step::Reserve, async { Ok(()) }).await.expect("an answer");
        cost.of(Step::Reserve, async { Err::<(), _>(down) }).await.expect_err("no answer");
        cost.note(Step::Conclude, Duration::from_millis(7));
        let known = cost.known(&[Step::Reserve, Step::Conclude]);
        let times: Vec<u64> = known.iter().map(|(_, times)| times.counts.iter().sum()).collect();
        assert_eq!((known[0].0, known[1].0, times), ("reserve", "conclude", vec![1, 1]));
        assert_eq!(known[1].1.counts[Latency::bucket(Duration::from_millis(7))], 1);
        assert_eq!(known[1].1.sum, Duration::from_millis(7));
    }
}
