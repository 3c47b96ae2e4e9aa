//! Which partition a message goes to, and which partitions know a producer.
//!
//! Servers keep the requests of a producer in order by their sequence numbers. But where nothing of a producer is stored
//! yet, whatever comes first is taken: a server that refuses the first request and takes the second (it has just become
//! the leader, say) has let the second overtake, and librdkafka believes that the first must be stored too, since a
//! later one is. So until a partition has stored something of a producer, one message at a time is on its way there.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Servers forget a producer of which they heard nothing for a day, where nobody set it otherwise.
const KNOWN_FOR: Duration = Duration::from_secs(60 * 60);

/// Messages without a key that go to one partition before the next has its turn: they share requests.
const RUN: usize = 256;

/// A place in Kafka: the full name of a topic, and a partition of it.
pub(super) type Spot<'a> = (&'a str, i32);

/// Spreads messages over the partitions of their topics.
pub(super) struct Spread {
    run: usize,
    /// Messages without a key so far.
    keyless: usize,
}

impl Spread {
    /// Begins with the partition after that with which the last one began.
    pub(super) fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Self { run: NEXT.fetch_add(1, Ordering::Relaxed), keyless: 0 }
    }

    /// The partition for a message: by its key as the Java client would, or the next in turn.
    pub(super) fn choose(&mut self, key: Option<&[u8]>, partitions: i32) -> i32 {
        let partitions = partitions.max(1);
        match key {
            Some(key) => (murmur2(key) & 0x7fff_ffff) as i32 % partitions,
            None => {
                let run = self.run.wrapping_add(self.keyless / RUN);
                self.keyless += 1;
                (run % partitions.unsigned_abs() as usize) as i32
            }
        }
    }
}

/// The partitions that know a producer: by topic, since when each does.
#[derive(Default)]
pub(super) struct Acquainted(Mutex<HashMap<String, Vec<Option<Instant>>>>);

impl Acquainted {
    /// The number of the first message for each partition that does not know the producer.
    pub(super) fn strangers(&self, spots: &[Spot<'_>]) -> Vec<usize> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, mut seen) = (Instant::now(), HashSet::new());
        // Most are of the same topic as the one before.
        let (mut last, mut met): (_, &[Option<Instant>]) = ("", &[]);
        let mut strangers = Vec::new();
        for (number, (topic, partition)) in spots.iter().enumerate() {
            if *topic != last {
                (last, met) = (*topic, known.get(*topic).map_or(&[][..], Vec::as_slice));
            }
            let since = met.get(partition.unsigned_abs() as usize).copied().flatten();
            let is_known = since.is_some_and(|since| now.duration_since(since) < KNOWN_FOR);
            if !is_known && seen.insert((*topic, *partition)) {
                strangers.push(number);
            }
        }
        strangers
    }

    /// It has stored something.
    pub(super) fn meet(&self, (topic, partition): Spot<'_>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let met = known.entry(topic.to_owned()).or_default();
        let place = partition.unsigned_abs() as usize;
        met.resize(met.len().max(place + 1), None);
        met[place] = Some(Instant::now());
    }
}

/// The hash by which Kafka's own clients choose: MurmurHash2 of 32 bits, with a seed of theirs.
fn murmur2(bytes: &[u8]) -> u32 {
    const MIX: u32 = 0x5bd1_e995;
    let mix = |word: u32| {
        let word = word.wrapping_mul(MIX);
        (word ^ (word >> 24)).wrapping_mul(MIX)
    };
    let (words, tail) = bytes.as_chunks::<4>();
    let seed = 0x9747_b28c ^ bytes.len() as u32;
    let mut hash =
        words.iter().fold(seed, |hash, word| hash.wrapping_mul(MIX) ^ mix(u32::from_le_bytes(*word)));
    if !tail.is_empty() {
        let rest = tail.iter().rev().fold(0, |rest, byte| (rest << 8) | u32::from(*byte));
        hash = (hash ^ rest).wrapping_mul(MIX);
    }
    hash = (hash ^ (hash >> 13)).wrapping_mul(MIX);
    hash ^ (hash >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_hashes_that_other_clients_give_them() {
        let expected: [(&str, i32); 6] = [
            ("21", -973_932_308),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("a-little-bit-longer-string", -1_486_304_829),
            ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            ("abc", 479_470_107),
        ];
        for (key, hash) in expected {
            assert_eq!(murmur2(key.as_bytes()) as i32, hash, "{key}");
        }
    }

    #[test]
    fn messages_without_a_key_share_a_partition_for_a_while_and_use_all() {
        let mut spread = Spread::new();
        let chosen: Vec<i32> = (0..4 * RUN).map(|_| spread.choose(None, 4)).collect();
        let runs: HashSet<_> =
            chosen.chunks(RUN).map(|run| (run[0], run.iter().all(|p| *p == run[0]))).collect();
        assert_eq!(runs, (0..4).map(|partition| (partition, true)).collect());
    }

    #[tokio::test(start_paused = true)]
    async fn a_partition_is_a_stranger_until_it_was_met_and_again_after_a_while() {
        let known = Acquainted::default();
        let spots = [("orders", 0), ("orders", 1), ("orders", 0), ("refunds", 0)];
        assert_eq!(known.strangers(&spots), [0, 1, 3]);
        known.meet(("orders", 0));
        assert_eq!(known.strangers(&spots), [1, 3]);
        tokio::time::advance(KNOWN_FOR).await;
        assert_eq!(known.strangers(&spots), [0, 1, 3]);
    }
}
