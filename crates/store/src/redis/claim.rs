//! Taking messages: settle the last batches and choose the next ones, in one script.
//!
//! Sendable messages are sorted by lane and topic, so that a claim meets nothing but its own: not what is Sent, not
//! what waits, not what others may take, and of a topic whose destination is down only its name.
//!
//! How a topic is treated is a closure of the relay's, and a script cannot ask it: each turn carries the rules of the
//! topics seen so far. A script that meets another topic takes nothing and names it, and the turn is made again.

use std::collections::HashMap;

use ::redis::Value;
use async_trait::async_trait;
use message::{Event, Next, check_topic, step};
use uuid::Uuid;

use super::RedisStore;
use super::reply::{Fields, Reader, odd};
use super::script::script;
use super::settle::settlements;
use crate::column::{between, groups};
use crate::{Batch, BatchId, Claim, ClaimOrder, Claimed, Error, Lease, Settlement, Turn, Verdict};

/// Turns that are made again for topics that were not known; the last one takes what it can.
const TRIES: usize = 8;

/// Topics whose rules a turn carries. Past this, they are learnt again.
const TOPICS: usize = 4_000;

/// Messages in one turn, whatever the relay asks for: others wait while the script runs.
const MOST: usize = 1_000;

/// The fields of a row, as `claim.lua` reads them.
const FIELDS: [&str; 14] = [
    "id",
    "topic",
    "type",
    "key",
    "payload",
    "content_type",
    "headers",
    "occurred_at",
    "ack_groups",
    "written_at",
    "status",
    "attempts",
    "crashes",
    "delivery",
];

script!(TURN: "prelude.lua", "hold.lua", "append.lua", "settle.lua", "claim.lua", "turn.lua");

#[async_trait]
impl Claim for RedisStore {
    async fn turn(&self, settlements: Vec<Settlement>, order: Option<ClaimOrder>) -> Result<Turn, Error> {
        let mut settlements = settlements;
        let mut carries = false;
        for settlement in &settlements {
            for message in &settlement.beside {
                check_topic(&message.topic).map_err(|invalid| Error::Refused(invalid.to_string()))?;
                carries = true;
            }
        }
        let mut fenced = Vec::new();
        for tries in 1.. {
            let answer = self.turn_once(&settlements, order.as_ref(), tries == TRIES).await?;
            // They are settled now, whatever becomes of the claim.
            settlements.clear();
            if carries && tries == 1 {
                self.ring();
            }
            fenced.extend(answer.turn.fenced);
            if answer.unknown.is_empty() || tries == TRIES {
                // It happened, and nobody hears of it.
                fail::fail_point!("store::turned", |_| {
                    let reason = "the answer was lost".to_owned();
                    Err(Error::Unavailable { reason, retry_after: std::time::Duration::ZERO })
                });
                return Ok(Turn { fenced, ..answer.turn });
            }
            self.learn(answer.unknown);
        }
        unreachable!("the last try returns")
    }

    async fn woken(&self) {
        self.bell.notified().await;
    }
}

/// What a script answered to a turn.
struct Answer {
    turn: Turn,
    unknown: Vec<String>,
}

impl RedisStore {
    async fn turn_once(
        &self,
        settled: &[Settlement],
        order: Option<&ClaimOrder>,
        anyhow: bool,
    ) -> Result<Answer, Error> {
        let mut call = self.script(&TURN);
        settlements(&mut call, settled);
        if let Some(order) = order {
            call.arg("claim")
                .arg(order.limit.min(MOST))
                .arg(whole(order.bytes))
                .arg(Uuid::new_v4().to_string());
            call.flag(anyhow).leases(&order.leases);
            let topics = self.topics();
            call.arg(topics.len());
            for topic in &topics {
                let rule = (order.rule)(topic);
                call.arg(topic).arg(whole(rule.take)).flag(rule.hold_failed).arg(rule.channel);
            }
        }
        let (answer, shortfall) = self.replicate(&call).await?;
        let answer = read(answer, order.map_or(&[], |order| &order.leases))?;
        match shortfall {
            None => Ok(answer),
            Some(error) => {
                // Nobody hears of these batches: left open, they would count as crashes of their messages.
                self.give_back(&answer.turn.batches).await?;
                Err(error)
            }
        }
    }

