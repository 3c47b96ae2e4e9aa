//! Mending, message by message. The store audits each action in the transaction that does it.

use std::time::Duration;

use chrono::{DateTime, Utc};
use message::{CAPABILITY, Message, MessageId, Secrets, Status};
use store::{Acknowledged, Edit, Record};

use super::Desk;
use crate::payload::bytes_of;
use crate::request::message_id;
use crate::{
    AcknowledgeAnswer, AcknowledgeRequest, ActionAnswer, EditRequest, LanesAnswer, Problem, ProblemKind,
};

impl Desk {
    /// Sends a Dead message again.
    ///
    /// `anyway`: even if it is so old that its consumers may have forgotten that they have done it.
    ///
    /// # Errors
    /// When there is no such message, it is not Dead, or it is too old.
    pub async fn requeue(&self, id: &str, anyway: bool, actor: &str) -> Result<ActionAnswer, Problem> {
        let record = self.dead(id).await?;
        let id = record.message.id;
        if !anyway {
            self.remembered(id, &record.message.topic, record.written_at)?;
        }
        self.store.requeue(id, actor).await?;
        Ok(answer(id, "requeued", Some(Status::Pending)))
    }

    /// Mends a Dead message and sends it again.
    ///
    /// # Errors
    /// When there is no such message, it is not Dead, or the mended one would not be accepted.
    pub async fn edit(&self, id: &str, request: EditRequest, actor: &str) -> Result<ActionAnswer, Problem> {
        let record = self.dead(id).await?;
        let id = record.message.id;
        let edit = self.checked(request, record.message)?;
        self.store.edit(id, &edit, actor).await?;
        Ok(answer(id, "edited", Some(Status::Pending)))
    }

    /// Gives up a Dead message.
    ///
    /// # Errors
    /// When there is no such message, or it is not Dead.
    pub async fn discard(&self, id: &str, actor: &str) -> Result<ActionAnswer, Problem> {
        let id = self.dead(id).await?.message.id;
        self.store.discard(id, actor).await?;
        Ok(answer(id, "discarded", None))
    }

    /// Deletes a record that is not InFlight.
    ///
    /// # Errors
    /// When there is no such message, or a relay is sending it.
    pub async fn delete(&self, id: &str, actor: &str) -> Result<ActionAnswer, Problem> {
        let record = self.found(id).await?;
        let id = record.message.id;
        if record.state.status == Status::InFlight {
            return Err(in_flight(id));
        }
        self.store.delete(id, actor).await?;
        Ok(answer(id, "deleted", None))
    }

    /// Records that a consumer group is done with a message. Repeated, it changes nothing.
    ///
    /// # Errors
    /// When there is no such message, it was never sent, or the group was not asked.
    pub async fn acknowledge(&self, request: AcknowledgeRequest) -> Result<AcknowledgeAnswer, Problem> {
        let (id, group) = self.acceptable(request)?;
        let answer = self.store.acknowledge(vec![(id, group.clone())]).await?.pop();
        acknowledged(id, group, answer.unwrap_or(Acknowledged::Unknown))
    }

    /// Records many of them at once. One answer for each.
    ///
    /// # Errors
    /// When the store cannot be asked: nothing is recorded.
    pub async fn acknowledge_all(
        &self,
        requests: Vec<AcknowledgeRequest>,
    ) -> Result<Vec<Result<AcknowledgeAnswer, Problem>>, Problem> {
        let checked: Vec<_> = requests.into_iter().map(|request| self.acceptable(request)).collect();
        let fine: Vec<_> = checked.iter().flatten().cloned().collect();
        let mut answers = self.store.acknowledge(fine).await?.into_iter();
        let answers = checked.into_iter().map(|checked| {
            let (id, group) = checked?;
            acknowledged(id, group, answers.next().unwrap_or(Acknowledged::Unknown))
        });
        Ok(answers.collect())
    }

    fn acceptable(&self, request: AcknowledgeRequest) -> Result<(MessageId, String), Problem> {
        let id = message_id(&request.message_id)?;
        message::check_group(&request.consumer_group)?;
        self.check_proof(id, &request.consumer_group, request.proof.as_deref())?;
        Ok((id, request.consumer_group))
    }

    /// With secrets, whoever has not received a message cannot acknowledge it.
    fn check_proof(&self, id: MessageId, group: &str, proof: Option<&str>) -> Result<(), Problem> {
        let proven = |secrets: &Secrets| proof.is_some_and(|proof| secrets.accept(id, group, proof));
        if self.secrets.as_ref().is_none_or(proven) {
            return Ok(());
        }
        let (code, what) = match proof {
            None => ("no-proof", "has no `proof`"),
            Some(_) => ("bad-proof", "has a `proof` that is not for this message and group"),
        };
        Err(Problem::new(
            ProblemKind::Forbidden,
            code,
            "The acknowledgement is not proven",
            format!(
                "The request {what}: make it of the message's header `{CAPABILITY}` and the name of the group, \
                 as the guide says (docs/guide/http-api.md, Acknowledge)."
            ),
        ))
    }

