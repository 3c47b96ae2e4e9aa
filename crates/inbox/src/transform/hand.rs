//! What a member has received and not finished: partition by partition, in order.
//!
//! A partition that has anything in hand gives nothing more until all of it is finished, so a message that fails holds its
//! own partition and no other.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Instant;

use broker::{Delivery, Outgoing, Position, Seen};
use message::Message;
use store::Arrival;

use super::letter::Cut;

/// Messages of one transaction at most, and bytes of it, near enough: what does not get through in time would be tried again
/// as it is.
const MOST_MESSAGES: usize = 10_000;
const MOST_BYTES: usize = 8 << 20;

/// A message in hand.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) arrival: Arrival,
    pub(super) position: Position,
    /// How often its handler failed.
    pub(super) attempts: u32,
    /// How it failed last.
    pub(super) error: String,
    /// Not to be tried before.
    pub(super) due: Option<Instant>,
    /// What was made of it.
    pub(super) made: Option<Vec<Message>>,
    /// Why it is given up: then what was made of it is its dead letter.
    pub(super) dead: Option<String>,
    /// What is left out of that.
    pub(super) cut: Cut,
}

impl Item {
    /// The topic and key within which order matters.
    fn lane(&self) -> Option<(&str, &str)> {
        let message = &self.arrival.message;
        Some((message.topic.as_str(), message.key.as_deref()?))
    }
}

/// Where an item is: the partition, and its place in it.
pub(super) type Place = (u64, usize);

#[derive(Debug, Default)]
pub(super) struct Hand {
    partitions: BTreeMap<u64, Vec<Item>>,
}

/// What can be finished now.
#[derive(Debug, Default)]
pub(super) struct Ready {
    /// The last of each partition: it speaks for all before it.
    pub(super) positions: Vec<Position>,
    pub(super) outgoing: Vec<Outgoing>,
    /// Of which item each outgoing message is.
    pub(super) of: Vec<Place>,
    /// How many items of each partition.
    counts: Vec<(u64, usize)>,
}

impl Hand {
    pub(super) fn take(&mut self, deliveries: Vec<Delivery>) {
        for Delivery { message, seq, delivery, position } in deliveries {
            let arrival = Arrival { message, seq, delivery };
            let item = Item {
                arrival,
                position,
                attempts: 0,
                error: String::new(),
                due: None,
                made: None,
                dead: None,
                cut: Cut::Nothing,
            };
            self.partitions.entry(position.partition).or_default().push(item);
        }
    }

    /// The partitions that have something in hand.
    pub(super) fn held(&self) -> BTreeSet<u64> {
        self.partitions.keys().copied().collect()
    }

    /// Lets these partitions go; answers where each of them has to begin again.
    pub(super) fn let_go(&mut self, partitions: &[u64]) -> Vec<Position> {
        let gone = partitions.iter().filter_map(|partition| self.partitions.remove(partition));
        gone.filter_map(|items| Some(items.first()?.position)).collect()
    }

    pub(super) fn item(&mut self, (partition, place): Place) -> Option<&mut Item> {
        self.partitions.get_mut(&partition)?.get_mut(place)
    }

    /// One that was tried again in vain and holds its partition.
    pub(super) fn holding(&self) -> Option<&Item> {
        self.partitions.values().flatten().find(|item| item.made.is_none() && item.attempts > 1)
    }

    /// When the first of those that wait is to be tried again.
    pub(super) fn due(&self) -> Option<Instant> {
        let mut lanes = HashSet::new();
        let waiting = self.partitions.values().flatten().filter(|item| item.made.is_none());
        // One behind another of its key has to wait for that one, whatever was said of it before.
        let first = waiting.filter(|item| item.lane().is_none_or(|lane| lanes.insert(lane)));
        first.filter_map(|item| item.due).min()
    }

    /// What may be tried now: a queue for each topic and key, whose messages go one after another. Nothing passes an earlier
    /// one of its key that waits.
    pub(super) fn queues(&self, now: Instant) -> Vec<Vec<(Place, &Item)>> {
        let mut queues: Vec<Vec<(Place, &Item)>> = Vec::new();
        let mut of_lane: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        let mut stuck = HashSet::new();
        for (partition, items) in &self.partitions {
            for (place, item) in items.iter().enumerate().filter(|(_, item)| item.made.is_none()) {
                let lane = item.lane();
                if lane.is_some_and(|lane| stuck.contains(&lane)) {
                    continue;
                }
                if item.due.is_some_and(|due| due > now) {
                    stuck.extend(lane);
                    continue;
                }
                let turn = ((*partition, place), item);
                match lane.and_then(|lane| of_lane.get(&lane).copied()) {
                    Some(queue) => queues[queue].push(turn),
                    None => {
                        lane.map(|lane| of_lane.insert(lane, queues.len()));
                        queues.push(vec![turn]);
                    }
                }
            }
        }
        queues
    }

