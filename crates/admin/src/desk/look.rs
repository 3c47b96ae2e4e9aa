//! Looking without touching. Every list is paged and no answer needs a scan.

use message::Status;
use store::Paged;
use utoipa::ToSchema;

use super::Desk;
use crate::request::message_id;
use crate::{
    AuditView, CountsView, DeadView, HoldView, InboxCountsView, LaneRow, LanesView, ListFilter, MessageView,
    PageRequest, PageView, ParkedView, Problem, ProcessedView,
};

impl Desk {
    /// One message.
    ///
    /// # Errors
    /// When there is none with this id.
    pub async fn status(&self, id: &str) -> Result<MessageView, Problem> {
        Ok(MessageView::new(self.found(id).await?, &self.topology))
    }

    /// Messages in the order of writing.
    ///
    /// # Errors
    /// When the page or a name in the filter is not one.
    pub async fn list(
        &self,
        filter: ListFilter,
        page: PageRequest,
    ) -> Result<PageView<MessageView>, Problem> {
        if let Some(topic) = &filter.topic {
            message::check_topic(topic)?;
        }
        let group = filter.consumer_group.clone().or_else(|| filter.unacknowledged_by.clone());
        if let Some(group) = &group {
            message::check_group(group)?;
        }
        let found = self.store.list(&filter.into(), page.page()?).await?;
        let view = shown(found, |record| MessageView::new(record, &self.topology));
        // A group that is not configured any more may still be owed messages, so only an empty answer
        // is taken for a mistyped name.
        match group {
            Some(group)
                if view.items.is_empty() && view.next.is_none() && !self.topology.has_group(&group) =>
            {
                Err(self.topology.no_group(&group))
            }
            _ => Ok(view),
        }
    }

    /// A Dead message, with its tries.
    ///
    /// # Errors
    /// When there is none with this id, or it is not Dead.
    pub async fn dead_show(&self, id: &str) -> Result<DeadView, Problem> {
        let view = self.history(id).await?;
        if view.message.status == Status::Dead {
            return Ok(view);
        }
        Err(Problem::conflict(
            "not-dead",
            "The message is not Dead",
            format!(
                "The message {} is {}: look at its status instead.",
                view.message.message_id, view.message.status
            ),
        ))
    }

    /// Any message, with its tries.
    ///
    /// # Errors
    /// When there is none with this id.
    pub async fn history(&self, id: &str) -> Result<DeadView, Problem> {
        let record = self.found(id).await?;
        let attempts = self.store.attempts(record.message.id).await?;
        Ok(DeadView {
            message: MessageView::new(record, &self.topology),
            history: attempts.into_iter().map(Into::into).collect(),
        })
    }

    /// How many messages are where.
    ///
    /// # Errors
    /// When the store cannot be asked.
    pub async fn counts(&self) -> Result<CountsView, Problem> {
        Ok(self.store.counts().await?.into())
    }

    /// The lanes and who works on them.
    ///
    /// # Errors
    /// When the store cannot be asked.
    pub async fn lanes(&self) -> Result<LanesView, Problem> {
        let lanes: Vec<LaneRow> = self.store.lanes().await?.into_iter().map(Into::into).collect();
        Ok(LanesView { count: lanes.len(), lanes })
    }

    /// Keys whose messages wait behind another, `limit` at most.
    ///
    /// # Errors
    /// When the store cannot be asked.
    pub async fn holds(&self, limit: usize) -> Result<Vec<HoldView>, Problem> {
        let limit = PageRequest { limit, ..PageRequest::default() }.page()?.limit;
        Ok(self.store.holds(limit).await?.into_iter().map(Into::into).collect())
    }

    /// What operators did, newest first.
    ///
    /// # Errors
    /// When the page is not one.
    pub async fn audit(&self, page: PageRequest) -> Result<PageView<AuditView>, Problem> {
        let page = PageRequest { newest_first: true, ..page };
        Ok(shown(self.store.audit(page.page()?).await?, Into::into))
    }

    /// What a consumer group has done, newest first.
    ///
    /// # Errors
    /// When there is no such group.
    pub async fn processed(
        &self,
        group: &str,
        page: PageRequest,
    ) -> Result<PageView<ProcessedView>, Problem> {
        self.check_group(group)?;
        let page = PageRequest { newest_first: true, ..page };
        Ok(shown(self.inbox(group).processed(group, page.page()?).await?, Into::into))
    }

    /// What is parked or Dead in the inbox of a consumer group.
    ///
    /// # Errors
    /// When there is no such group.
    pub async fn parked(&self, group: &str, page: PageRequest) -> Result<PageView<ParkedView>, Problem> {
        self.check_group(group)?;
        Ok(shown(self.inbox(group).parked(group, page.page()?).await?, Into::into))
    }

    /// How a consumer group is doing.
    ///
    /// # Errors
    /// When there is no such group.
    pub async fn inbox_counts(&self, group: &str) -> Result<InboxCountsView, Problem> {
        self.check_group(group)?;
        let inbox = self.inbox(group);
        Ok(InboxCountsView::of(inbox.inbox_counts(group).await?, inbox.remembered(group).await?))
    }

    pub(super) fn check_group(&self, group: &str) -> Result<(), Problem> {
        message::check_group(group)?;
        if self.topology.has_group(group) { Ok(()) } else { Err(self.topology.no_group(group)) }
    }

    /// Reads an id without asking for its message.
    ///
    /// # Errors
    /// When it is not a UUID.
    pub fn parse_id(&self, id: &str) -> Result<message::MessageId, Problem> {
        message_id(id)
    }
}

fn shown<T, V: ToSchema>(found: Paged<T>, view: impl FnMut(T) -> V) -> PageView<V> {
    PageView {
        items: found.items.into_iter().map(view).collect(),
        next: found.next.map(|next| next.to_string()),
    }
}
