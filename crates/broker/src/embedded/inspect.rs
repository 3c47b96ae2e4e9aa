//! What is in the broker and who has read how far, from offsets alone: no message is looked at.

use async_trait::async_trait;
use rusqlite::OptionalExtension;
use serde::Serialize;

use super::{Broker, Error};
use crate::{Examine, Finding, Plan};

/// A topic as an operator sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TopicView {
    /// Its name.
    pub topic: String,
    /// How many partitions it was created with.
    pub partitions: u32,
    /// Messages that are kept.
    pub messages: u64,
    /// The groups that have ever subscribed to it.
    pub groups: Vec<GroupView>,
}

/// A group on one topic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupView {
    /// Its name.
    pub group: String,
    /// Messages that it has not acknowledged yet.
    pub lag: u64,
    /// Members at work on this topic.
    pub members: u32,
}

impl Broker {
    /// Every topic and its groups, by name.
    ///
    /// # Errors
    /// When the file cannot be read.
    ///
    /// # Cancel safety
    /// Safe: nothing is changed.
    pub async fn topics(&self) -> Result<Vec<TopicView>, Error> {
        self.inner
            .file
            .read(|connection| {
                let snapshot = connection.unchecked_transaction().map_err(sqlite::Error::from)?;
                views(&snapshot).map_err(Error::from)
            })
            .await
    }

    /// Forgets a group that will not come back, so that what it has not read need not be kept for it.
    ///
    /// # Errors
    /// When there is no such group, or it has members at work.
    pub async fn forget(&self, group: &str) -> Result<(), Error> {
        let group = group.to_owned();
        self.inner.file.write(move |connection| forget(connection, group)).await
    }
}

fn views(connection: &rusqlite::Connection) -> Result<Vec<TopicView>, sqlite::Error> {
    let mut topics = connection
        .prepare_cached(
            "SELECT t.name, t.partitions, sum(p.next - p.first)
             FROM broker_topics t JOIN broker_partitions p ON p.topic = t.id
             GROUP BY t.id ORDER BY t.name",
        )?
        .query_map([], |row| {
            Ok(TopicView {
                topic: row.get(0)?,
                partitions: row.get(1)?,
                messages: row.get::<_, i64>(2)?.unsigned_abs(),
                groups: Vec::new(),
            })
        })?
        .collect::<Result<Vec<_>, _>>()?;
    let mut lags = connection.prepare_cached(include_str!("lags.sql"))?;
    let mut rows = lags.query([])?;
    while let Some(row) = rows.next()? {
        let topic: String = row.get(0)?;
        let group =
            GroupView { group: row.get(1)?, lag: row.get::<_, i64>(2)?.unsigned_abs(), members: row.get(3)? };
        // Both are sorted by name in the same way.
        if let Ok(at) = topics.binary_search_by(|view| view.topic.as_str().cmp(topic.as_str())) {
            topics[at].groups.push(group);
        }
    }
    Ok(topics)
}

fn forget(connection: &rusqlite::Connection, group: String) -> Result<(), Error> {
    let members: Option<u32> = connection
        .query_row(
            "SELECT (SELECT count(*) FROM broker_members m WHERE m.group_id = g.id
                     AND m.locked_until > CAST(unixepoch('subsec') * 1000 AS INTEGER))
             FROM broker_groups g WHERE g.name = ?1",
            [&group],
            |row| row.get(0),
        )
        .optional()
        .map_err(sqlite::Error::from)?;
    match members {
        None => Err(Error::NoSuchGroup(group)),
        Some(1..) => Err(Error::GroupInUse(group)),
        Some(0) => {
            let deleted = connection.execute("DELETE FROM broker_groups WHERE name = ?1", [&group]);
            deleted.map(drop).map_err(|error| sqlite::Error::from(error).into())
        }
    }
}

#[async_trait]
impl Examine for Broker {
    async fn examine(&self, plan: &Plan) -> Vec<Finding> {
        let config = self.config();
        let about = format!("file {}", config.path.display());
        let topics = match self.topics().await {
            Ok(topics) => topics,
            Err(error) => {
                let fix = "look at the file and the disk that it is on";
                return vec![Finding::broken(about, format!("cannot be read: {error}"), fix)];
            }
        };
        let mut findings =
            vec![Finding::good(about, format!("{} topics; one machine, no copies", topics.len()))];
        if config.max_payload < plan.max_payload {
            findings.push(Finding::doubtful(
                "max_payload",
                format!("{} bytes; payloads of up to {} are accepted", config.max_payload, plan.max_payload),
                "raise max_payload in its URL, or larger messages will be Dead",
            ));
        }
        let forgotten = topics.iter().flat_map(|topic| topic.groups.iter().map(move |group| (topic, group)));
        for (topic, group) in forgotten {
            let planned = |(name, topics): &(String, Vec<String>)| {
                *name == group.group && topics.contains(&topic.topic)
            };
            if !plan.groups.iter().any(planned) && group.members == 0 {
                findings.push(Finding::doubtful(
                    format!("group {} on topic {}", group.group, topic.topic),
                    format!("nobody listens, and {} messages are kept for it", group.lag),
                    "start it again, or forget it, so that what it has not read can be removed",
                ));
            }
        }
        findings
    }
}