    /// Asks for another number of lanes.
    ///
    /// # Errors
    /// When it is not a power of two up to 1024.
    pub async fn set_lanes(&self, count: u16) -> Result<LanesAnswer, Problem> {
        if !count.is_power_of_two() || count > 1024 {
            return Err(Problem::bad_request(
                "bad-lanes",
                "That cannot be a number of lanes",
                format!(
                    "{count} is not a power of two up to 1024: use 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 or 1024."
                ),
            ));
        }
        Ok(LanesAnswer { count, in_force: self.store.set_lanes(count).await? })
    }

    /// Gives a Dead or parked message of a group's inbox a fresh start now.
    ///
    /// # Errors
    /// When there is no such group or message.
    pub async fn unpark(&self, group: &str, id: &str, actor: &str) -> Result<ActionAnswer, Problem> {
        self.check_group(group)?;
        let id = message_id(id)?;
        self.inbox(group).unpark(group, id, actor).await?;
        Ok(answer(id, "requeued", None))
    }

    /// Gives up a Dead or parked message of a group's inbox.
    ///
    /// # Errors
    /// When there is no such group or message.
    pub async fn drop_parked(&self, group: &str, id: &str, actor: &str) -> Result<ActionAnswer, Problem> {
        self.check_group(group)?;
        let id = message_id(id)?;
        self.inbox(group).drop_parked(group, id, actor).await?;
        Ok(answer(id, "discarded", None))
    }

    /// Whether every group of `topic` would still recognise a message of that age as one that it has done.
    pub(super) fn remembered(
        &self,
        id: MessageId,
        topic: &str,
        written_at: DateTime<Utc>,
    ) -> Result<(), Problem> {
        let age = (Utc::now() - written_at).to_std().unwrap_or_default();
        match self.topology.forgets_first(topic) {
            Some(group) if age > group.keep_ids => Err(Problem::conflict(
                "ids-forgotten",
                "The message may be done twice",
                format!(
                    "The message {id} is {} old, and {} remembers for {} what it has done: if it was done then, it is \
                     done again. If you mean it, say so: `anyway` in the request, or --yes.",
                    humantime::format_duration(Duration::from_secs(age.as_secs())),
                    group.group,
                    humantime::format_duration(group.keep_ids),
                ),
            )),
            _ => Ok(()),
        }
    }

    async fn dead(&self, id: &str) -> Result<Record, Problem> {
        let record = self.found(id).await?;
        match record.state.status {
            Status::Dead => Ok(record),
            Status::InFlight => Err(in_flight(record.message.id)),
            status => Err(Problem::conflict(
                "not-dead",
                "The message is not Dead",
                format!("The message {} is {status}: only a Dead one can be mended.", record.message.id),
            )),
        }
    }

    /// The edit that `request` asks for, if `message` would still be accepted with it.
    fn checked(&self, request: EditRequest, mut message: Message) -> Result<Edit, Problem> {
        let payload = request.payload.as_deref().map(|value| {
            bytes_of(value, request.payload_encoding)
                .map_err(|expected| crate::fields::wrong_type("payload", expected, value))
        });
        let edit = Edit {
            payload: payload.transpose()?,
            content_type: request.content_type,
            headers: request.headers,
        };
        if edit.payload.is_none() && edit.content_type.is_none() && edit.headers.is_none() {
            return Err(Problem::bad_request(
                "empty-edit",
                "Nothing is to be changed",
                "The edit changes nothing: give `payload`, `contentType` or `headers`, or requeue the message as it is.",
            ));
        }
        message.payload = edit.payload.clone().unwrap_or(message.payload);
        message.content_type = edit.content_type.clone().unwrap_or(message.content_type);
        message.headers = edit.headers.clone().unwrap_or(message.headers);
        message.check(&self.limits)?;
        Ok(edit)
    }
}

fn acknowledged(id: MessageId, group: String, answer: Acknowledged) -> Result<AcknowledgeAnswer, Problem> {
    let repeated = match answer {
        Acknowledged::New => false,
        Acknowledged::Repeated => true,
        Acknowledged::Unknown => return Err(Problem::no_message(id)),
        Acknowledged::Refused(status) => {
            return Err(Problem::conflict(
                "not-sent",
                "The message was not sent",
                format!(
                    "The message {id} is {status}, so nobody can have received it: acknowledge it once it is sent."
                ),
            ));
        }
        Acknowledged::NotAsked => {
            return Err(Problem::conflict(
                "group-not-asked",
                "That group need not acknowledge this message",
                format!(
                    "The consumer group `{group}` is not among those that must acknowledge the message {id}: \
                     its status names them."
                ),
            ));
        }
    };
    Ok(AcknowledgeAnswer { message_id: id, consumer_group: group, result: "acknowledged", repeated })
}

fn answer(message_id: MessageId, action: &'static str, status: Option<Status>) -> ActionAnswer {
    ActionAnswer { message_id, action, status }
}

fn in_flight(id: MessageId) -> Problem {
    Problem::conflict(
        "in-flight",
        "A relay is sending the message",
        format!("The message {id} is InFlight: a relay is sending it now. Try again in a moment."),
    )
}
