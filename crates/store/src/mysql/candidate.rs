//! Finding sendable messages of some lanes, in order.
//!
//! The claim index is cut by topic and by stripe, and within both it is in the order of writing. So a topic whose
//! destination is down costs nothing, and a relay reads its own lanes' rows and (with up to 16 lanes) no others,
//! however long a backlog another lane has. Each pair of a topic and a stripe is a stream; the heads of all streams
//! are read by one statement. Sent rows stand elsewhere in the index: their number makes no difference.

use std::collections::{BTreeMap, BTreeSet};

use message::check_topic;
use mysql_async::Row;
use mysql_async::prelude::Queryable;

use super::error::Trouble;
use super::row::Read;
use crate::TopicRule;

/// Parts of the claim index, as the column `stripe` has it.
const STRIPES: u16 = 16;

/// Rows read from each stream at first, at least.
const LEAST: usize = 16;

/// A message that may be claimed: its number and its slot.
pub(super) type Candidate = (i64, u16);

/// The topics that have sendable messages and whose rule lets some be taken.
pub(super) async fn open_topics(
    connection: &mut impl Queryable,
    rule: &(dyn Fn(&str) -> TopicRule + Send + Sync),
) -> Result<Vec<(String, TopicRule)>, Trouble> {
    // The hint makes the server hop from topic to topic instead of reading what lies between.
    let rows: Vec<Row> = connection
        .exec(
            "SELECT topic FROM outbox_events FORCE INDEX FOR GROUP BY (outbox_ready) WHERE ready = 1 GROUP BY topic",
            (),
        )
        .await?;
    let mut topics = Vec::with_capacity(rows.len());
    for mut row in rows {
        let topic = row.text(0)?;
        let rule = rule(&topic);
        // The column's check lets no other names in; what is not one never gets into a statement.
        if rule.take > 0 && check_topic(&topic).is_ok() {
            topics.push((topic, rule));
        }
    }
    Ok(topics)
}

/// One topic's part of one stripe.
#[derive(Debug)]
struct Stream {
    topic: usize,
    stripe: u16,
    /// Lanes of the stripe to take from; none: all of them.
    lanes: BTreeSet<u16>,
    found: Vec<Candidate>,
    /// It was read up to what was asked for: more may follow.
    cut: bool,
}

/// What a search found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// By number.
    pub(super) candidates: Vec<Candidate>,
    /// More may be there.
    pub(super) more: bool,
}

/// A search for `limit` messages of `lanes`.
pub(super) struct Search<'a> {
    pub(super) topics: &'a [(String, TopicRule)],
    pub(super) lanes: &'a BTreeSet<u16>,
    /// What cuts a lane's number out of a slot.
    pub(super) mask: u16,
    pub(super) limit: usize,
}

impl Search<'_> {
    pub(super) async fn run(&self, connection: &mut impl Queryable) -> Result<Found, Trouble> {
        let mut streams = self.streams();
        if streams.is_empty() || self.limit == 0 {
            return Ok(Found::default());
        }
        let share = (self.limit.div_ceil(streams.len()) * 2).max(LEAST).min(self.limit);
        self.read(connection, &mut streams, share).await?;
        let found: usize = streams.iter().map(|stream| stream.found.len()).sum();
        if found < self.limit && streams.iter().any(|stream| stream.cut) {
            // Few lanes have nearly all: those are read on, once.
            self.read(connection, &mut streams, self.limit).await?;
        }
        Ok(self.merge(streams))
    }

    /// The streams that hold messages of our lanes.
    fn streams(&self) -> Vec<Stream> {
        let mut stripes: BTreeMap<u16, BTreeSet<u16>> = BTreeMap::new();
        for stripe in 0..STRIPES {
            // With fewer lanes than stripes a lane has several stripes, with more a stripe has several lanes.
            let of_stripe = |lane: &&u16| (**lane ^ stripe) & self.mask & (STRIPES - 1) == 0;
            let own: BTreeSet<u16> = self.lanes.iter().filter(of_stripe).copied().collect();
            if !own.is_empty() {
                let all = usize::from((self.mask + 1) / STRIPES).max(1);
                stripes.insert(stripe, if own.len() == all { BTreeSet::new() } else { own });
            }
        }
        let stream = |topic, (stripe, lanes): (&u16, &BTreeSet<u16>)| Stream {
            topic,
            stripe: *stripe,
            lanes: lanes.clone(),
            found: Vec::new(),
            cut: true,
        };
        (0..self.topics.len()).flat_map(|topic| stripes.iter().map(move |pair| stream(topic, pair))).collect()
    }

    /// Reads on in the streams that were cut, up to `most` rows of each.
    async fn read(
        &self,
        connection: &mut impl Queryable,
        streams: &mut [Stream],
        most: usize,
    ) -> Result<(), Trouble> {
        let open: Vec<usize> = (0..streams.len()).filter(|place| streams[*place].cut).collect();
        let parts: Vec<String> = open
            .iter()
            .map(|place| streams[*place].sql(*place, &self.topics[streams[*place].topic].0, self.mask, most))
            .collect();
        let before: Vec<usize> = streams.iter().map(|stream| stream.found.len()).collect();
        for mut row in connection.query::<Row, _>(parts.join(" UNION ALL ")).await? {
            let (place, seq, slot): (usize, i64, u16) = (row.small(0)?, row.number(1)?, row.small(2)?);
            streams[place].found.push((seq, slot));
        }
        for place in open {
            streams[place].found.sort_unstable();
            streams[place].cut = streams[place].found.len() - before[place] == most;
        }
        Ok(())
    }

    /// The first of all streams. A lane goes only as far as each of its streams was read: beyond that an earlier
    /// message may be waiting.
    fn merge(&self, streams: Vec<Stream>) -> Found {
        let mut horizons: BTreeMap<u16, i64> = BTreeMap::new();
        for stream in streams.iter().filter(|stream| stream.cut) {
            let Some((last, _)) = stream.found.last() else { continue };
            for lane in self.lanes.iter().filter(|lane| stream.touches(**lane, self.mask)) {
                let horizon = horizons.entry(*lane).or_insert(*last);
                *horizon = (*horizon).min(*last);
            }
        }
        let mut by_topic: Vec<Vec<Candidate>> = vec![Vec::new(); self.topics.len()];
        let mut more = streams.iter().any(|stream| stream.cut);
        for stream in streams {
            by_topic[stream.topic].extend(stream.found);
        }
        let mut candidates = Vec::new();
        for (mut found, (_, rule)) in by_topic.into_iter().zip(self.topics) {
            found.sort_unstable();
            found.truncate(rule.take);
            candidates.extend(found);
        }
        candidates
            .retain(|(seq, slot)| horizons.get(&(slot & self.mask)).is_none_or(|horizon| seq <= horizon));
        candidates.sort_unstable();
        more |= candidates.len() >= self.limit;
        candidates.truncate(self.limit);
        Found { candidates, more }
    }
}

