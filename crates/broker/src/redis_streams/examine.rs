//! What `postrider doctor` says of a Redis: whether it keeps what it is given, and whether topics and groups are as planned.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use redis::{Cmd, Value, cmd};

use super::Broker;
use super::entry::{list, number, text};
use super::error::{Error, outcome as failed};
use super::server::{LEAST, Server};
use crate::{Examine, Finding, Outcome, Plan};

#[async_trait]
impl Examine for Broker {
    async fn examine(&self, plan: &Plan) -> Vec<Finding> {
        let about = format!("Redis at {}", self.inner.config.place());
        match self.look_around(plan).await {
            Ok(findings) => findings,
            Err(error) => {
                let (text, fix) = match failed(&error, &self.inner.config.place()) {
                    Outcome::Misconfigured { error } => (error, "mend what it says"),
                    Outcome::Unreachable { error } | Outcome::Unconfirmed { error } => {
                        (error, "start it, or mend the host and port in the URL")
                    }
                    Outcome::Confirmed
                    | Outcome::Held
                    | Outcome::Deferred { .. }
                    | Outcome::Rejected { .. } => (format!("{error:?}"), "look at its log"),
                };
                vec![Finding::broken(about, text, fix)]
            }
        }
    }
}

impl Broker {
    async fn ask(&self, command: &Cmd) -> Result<Value, Error> {
        self.inner.reader.query(command).await
    }

    async fn look_around(&self, plan: &Plan) -> Result<Vec<Finding>, Error> {
        let info = text(self.ask(&cmd("INFO")).await?).unwrap_or_default();
        let server = Server::from_info(&info);
        let mut found = Vec::new();
        found.push(version(&server, &self.inner.config.place()));
        let fsync = self.setting("appendfsync").await;
        found.push(durability(&server, fsync.as_deref(), self.inner.config.accept_loss));
        found.push(memory(&server));
        found.push(self.replicas(&server, self.setting("min-replicas-to-write").await.as_deref()));
        found.extend(self.limits(plan));
        self.topics(plan, &mut found).await?;
        Ok(found)
    }

    /// Managed servers often forbid to ask.
    async fn setting(&self, name: &str) -> Option<String> {
        let pair = self.ask(cmd("CONFIG").arg("GET").arg(name)).await.ok()?;
        text(list(pair)?.into_iter().nth(1)?)
    }

    fn replicas(&self, server: &Server, least: Option<&str>) -> Finding {
        let (about, wanted) = ("replicas", u64::from(self.inner.config.replicas));
        match server.replicas {
            None => Finding::doubtful(about, "Redis does not say how many it has", "allow INFO to the user"),
            Some(there) if there < wanted => Finding::broken(
                about,
                format!("{there} of {wanted} are connected: no message is confirmed"),
                "start them, or lower `replicas` in the URL",
            ),
            Some(_) if wanted > 0 && least == Some("0") => Finding::doubtful(
                about,
                format!(
                    "{wanted} must have a message; a primary that is cut off takes messages all the same"
                ),
                format!("set `min-replicas-to-write {wanted}` on the primary"),
            ),
            Some(there) if wanted > 0 => {
                Finding::good(about, format!("{there} are connected, {wanted} wanted"))
            }
            Some(0) => Finding::doubtful(
                about,
                "there are none: with the disk of this server all messages are lost",
                "add a replica and `replicas=1` to the URL, where that matters",
            ),
            Some(there) => Finding::doubtful(
                about,
                format!("{there} are connected, and no message waits for them: a failover loses the latest"),
                "add `replicas=1` to the URL",
            ),
        }
    }

