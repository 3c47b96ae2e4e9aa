//! Finding sendable messages of some lanes, in order.
//!
//! The claim index is cut by topic and by stripe, and within both it is in the order of writing. So a topic whose
//! destination is down costs nothing, and a relay reads its own lanes' rows and (with up to 16 lanes) no others,
//! however long a backlog another lane has. Each pair of a topic and a stripe is a stream; the heads of all streams
//! are read by one statement. Sent rows stand elsewhere in the index: their number makes no difference.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Mutex;

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

/// Topics that have been seen. There may be others: whoever looks, looks into the gaps between them too.
#[derive(Debug, Default)]
pub(super) struct Topics(Mutex<BTreeSet<String>>);

/// Topics that are remembered. Beyond that they are looked for anew.
const REMEMBERED: usize = 1_000;

impl Topics {
    /// The topics that have sendable messages and whose rule lets some be taken.
    ///
    /// Nothing but seeks: a server left to itself reads the whole index to find out which topics are in it.
    pub(super) async fn open(
        &self,
        connection: &mut impl Queryable,
        rule: &(dyn Fn(&str) -> TopicRule + Send + Sync),
    ) -> Result<Vec<(String, TopicRule)>, Trouble> {
        loop {
            let known = self.0.lock().expect("nobody panics while holding names").clone();
            let found: BTreeSet<String> = connection.query(probes(&known)).await?.into_iter().collect();
            let new: Vec<String> = found.difference(&known).cloned().collect();
            if new.is_empty() {
                let ruled = found.into_iter().map(|topic| (rule(&topic), topic));
                return Ok(ruled
                    .filter(|(rule, _)| rule.take > 0)
                    .map(|(rule, topic)| (topic, rule))
                    .collect());
            }
            // Between a new one and its neighbours there may be more.
            let mut known = self.0.lock().expect("nobody panics while holding names");
            if known.len() + new.len() > REMEMBERED {
                known.clear();
            }
            known.extend(new);
        }
    }
}

/// A look at each topic and into each gap between two.
fn probes(known: &BTreeSet<String>) -> String {
    let probe = |range: String| {
        format!(
            "(SELECT topic FROM outbox_events FORCE INDEX (outbox_ready)
              WHERE ready = 1 AND {range} ORDER BY topic LIMIT 1)"
        )
    };
    let mut probes = Vec::with_capacity(known.len() * 2 + 1);
    let mut last = String::new();
    for topic in known {
        let topic = quoted(topic);
        probes.push(probe(match last.is_empty() {
            true => format!("topic < {topic}"),
            false => format!("topic > {last} AND topic < {topic}"),
        }));
        probes.push(probe(format!("topic = {topic}")));
        last = topic;
    }
    probes.push(probe(if last.is_empty() { "true".to_owned() } else { format!("topic > {last}") }));
    probes.join(" UNION ALL ")
}

/// A topic as it stands in a statement. The column's check lets no quote into one; should that be gone, a name with a
/// quote in it finds nothing rather than something else.
pub(super) fn quoted(topic: &str) -> String {
    format!("'{}'", topic.replace(['\'', '\\'], ""))
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
    /// Messages that are sendable no more when this transaction ends.
    pub(super) leaving: &'a HashSet<i64>,
}

impl Search<'_> {
    pub(super) async fn run(&self, connection: &mut impl Queryable) -> Result<Found, Trouble> {
        let mut streams = self.streams();
        if streams.is_empty() || self.limit == 0 {
            return Ok(Found::default());
        }
        // What is leaving stands at the front of its stream.
        let most = self.limit + self.leaving.len();
        let share = (most.div_ceil(streams.len()) * 2).max(LEAST).min(most);
        self.read(connection, &mut streams, share).await?;
        let stays = |(seq, _): &&Candidate| !self.leaving.contains(seq);
        let found: usize = streams.iter().map(|stream| stream.found.iter().filter(stays).count()).sum();
        if found < self.limit && streams.iter().any(|stream| stream.cut) {
            // Few lanes have nearly all: those are read on, once.
            self.read(connection, &mut streams, most).await?;
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
        let sql = |place: &usize| {
            streams[*place].sql(*place, &self.topics[streams[*place].topic].0, self.mask, most)
        };
        let parts: Vec<String> = open.iter().map(sql).collect();
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
            by_topic[stream.topic].extend(stream.found.iter().filter(|(seq, _)| !self.leaving.contains(seq)));
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
    fn sql(&self, number: usize, topic: &str, mask: u16, most: usize) -> String {
        let lanes = match self.lanes.is_empty() {
            true => String::new(),
            false => format!(" AND slot & {mask} IN ({})", super::row::list(&self.lanes)),
        };
        let after = self.found.last().map(|(seq, _)| format!(" AND seq > {seq}")).unwrap_or_default();
        format!(
            "(SELECT {number}, seq, slot FROM outbox_events FORCE INDEX (outbox_ready)
              WHERE ready = 1 AND topic = {} AND stripe = {}{after}{lanes} ORDER BY seq LIMIT {most})",
            quoted(topic),
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
    use std::sync::LazyLock;

    use super::*;

    #[test]
    fn every_name_is_looked_for_once_known_or_not() {
        let sql = probes(&BTreeSet::from(["b".to_owned(), "d'".to_owned()]));
        for range in
            ["topic < 'b'", "topic = 'b'", "topic > 'b' AND topic < 'd'", "topic = 'd'", "topic > 'd'"]
        {
            assert_eq!(sql.matches(&format!("ready = 1 AND {range} ORDER")).count(), 1, "{range} in {sql}");
        }
        assert!(probes(&BTreeSet::new()).contains("ready = 1 AND true ORDER"));
    }

    fn rule(take: usize) -> TopicRule {
        TopicRule { channel: 0, take, hold_failed: true, hold_dead: true }
    }

    static NONE: LazyLock<HashSet<i64>> = LazyLock::new(HashSet::new);

    fn search<'a>(topics: &'a [(String, TopicRule)], lanes: &'a BTreeSet<u16>, count: u16) -> Search<'a> {
        Search { topics, lanes, mask: count - 1, limit: 10, leaving: &NONE }
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
    fn what_is_leaving_is_not_found_again() {
        let topics = [("a".to_owned(), rule(2))];
        let lanes = BTreeSet::from([0]);
        let leaving = HashSet::from([1, 2]);
        let search = Search { leaving: &leaving, ..search(&topics, &lanes, 1) };
        let found: Vec<Candidate> = (1..=5).map(|seq| (seq, 0)).collect();
        let found =
            search.merge(vec![Stream { topic: 0, stripe: 0, lanes: BTreeSet::new(), found, cut: false }]);
        assert_eq!(found.candidates, [(3, 0), (4, 0)]);
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