impl Stream {
    /// The topic needs no quoting: see [`open_topics`].
    fn sql(&self, number: usize, topic: &str, mask: u16, most: usize) -> String {
        let lanes = match self.lanes.is_empty() {
            true => String::new(),
            false => format!(" AND slot & {mask} IN ({})", super::row::list(&self.lanes)),
        };
        let after = self.found.last().map(|(seq, _)| format!(" AND seq > {seq}")).unwrap_or_default();
        format!(
            "(SELECT {number}, seq, slot FROM outbox_events FORCE INDEX (outbox_ready)
              WHERE topic = '{topic}' AND ready = 1 AND stripe = {}{after}{lanes} ORDER BY seq LIMIT {most})",
            self.stripe
        )
    }

    /// Whether messages of `lane` may be in it.
    fn touches(&self, lane: u16, mask: u16) -> bool {
        (lane ^ self.stripe) & mask & (STRIPES - 1) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(take: usize) -> TopicRule {
        TopicRule { take, hold_failed: true, hold_dead: true }
    }

    fn search<'a>(topics: &'a [(String, TopicRule)], lanes: &'a BTreeSet<u16>, count: u16) -> Search<'a> {
        Search { topics, lanes, mask: count - 1, limit: 10 }
    }

    #[test]
    fn every_slot_of_a_lane_is_in_one_of_its_streams_and_no_other_lanes_are_read() {
        let topics = [("t".to_owned(), rule(1))];
        for count in [1, 2, 8, 16, 64, 1024] {
            for lanes in [BTreeSet::from([0]), (0..count).step_by(3).collect(), (0..count).collect()] {
                let search = search(&topics, &lanes, count);
                let streams = search.streams();
                for slot in 0..1024 {
                    let lane = slot & search.mask;
                    let read = streams.iter().any(|stream| {
                        stream.stripe == slot & 15
                            && (stream.lanes.is_empty() || stream.lanes.contains(&lane))
                    });
                    assert_eq!(read, lanes.contains(&lane), "slot {slot} of {count} lanes");
                }
            }
        }
    }

    #[test]
    fn a_lane_is_taken_no_further_than_all_of_its_streams_were_read() {
        let topics = [("a".to_owned(), rule(10)), ("b".to_owned(), rule(10))];
        let lanes = BTreeSet::from([0, 1]);
        let search = search(&topics, &lanes, 2);
        let stream = |topic, stripe, found: &[Candidate], cut| Stream {
            topic,
            stripe,
            lanes: BTreeSet::new(),
            found: found.to_vec(),
            cut,
        };
        let found = search.merge(vec![
            stream(0, 0, &[(1, 0), (5, 0)], true),
            stream(1, 2, &[(4, 0), (9, 0)], false),
            stream(1, 1, &[(8, 1)], false),
        ]);
        assert_eq!(found.candidates, [(1, 0), (4, 0), (5, 0), (8, 1)], "9 may come after an unread 6");
        assert!(found.more);
    }

    #[test]
    fn no_more_of_a_topic_is_found_than_its_rule_says() {
        let topics = [("a".to_owned(), rule(1)), ("b".to_owned(), rule(10))];
        let lanes = BTreeSet::from([0]);
        let search = search(&topics, &lanes, 1);
        let stream = |topic, found: &[Candidate]| Stream {
            topic,
            stripe: 0,
            lanes: BTreeSet::new(),
            found: found.to_vec(),
            cut: false,
        };
        let found = search.merge(vec![stream(0, &[(1, 0), (2, 0)]), stream(1, &[(3, 0)])]);
        assert_eq!(found.candidates, [(1, 0), (3, 0)]);
        assert!(!found.more);
    }
}