    async fn give_back(&self, batches: &[Batch]) -> Result<(), Error> {
        let back = |batch: &Batch| Settlement {
            batch: batch.id,
            lease: batch.lease,
            verdicts: (batch.messages.iter())
                .map(|claimed| (claimed.seq, Verdict::Released { error: None }))
                .collect(),
            beside: Vec::new(),
        };
        let mut call = self.script(&TURN);
        settlements(&mut call, &batches.iter().map(back).collect::<Vec<_>>());
        self.read(&call).await.map(drop)
    }

    /// The topics that were met so far.
    pub(super) fn topics(&self) -> Vec<String> {
        self.topics.lock().expect("nobody panics while it holds the topics").iter().cloned().collect()
    }

    pub(super) fn learn(&self, topics: Vec<String>) {
        let mut known = self.topics.lock().expect("nobody panics while it holds the topics");
        if known.len() + topics.len() > TOPICS {
            known.clear();
        }
        known.extend(topics);
    }
}

/// A number as Lua can count it.
fn whole(number: usize) -> u64 {
    (number as u64).min(1 << 50)
}

fn read(mut answer: Reader, leases: &[Lease]) -> Result<Answer, Error> {
    match answer.text()?.as_str() {
        "turned" => {}
        "torn" => {
            let (batch, size) = (answer.text()?, answer.number()?);
            return Err(Error::Refused(format!(
                "batch {batch} has {size} messages and the settlement does not name exactly these"
            )));
        }
        _ => return Err(odd("a turn")),
    }
    let leases: HashMap<u16, Lease> = leases.iter().map(|lease| (lease.lane, *lease)).collect();
    let fenced = answer.list()?.map(|id| Reader::from(id).uuid()).collect::<Result<Vec<BatchId>, _>>()?;
    let mut batches = answer.list()?.map(|item| batch(item, &leases)).collect::<Result<Vec<_>, _>>()?;
    batches.sort_unstable_by_key(|batch| (batch.lease.lane, batch.channel));
    let more = answer.flag()?;
    let next_due = answer.optional_number()?.map(|wait| between(0, wait));
    Ok(Answer { turn: Turn { fenced, batches, more, next_due }, unknown: answer.texts()? })
}

fn batch(item: Value, leases: &HashMap<u16, Lease>) -> Result<Batch, Error> {
    let mut item = Reader::from(item);
    let lane = u16::try_from(item.number()?).map_err(|_| odd("a lane"))?;
    let lease = *leases.get(&lane).ok_or_else(|| odd("a lane"))?;
    let id = item.uuid()?;
    let channel = item.size()?;
    let now = item.number()?;
    let messages = item.list()?.map(|row| claimed(row, now)).collect::<Result<_, _>>()?;
    Ok(Batch { id, channel, lease, messages })
}

fn claimed(row: Value, now: i64) -> Result<Claimed, Error> {
    let mut row = Reader::from(row);
    let seq = row.number()?;
    let mut values = row.list()?;
    let mut fields = Fields(HashMap::with_capacity(FIELDS.len()));
    for name in FIELDS {
        if let Some(value) = values.optional_bytes()? {
            fields.0.insert(name.to_owned(), value);
        }
    }
    let ack_groups = fields.optional("ack_groups").as_deref().map(groups);
    let written_at = fields.number("written_at")?;
    let Next::State(state) = step(fields.state(false)?, Event::Claim)? else {
        return Err(Error::Broken("a claimed message cannot vanish".to_owned()));
    };
    Ok(Claimed { seq, message: fields.message()?.into(), state, ack_groups, age: between(written_at, now) })
}
