//! Who is in a group and who holds which partition: one small record that every member reads and rewrites.
//!
//! The record is one entry of a key-value bucket. It is only ever replaced by who has read its last revision, so all
//! changes come one after another, and each is a function of the record before it: this file.
//!
//! Nobody takes a partition from a living member. Members of a topic share its partitions as evenly as whole numbers
//! allow; who has more than its share gives some up when it is done with them. A member lives for as long as its number
//! of beats grows; who has watched it stand still for the length of its lease, by the watcher's own clock, may remove it.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::partition::fnv1a;

/// The record of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Roster {
    /// How many partitions a topic has, as the first member knew it.
    partitions: u32,
    members: BTreeMap<String, Member>,
    /// By topic and number.
    holders: BTreeMap<String, BTreeMap<u32, Holder>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Member {
    beats: u64,
    lease_ms: u64,
    topics: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    member: Option<String>,
    /// Grows with every change of hands.
    epoch: u64,
}

/// A member, as it asks to be in the record.
#[derive(Clone, Debug)]
pub(super) struct Applicant {
    pub(super) id: String,
    pub(super) lease: Duration,
    pub(super) topics: Vec<String>,
    pub(super) partitions: u32,
}

/// What one member has of one topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) topic: String,
    /// Numbers and epochs.
    pub(super) held: Vec<(u32, u64)>,
    /// How many it should hold. It may hold more until it is done with them.
    pub(super) fair: usize,
}

impl Roster {
    /// Into how many partitions others divide, if that is not what `applicant` does.
    pub(super) fn disagrees(&self, applicant: &Applicant) -> Option<u32> {
        let others = !self.members.is_empty() && self.partitions != applicant.partitions;
        others.then_some(self.partitions)
    }

    /// Removes the dead, gives up what was released, and takes what is free and due. `beat`: shows that it lives.
    pub(super) fn renew(
        &mut self,
        applicant: &Applicant,
        dead: &[String],
        released: &[(String, u32, u64)],
        beat: bool,
    ) -> Vec<Share> {
        self.partitions = applicant.partitions;
        for id in dead.iter().filter(|id| **id != applicant.id) {
            self.members.remove(id);
        }
        for (topic, number, epoch) in released {
            let holder = self.holders.get_mut(topic).and_then(|holders| holders.get_mut(number));
            if let Some(holder) = holder
                .filter(|holder| holder.epoch == *epoch && holder.member.as_ref() == Some(&applicant.id))
            {
                holder.member = None;
            }
        }
        let new = || Member {
            beats: 0,
            lease_ms: u64::try_from(applicant.lease.as_millis()).unwrap_or(u64::MAX),
            topics: applicant.topics.clone(),
        };
        let me = self.members.entry(applicant.id.clone()).or_insert_with(new);
        me.beats += u64::from(beat);
        self.free_orphans();
        applicant.topics.iter().map(|topic| self.share(applicant, topic)).collect()
    }

    /// Leaves: what it held is free at once.
    pub(super) fn leave(&mut self, id: &str) {
        self.members.remove(id);
        self.free_orphans();
    }

    fn free_orphans(&mut self) {
        for holder in self.holders.values_mut().flat_map(BTreeMap::values_mut) {
            if holder.member.as_ref().is_some_and(|member| !self.members.contains_key(member)) {
                holder.member = None;
            }
        }
    }

    fn share(&mut self, applicant: &Applicant, topic: &str) -> Share {
        let interested =
            self.members.iter().filter(|(_, member)| member.topics.iter().any(|name| name == topic));
        let circle: Vec<&String> = interested.map(|(id, _)| id).collect();
        // Turned by topic, so that the first member does not get the odd one of each.
        let turn = (fnv1a(topic.as_bytes()) % circle.len().max(1) as u64) as usize;
        let place = circle.iter().position(|id| **id == applicant.id).unwrap_or_default();
        let fair =
            fair(applicant.partitions as usize, circle.len().max(1), (place + turn) % circle.len().max(1));
        let holders = self.holders.entry(topic.to_owned()).or_default();
        for number in 0..applicant.partitions {
            holders.entry(number).or_default();
        }
        let mine = |holder: &Holder| holder.member.as_ref() == Some(&applicant.id);
        let mut count = holders.values().filter(|holder| mine(holder)).count();
        for holder in holders.values_mut() {
            if count < fair && holder.member.is_none() {
                holder.member = Some(applicant.id.clone());
                holder.epoch += 1;
                count += 1;
            }
        }
        let held = holders.iter().filter(|(_, holder)| mine(holder));
        Share {
            topic: topic.to_owned(),
            held: held.map(|(number, holder)| (*number, holder.epoch)).collect(),
            fair,
        }
    }
}

/// The share of the member of this rank: the first few get one more when it does not come out even.
fn fair(partitions: usize, members: usize, rank: usize) -> usize {
    partitions / members + usize::from(rank < partitions % members)
}

/// Who was seen when, by our own clock: those who stand still for the length of their lease are dead.
#[derive(Debug, Default)]
pub(super) struct Watch {
    seen: HashMap<String, (u64, Instant)>,
}