    fn limits(&self, plan: &Plan) -> Vec<Finding> {
        let config = &self.inner.config;
        let mut found = Vec::new();
        if plan.horizon > config.deduplication {
            found.push(Finding::doubtful(
                "duplicates",
                format!(
                    "a message may be sent again for {:?} and is recognised for {:?}: after that it is stored twice",
                    plan.horizon, config.deduplication
                ),
                "raise `deduplication` in the URL, or rely on the inbox",
            ));
        }
        if plan.max_payload > config.max_payload {
            found.push(Finding::broken(
                "payload",
                format!("{} bytes are accepted and {} are sent on", plan.max_payload, config.max_payload),
                format!("set `max_payload={}` in the URL", plan.max_payload),
            ));
        }
        found
    }

    async fn topics(&self, plan: &Plan, found: &mut Vec<Finding>) -> Result<(), Error> {
        let there = self.ask(cmd("HGETALL").arg(format!("{}:topics", self.inner.tag))).await?;
        let there = list(there).unwrap_or_default();
        let there: BTreeMap<String, i64> = there
            .chunks(2)
            .filter_map(|pair| Some((text(pair[0].clone())?, number(pair.get(1)?)?)))
            .collect();
        let planned = plan.topics.iter().chain(plan.groups.iter().flat_map(|(_, topics)| topics));
        for topic in planned.collect::<BTreeSet<_>>() {
            found.push(self.topic(topic, there.get(topic).copied()));
        }
        for (topic, partitions) in &there {
            self.groups(topic, *partitions, plan, found).await?;
        }
        Ok(())
    }

    fn topic(&self, topic: &str, partitions: Option<i64>) -> Finding {
        let (about, config) = (format!("topic {topic}"), &self.inner.config);
        let ours = i64::from(config.partitions);
        match partitions {
            Some(number) if number == ours => Finding::good(about, format!("{number} partitions")),
            Some(number) => Finding::doubtful(
                about,
                format!("it was made with {number} partitions, and keeps them; the URL says {ours}"),
                format!("set `partitions={number}` in the URL"),
            ),
            None if config.create => Finding::good(
                about,
                format!("not there yet: its first message makes it with {ours} partitions"),
            ),
            None => Finding::broken(
                about,
                "it is not there, and is not to be made",
                format!("redis-cli HSET '{}:topics' {topic} {ours}", self.inner.tag),
            ),
        }
    }

    /// Who reads a topic, and who only seems to.
    async fn groups(
        &self,
        topic: &str,
        partitions: i64,
        plan: &Plan,
        found: &mut Vec<Finding>,
    ) -> Result<(), Error> {
        let mut waiting: BTreeMap<String, i64> = BTreeMap::new();
        let mut stored = 0;
        for partition in 0..partitions {
            let stream = format!("{}:stream:{topic}:{partition}", self.inner.tag);
            stored += number(&self.ask(cmd("XLEN").arg(&stream)).await?).unwrap_or(0);
            if number(&self.ask(cmd("EXISTS").arg(&stream)).await?) != Some(1) {
                continue;
            }
            let groups = list(self.ask(cmd("XINFO").arg("GROUPS").arg(&stream)).await?).unwrap_or_default();
            for group in groups.into_iter().filter_map(list) {
                let field = |name: &str| {
                    let place = group.iter().position(|one| text(one.clone()).as_deref() == Some(name))?;
                    group.get(place + 1)
                };
                let Some(name) = field("name").cloned().and_then(text) else { continue };
                let behind = field("pending").and_then(number).unwrap_or(0)
                    + field("lag").and_then(number).unwrap_or(0);
                *waiting.entry(name).or_default() += behind;
            }
        }
        if waiting.is_empty() && stored > 0 {
            found.push(Finding::doubtful(
                format!("topic {topic}"),
                format!("no group reads its {stored} messages: none is ever removed"),
                "start a consumer, or delete the streams",
            ));
        }
        for (group, behind) in waiting {
            let about = format!("group {group} of topic {topic}");
            let planned =
                plan.groups.iter().any(|(name, topics)| *name == group && topics.iter().any(|t| t == topic));
            let alive = self.alive(&group).await?;
            found.push(match (alive, planned) {
                (false, false) if behind > 0 => Finding::doubtful(
                    about,
                    format!("nobody reads for it; {behind} messages wait and are kept for it"),
                    "start its consumer, or forget the group",
                ),
                _ => Finding::good(about, format!("{behind} messages wait")),
            });
        }
        Ok(())
    }