    /// What is made and has nothing before it in its partition that is not: as much as one transaction should have.
    pub(super) fn ready(&self) -> Ready {
        let mut ready = Ready::default();
        let (mut messages, mut bytes) = (0, 0);
        for (partition, items) in &self.partitions {
            let fits = |item: &&Item| {
                let Some(made) = &item.made else { return false };
                // One has to go, however large it is.
                let room = messages == 0 || messages + made.len() <= MOST_MESSAGES && bytes <= MOST_BYTES;
                messages += made.len().max(1);
                bytes += made.iter().map(Message::size).sum::<usize>();
                room
            };
            let count = items.iter().take_while(fits).count();
            let Some(last) = items[..count].last() else { continue };
            ready.positions.push(last.position);
            ready.counts.push((*partition, count));
            for (place, item) in items[..count].iter().enumerate() {
                let seq = item.arrival.seq.unwrap_or(item.position.offset);
                for message in item.made.iter().flatten() {
                    // So that nobody looks for it in the outbox.
                    let of = item.arrival.message.id.to_string();
                    ready.outgoing.push(Outgoing::new(message.clone().header(Seen::MADE_OF, of), seq));
                    ready.of.push((*partition, place));
                }
            }
        }
        ready
    }

    /// These are finished; answers them.
    pub(super) fn finished(&mut self, ready: &Ready) -> Vec<Item> {
        let mut finished = Vec::new();
        for (partition, count) in &ready.counts {
            if let Some(items) = self.partitions.get_mut(partition) {
                finished.extend(items.drain(..*count));
            }
        }
        self.partitions.retain(|_, items| !items.is_empty());
        finished
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn delivery(partition: u64, offset: i64, key: &str) -> Delivery {
        let message = Message::new("orders", offset.to_string()).key(key);
        Delivery { message, seq: None, delivery: 0, position: Position { partition, offset } }
    }

    fn places(queues: Vec<Vec<(Place, &Item)>>) -> Vec<Vec<Place>> {
        queues.into_iter().map(|queue| queue.into_iter().map(|(place, _)| place).collect()).collect()
    }

    #[test]
    fn what_is_made_says_of_which_message_it_was_made() {
        let mut hand = Hand::default();
        let order = delivery(0, 5, "a");
        let of = order.message.id.to_string();
        hand.take(vec![order]);
        // A handler that passes headers on does not deceive anybody.
        let made = Message::new("bills", "1").header("a", "b").header(Seen::MADE_OF, "another");
        hand.item((0, 0)).expect("it is there").made = Some(vec![made]);
        let headers = &hand.ready().outgoing[0].message.headers;
        assert_eq!((headers[Seen::MADE_OF].as_str(), headers["a"].as_str()), (of.as_str(), "b"));
    }

    #[test]
    fn a_transaction_has_no_more_than_gets_through_and_one_message_at_least() {
        let mut hand = Hand::default();
        hand.take(vec![delivery(0, 5, "a"), delivery(0, 6, "b"), delivery(1, 9, "c"), delivery(1, 10, "d")]);
        let large = Message::new("bills", vec![0; MOST_BYTES + 1]);
        let made = [vec![large], Vec::new(), vec![Message::new("bills", "1"); MOST_MESSAGES], Vec::new()];
        for (place, made) in [(0, 0), (0, 1), (1, 0), (1, 1)].into_iter().zip(made) {
            hand.item(place).expect("it is there").made = Some(made);
        }
        let mut sent = Vec::new();
        while !hand.held().is_empty() {
            let ready = hand.ready();
            sent.push((ready.outgoing.len(), hand.finished(&ready).len()));
        }
        assert_eq!(sent, [(1, 1), (0, 1), (MOST_MESSAGES, 2)]);
    }

    #[test]
    fn a_message_that_waits_holds_its_key_and_what_is_behind_it_in_its_partition() {
        let (mut hand, now) = (Hand::default(), Instant::now());
        hand.take(vec![
            delivery(0, 5, "a"),
            delivery(0, 6, "b"),
            delivery(0, 7, "a"),
            delivery(1, 9, "c"),
            delivery(1, 10, "c"),
        ]);
        assert_eq!(places(hand.queues(now)), [vec![(0, 0), (0, 2)], vec![(0, 1)], vec![(1, 0), (1, 1)]]);
        hand.item((0, 0)).expect("it is there").due = Some(now + Duration::from_secs(1));
        assert_eq!(places(hand.queues(now)), [vec![(0, 1)], vec![(1, 0), (1, 1)]]);
        assert_eq!(hand.due(), Some(now + Duration::from_secs(1)));
        for place in [(0, 1), (1, 0), (1, 1)] {
            hand.item(place).expect("it is there").made = Some(vec![Message::new("bills", "1")]);
        }
        let ready = hand.ready();
        assert_eq!(ready.positions, [Position { partition: 1, offset: 10 }]);
        assert_eq!((ready.outgoing.len(), &ready.of[..]), (2, &[(1, 0), (1, 1)][..]));
        assert_eq!(hand.finished(&ready).len(), 2);
        assert_eq!(hand.held(), BTreeSet::from([0]));
        assert_eq!(hand.let_go(&[0, 3]), [Position { partition: 0, offset: 5 }]);
        assert_eq!((hand.held(), hand.due()), (BTreeSet::new(), None));
    }
}