impl Watch {
    /// Looks at the record as it is now. Those who are named have not moved for the length of their lease.
    pub(super) fn dead(&mut self, roster: &Roster, now: Instant) -> Vec<String> {
        self.seen.retain(|id, _| roster.members.contains_key(id));
        let mut dead = Vec::new();
        for (id, member) in &roster.members {
            let (beats, since) = self.seen.entry(id.clone()).or_insert((member.beats, now));
            if *beats != member.beats {
                (*beats, *since) = (member.beats, now);
            }
            if now.duration_since(*since) > Duration::from_millis(member.lease_ms) {
                dead.push(id.clone());
            }
        }
        dead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applicant(id: &str, topics: &[&str]) -> Applicant {
        Applicant {
            id: id.to_owned(),
            lease: Duration::from_secs(10),
            topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
            partitions: 5,
        }
    }

    fn count(shares: &[Share]) -> usize {
        shares.iter().map(|share| share.held.len()).sum()
    }

    fn released(share: &Share, over: usize) -> Vec<(String, u32, u64)> {
        share.held.iter().take(over).map(|(number, epoch)| (share.topic.clone(), *number, *epoch)).collect()
    }

    #[test]
    fn a_member_that_comes_gets_its_share_when_the_others_are_done_with_it() {
        let (ann, bob) = (applicant("ann", &["orders"]), applicant("bob", &["orders"]));
        let mut roster = Roster::default();
        assert_eq!(count(&roster.renew(&ann, &[], &[], true)), 5);
        assert_eq!(count(&roster.renew(&bob, &[], &[], true)), 0, "nothing is taken from the living");
        let share = roster.renew(&ann, &[], &[], true).remove(0);
        assert_eq!(share.held.len(), 5);
        let over = released(&share, 5 - share.fair);
        assert_eq!(count(&roster.renew(&ann, &[], &over, true)), share.fair);
        let bobs = roster.renew(&bob, &[], &[], true).remove(0);
        assert_eq!(bobs.held.len(), 5 - share.fair);
        assert!(bobs.held.iter().all(|(_, epoch)| *epoch == 2), "another holder is another epoch");
    }

    #[test]
    fn what_a_member_had_is_free_when_it_leaves_or_is_dead() {
        let (ann, bob) = (applicant("ann", &["orders"]), applicant("bob", &["orders"]));
        let mut roster = Roster::default();
        roster.renew(&ann, &[], &[], true);
        roster.leave("ann");
        assert_eq!(count(&roster.renew(&bob, &[], &[], true)), 5);
        assert_eq!(count(&roster.renew(&ann, &["bob".to_owned()], &[], true)), 5);
        // A late word of the dead changes nothing.
        let late: Vec<_> = (0..5).map(|number| ("orders".to_owned(), number, 2)).collect();
        assert_eq!(count(&roster.renew(&bob, &[], &late, true)), 0);
        assert_eq!(count(&roster.renew(&ann, &[], &[], true)), 5);
    }

    #[test]
    fn every_partition_finds_a_holder_among_those_who_ask_for_its_topic() {
        let members = [
            applicant("ann", &["orders"]),
            applicant("bob", &["orders", "refunds"]),
            applicant("cid", &["refunds"]),
        ];
        let mut roster = Roster::default();
        let mut shares = Vec::new();
        for _ in 0..4 {
            shares.clear();
            for member in &members {
                let mine = roster.renew(member, &[], &[], true);
                let over: Vec<_> = mine
                    .iter()
                    .flat_map(|share| released(share, share.held.len().saturating_sub(share.fair)))
                    .collect();
                shares.extend(roster.renew(member, &[], &over, false));
            }
        }
        for topic in ["orders", "refunds"] {
            let mut numbers: Vec<u32> = shares
                .iter()
                .filter(|share| share.topic == topic)
                .flat_map(|share| share.held.iter().map(|(number, _)| *number))
                .collect();
            numbers.sort_unstable();
            assert_eq!(numbers, [0, 1, 2, 3, 4], "{topic}");
        }
        assert!(shares.iter().all(|share| (2..=3).contains(&share.held.len())), "{shares:?}");
    }

    #[test]
    fn a_look_that_changes_nothing_leaves_the_record_as_it_was() {
        let ann = applicant("ann", &["orders"]);
        let mut roster = Roster::default();
        roster.renew(&ann, &[], &[], true);
        let before = roster.clone();
        roster.renew(&ann, &[], &[], false);
        assert_eq!(roster, before);
        assert_eq!(roster.disagrees(&Applicant { partitions: 16, ..ann }), Some(5));
    }

    #[test]
    fn only_who_stands_still_for_its_whole_lease_is_dead() {
        let ann = applicant("ann", &["orders"]);
        let mut roster = Roster::default();
        roster.renew(&ann, &[], &[], true);
        let (mut watch, begun) = (Watch::default(), Instant::now());
        let after = |seconds| begun + Duration::from_secs(seconds);
        assert!(watch.dead(&roster, after(0)).is_empty());
        assert!(watch.dead(&roster, after(9)).is_empty());
        roster.renew(&ann, &[], &[], true);
        assert!(watch.dead(&roster, after(11)).is_empty(), "it was seen to move");
        assert_eq!(watch.dead(&roster, after(22)), ["ann"]);
    }

    #[test]
    fn the_record_can_be_read_again() {
        let mut roster = Roster::default();
        roster.renew(&applicant("ann", &["orders"]), &[], &[], true);
        let text = serde_json::to_vec(&roster).expect("it can be written");
        assert_eq!(serde_json::from_slice::<Roster>(&text).expect("it can be read"), roster);
    }
}