    /// Whether a group has members now.
    async fn alive(&self, group: &str) -> Result<bool, Error> {
        let time = list(self.ask(&cmd("TIME")).await?).unwrap_or_default();
        let now = time.first().and_then(number).unwrap_or(0) * 1_000;
        let all = self.ask(cmd("HGETALL").arg(format!("{}:group:{group}", self.inner.tag))).await?;
        let all: Vec<String> = list(all).unwrap_or_default().into_iter().filter_map(text).collect();
        Ok(all.chunks(2).any(|pair| {
            let till = pair[1].split(' ').next().and_then(|till| till.parse::<i64>().ok());
            pair[0].starts_with("m:") && till.is_some_and(|till| till > now)
        }))
    }
}

fn version(server: &Server, place: &str) -> Finding {
    let about = format!("Redis at {place}");
    let (major, minor) = server.version;
    if server.replica {
        return Finding::broken(
            about,
            "this is a replica and takes no messages",
            "name its primary in the URL",
        );
    }
    if server.version < LEAST {
        let fix = format!("use {}.{} or newer", LEAST.0, LEAST.1);
        return Finding::broken(about, format!("it is version {major}.{minor}"), fix);
    }
    let cluster = if server.cluster { "; all keys are in one slot, on this node of the cluster" } else { "" };
    Finding::good(about, format!("version {major}.{minor}{cluster}"))
}

fn durability(server: &Server, fsync: Option<&str>, accepted: bool) -> Finding {
    let about = "durability";
    if let Some(loss) = server.losses().into_iter().next() {
        if accepted {
            return Finding::doubtful(
                about,
                loss,
                "remove `accept_loss=true` from the URL when that is done",
            );
        }
        return Finding::broken(about, loss, "or accept that with `accept_loss=true` in the URL");
    }
    if server.aof_broken {
        return Finding::broken(about, "the append-only file cannot be written", "make room on its disk");
    }
    match (server.aof, fsync) {
        (None, _) => {
            Finding::doubtful(about, "Redis does not say whether it writes to disk", "allow INFO to the user")
        }
        (_, Some("always")) => Finding::good(about, "what is confirmed is on disk (appendfsync always)"),
        (_, Some("no")) => Finding::broken(
            about,
            "a crash of the machine loses what the system had not yet written (appendfsync no)",
            "set `appendfsync everysec`, or `always`",
        ),
        (_, Some(_)) => Finding::doubtful(
            about,
            "a crash of the machine loses up to the last second (appendfsync everysec)",
            "set `appendfsync always` where that matters",
        ),
        (_, None) => Finding::doubtful(
            about,
            "the append-only file is on; how often it is flushed may not be asked",
            "allow CONFIG GET to the user",
        ),
    }
}

fn memory(server: &Server) -> Finding {
    let about = "memory";
    let used = server.used_memory.unwrap_or(0) >> 20;
    match server.maxmemory {
        None => Finding::doubtful(about, "Redis does not say how much it may use", "allow INFO to the user"),
        Some(0) => Finding::doubtful(
            about,
            format!("{used} MiB are used, and nothing limits it but the machine"),
            "set `maxmemory`, so that publishers are refused before the machine is full",
        ),
        Some(most) if used >= (most >> 20) * 9 / 10 => Finding::broken(
            about,
            format!("{used} of {} MiB are used: publishers will be refused", most >> 20),
            "raise `maxmemory`, shorten `retain`, or forget groups that do not come back",
        ),
        Some(most) => Finding::good(about, format!("{used} of {} MiB are used", most >> 20)),
    }
}
