//! Leases of lanes, on a connection of their own.

use ::redis::Value;
use async_trait::async_trait;
use message::State;
use uuid::Uuid;

use super::RedisStore;
use super::reply::{Reader, odd};
use super::script::script;
use super::settle::wait;
use crate::column::{SLOTS, crashes_relays, time};
use crate::{Beat, Beaten, Error, Instance, LaneView, Lanes, Lease, Left};

/// Beats that are made again for topics that were not known; the last one holds the keys of those.
const TRIES: usize = 4;

/// Steps of sorting messages into another number of lanes that one call makes.
const STEPS: usize = 500;

script!(BEAT: "prelude.lua", "hold.lua", "lanes.lua", "beat.lua");
script!(RESIZE: "prelude.lua", "hold.lua", "lanes.lua", "resize.lua");
script!(RELEASE: "prelude.lua", "hold.lua", "lanes.lua", "release.lua");
script!(LEAVE: "prelude.lua", "hold.lua", "lanes.lua", "leave.lua");
script!(VIEW: "prelude.lua", "hold.lua", "lanes.lua", "view.lua");

#[async_trait]
impl Lanes for RedisStore {
    async fn beat(&self, beat: &Beat) -> Result<Beaten, Error> {
        let (mut tries, mut steps) = (0, 0);
        loop {
            let mut answer = self.beat_once(beat, tries == TRIES).await?;
            match answer.text()?.as_str() {
                "unknown" => {
                    tries += 1;
                    self.learn(answer.texts()?);
                }
                "beaten" => {
                    let (beaten, size) = beaten(answer)?;
                    steps += 1;
                    // The number of lanes is changing, or has just changed: with the next beat there is more to say.
                    if !matches!(size.as_str(), "moving" | "done") || steps == STEPS {
                        return Ok(beaten);
                    }
                }
                _ => return Err(odd("a beat")),
            }
        }
    }

    async fn release(&self, leases: &[Lease], left: Left) -> Result<(), Error> {
        let mut call = self.script(&RELEASE);
        call.arg(if left == Left::Untouched { "1" } else { "0" });
        call.leases(leases);
        self.read(&call).await.map(drop)
    }

    async fn leave(&self, instance: &Instance) -> Result<(), Error> {
        let mut call = self.script(&LEAVE);
        call.arg(instance.id.to_string());
        self.read(&call).await.map(drop)
    }

    async fn lanes(&self) -> Result<Vec<LaneView>, Error> {
        self.read(&self.script(&VIEW)).await?.map(view).collect()
    }

    async fn set_lanes(&self, count: u16) -> Result<bool, Error> {
        if !count.is_power_of_two() || count > SLOTS {
            return Err(Error::Refused(format!(
                "{count} lanes are not possible: choose a power of two from 1 to {SLOTS}"
            )));
        }
        let mut call = self.script(&RESIZE);
        call.arg(count);
        for _ in 0..STEPS {
            match self.read(&call).await?.text()?.as_str() {
                "done" => return Ok(true),
                "busy" => return Ok(false),
                _ => {}
            }
        }
        Ok(false)
    }
}

impl RedisStore {
    async fn beat_once(&self, beat: &Beat, anyhow: bool) -> Result<Reader, Error> {
        let mut call = self.script(&BEAT);
        call.arg(beat.instance.id.to_string()).arg(&beat.instance.name).arg(wait(beat.lease)).flag(beat.take);
        call.arg(Uuid::new_v4().to_string()).flag(anyhow).arg(crashes_relays(State::CRASHES_BEFORE_DEAD));
        call.leases(&beat.held);
        let topics = self.topics();
        call.arg(topics.len());
        for topic in &topics {
            call.arg(topic).flag((beat.rule)(topic).hold_dead);
        }
        self.beat_by(&call).await
    }
}

/// The answer to a beat, and how the number of lanes stands.
fn beaten(mut answer: Reader) -> Result<(Beaten, String), Error> {
    let beaten = Beaten {
        held: answer.list()?.map(lease).collect::<Result<_, _>>()?,
        surplus: answer.size()?,
        wanting: answer.size()?,
        instances: answer.size()?,
        orphans: answer.size()?,
        dead: answer.size()?,
    };
    Ok((beaten, answer.text()?))
}

fn lease(item: Value) -> Result<Lease, Error> {
    let mut item = Reader::from(item);
    Ok(Lease { lane: lane(&mut item)?, epoch: item.number()?, id: item.uuid()? })
}

fn lane(item: &mut Reader) -> Result<u16, Error> {
    u16::try_from(item.number()?).map_err(|_| odd("a lane"))
}

fn view(item: Value) -> Result<LaneView, Error> {
    let mut item = Reader::from(item);
    Ok(LaneView {
        lane: lane(&mut item)?,
        epoch: item.number()?,
        owner: item.optional_text()?,
        locked_until: item.optional_number()?.map(time),
        in_flight: item.total()?,
    })
}
