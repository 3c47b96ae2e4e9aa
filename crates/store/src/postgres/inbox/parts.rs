//! A large call in shares that are done side by side, and each of them in parts, one transaction after another.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::{Arrival, InboxRules, stuck};

/// Keys that a call locks at a time, at most. A server has room for some thousands of locks, all its transactions together:
/// with the usual settings for 12,000.
pub(super) const KEYS: usize = 2_000;

/// Messages that are worth a transaction beside others of their call, and how many of those there are at most.
const SHARE: usize = 1_000;
const ABREAST: usize = 4;

/// The topic and key within which a message keeps its order.
pub(super) fn ordered_key<'a>(arrival: &'a Arrival, rules: &InboxRules) -> Option<(&'a str, &'a str)> {
    stuck::key(arrival).filter(|_| rules.ordered)
}

/// The places of a call in shares that are done side by side: a server has a process for each connection, and one of them uses
/// one processor. Messages of a key are in one share.
pub(super) fn shares(arrivals: &[Arrival], rules: &InboxRules) -> Vec<Vec<usize>> {
    let count = (arrivals.len() / SHARE).clamp(1, ABREAST);
    let mut shares = vec![Vec::with_capacity(arrivals.len() / count); count];
    for (place, arrival) in arrivals.iter().enumerate() {
        let mut hash = DefaultHasher::new();
        match ordered_key(arrival, rules) {
            Some(key) => key.hash(&mut hash),
            None => arrival.message.id.0.hash(&mut hash),
        }
        shares[(hash.finish() % count as u64) as usize].push(place);
    }
    shares.retain(|share| !share.is_empty());
    shares
}

/// A call in parts of `most` keys, one transaction after another.
pub(super) fn parts<'a, T>(
    items: &'a [T],
    rules: &InboxRules,
    most: usize,
    arrival: impl Fn(&'a T) -> &'a Arrival,
) -> Vec<&'a [T]> {
    let mut parts = Vec::new();
    let mut keys = HashSet::new();
    let mut begin = 0;
    for (place, item) in items.iter().enumerate() {
        keys.extend(ordered_key(arrival(item), rules));
        if keys.len() == most || place + 1 == items.len() {
            parts.push(&items[begin..=place]);
            begin = place + 1;
            keys.clear();
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use message::Message;

    use super::*;

    #[test]
    fn messages_of_a_key_share_a_transaction_in_their_order_and_a_small_call_is_one() {
        let arrivals: Vec<Arrival> = (0..4_500)
            .map(|number| {
                let message = Message::new("orders", number.to_string());
                let message = if number % 10 == 0 { message } else { message.key((number % 90).to_string()) };
                Arrival { message, seq: Some(number), delivery: 0 }
            })
            .collect();
        let rules = InboxRules::default();
        assert_eq!(shares(&arrivals[..1_999], &rules), [(0..1_999).collect::<Vec<_>>()]);
        assert_eq!(shares(&[], &rules), Vec::<Vec<usize>>::new());
        let shares = shares(&arrivals, &rules);
        assert_eq!(shares.len(), ABREAST);
        let mut share_of: HashMap<&str, usize> = HashMap::new();
        for (number, share) in shares.iter().enumerate() {
            assert!(share.is_sorted() && share.len() > 500, "{} in a share", share.len());
            for (_, key) in share.iter().filter_map(|place| ordered_key(&arrivals[*place], &rules)) {
                assert_eq!(*share_of.entry(key).or_insert(number), number, "{key}");
            }
        }
        let mut places = shares.concat();
        places.sort_unstable();
        assert!(places.into_iter().eq(0..arrivals.len()));
    }
}
