//! Mending many Dead messages at once, a page at a time, telling how far it is.

use futures::future::join_all;
use message::Status;
use serde::Serialize;
use utoipa::ToSchema;

use super::Desk;
use crate::{ListFilter, MessageView, PageRequest, Problem, ProblemKind, Refusal};

/// Requests under way at once: the store commits those that come together in one go.
const TOGETHER: usize = 64;

/// How far a bulk action is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Messages found so far.
    pub matched: u64,
    /// Of those, how many are done.
    pub done: u64,
}

/// What a bulk action did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BulkAnswer {
    /// Messages that fitted.
    pub matched: u64,
    /// Those that were mended; none on a dry run.
    pub done: u64,
    /// Whether it was only a rehearsal.
    pub dry_run: bool,
    /// Those that could not be, because somebody else had mended them meanwhile, say.
    pub refused: Vec<Refusal>,
}

#[derive(Clone, Copy)]
enum Action {
    Requeue { anyway: bool },
    Discard,
}

impl Desk {
    /// Sends again all Dead messages that fit `filter`; `anyway` as in [`Desk::requeue`].
    ///
    /// # Errors
    /// When the store fails on the way: what was done until then stays done.
    ///
    /// # Cancel safety
    /// What was done stays done; the call can be repeated.
    pub async fn requeue_matching(
        &self,
        filter: ListFilter,
        dry_run: bool,
        anyway: bool,
        actor: &str,
        progress: impl FnMut(Progress) + Send,
    ) -> Result<BulkAnswer, Problem> {
        self.each_dead(Action::Requeue { anyway }, filter, dry_run, actor, progress).await
    }

    /// Gives up all Dead messages that fit `filter`.
    ///
    /// # Errors
    /// When the store fails on the way: what was done until then stays done.
    ///
    /// # Cancel safety
    /// What was done stays done; the call can be repeated.
    pub async fn discard_matching(
        &self,
        filter: ListFilter,
        dry_run: bool,
        actor: &str,
        progress: impl FnMut(Progress) + Send,
    ) -> Result<BulkAnswer, Problem> {
        self.each_dead(Action::Discard, filter, dry_run, actor, progress).await
    }

    async fn each_dead(
        &self,
        action: Action,
        mut filter: ListFilter,
        dry_run: bool,
        actor: &str,
        mut progress: impl FnMut(Progress) + Send,
    ) -> Result<BulkAnswer, Problem> {
        filter.statuses = vec![Status::Dead];
        // Oldest first by `seq`: one that dies again meanwhile is behind us, so the walk always ends.
        let mut page = PageRequest { limit: PageRequest::MOST, after: None, newest_first: false };
        let mut answer = BulkAnswer { dry_run, ..BulkAnswer::default() };
        loop {
            let found = self.list(filter.clone(), page.clone()).await?;
            answer.matched += found.items.len() as u64;
            for some in found.items.chunks(TOGETHER) {
                if !dry_run {
                    self.do_together(action, some, actor, &mut answer).await?;
                }
                progress(Progress { matched: answer.matched, done: answer.done });
            }
            match found.next {
                Some(next) => page.after = Some(next),
                None => return Ok(answer),
            }
        }
    }

    async fn do_together(
        &self,
        action: Action,
        messages: &[MessageView],
        actor: &str,
        answer: &mut BulkAnswer,
    ) -> Result<(), Problem> {
        let each = messages.iter().map(|message| async move {
            let id = message.message_id;
            let done = match action {
                Action::Requeue { anyway: false } => {
                    match self.remembered(id, &message.topic, message.written_at) {
                        Ok(()) => self.store.requeue(id, actor).await.map_err(Problem::from),
                        Err(problem) => Err(problem),
                    }
                }
                Action::Requeue { anyway: true } => {
                    self.store.requeue(id, actor).await.map_err(Problem::from)
                }
                Action::Discard => self.store.discard(id, actor).await.map_err(Problem::from),
            };
            (id, done)
        });
        let mut broken = None;
        for (id, done) in join_all(each).await {
            match done {
                Ok(()) => answer.done += 1,
                Err(problem) if problem.kind == ProblemKind::Conflict => {
                    answer.refused.push(Refusal { message_id: id, detail: problem.detail });
                }
                Err(problem) => broken = Some(problem),
            }
        }
        broken.map_or(Ok(()), Err)
    }
}
