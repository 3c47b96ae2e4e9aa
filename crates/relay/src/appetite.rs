//! How much a train claims at once for a broker: more while a backlog waits and the broker is quick, less when it is slow.
//!
//! A large batch spreads the cost of a turn with the store and of the broker's answer over many messages. It also keeps
//! its first message unsettled until the last is answered, and after a crash all of it is sent again. So what a batch
//! may take is a time, and its size follows from it.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::route::Settle;

/// What a broker gets at first.
const FIRST: usize = 500;

/// What one gets that cannot give anything back: all of it may be lost.
const MOST_AT_STAKE: usize = 1_000;

/// A batch that was claimed, sent and answered sooner may be twice as large next time.
const QUICK: Duration = Duration::from_millis(100);

/// One that took longer must be as much smaller.
const SLOW: Duration = Duration::from_millis(400);

/// Those of all channels of a train, and whose turn it is.
///
/// A store counts what it takes for all channels together, so those with other appetites take turns: whoever has the
/// smallest gets no more than that. One for which nothing was there the last time makes nobody wait.
#[derive(Debug)]
pub(crate) struct Appetites {
    each: Vec<Appetite>,
    turns: usize,
}

/// What a turn may claim.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Portion {
    /// Messages at most.
    pub(crate) limit: usize,
    /// By channel, how many of a topic it may get.
    pub(crate) rooms: Vec<usize>,
    /// Nobody who is free has to wait for the next turn.
    pub(crate) all: bool,
}

impl Appetites {
    /// Of `most` messages at most, for these channels.
    pub(crate) fn new(most: usize, channels: &[Settle]) -> Self {
        let appetite = |settle: &Settle| match settle {
            Settle::After | Settle::Together => Appetite::new(most),
            Settle::Before => Appetite::new(most.min(MOST_AT_STAKE)),
        };
        Self { each: channels.iter().map(appetite).collect(), turns: 0 }
    }

    /// What the next turn claims for the channels that are free.
    pub(crate) fn share_out(&mut self, free: impl Fn(usize) -> bool) -> Portion {
        let free: Vec<Option<&Appetite>> = self
            .each
            .iter()
            .enumerate()
            .map(|(channel, appetite)| free(channel).then_some(appetite))
            .collect();
        let busy = free.iter().flatten().filter(|appetite| !appetite.idle).map(|appetite| appetite.now);
        let portions: BTreeSet<usize> = busy.collect();
        self.turns = self.turns.wrapping_add(1);
        let chosen = self.turns % portions.len().max(1);
        let most = free.iter().flatten().map(|appetite| appetite.now).max().unwrap_or(1);
        let limit = portions.into_iter().nth(chosen).unwrap_or(most);
        let room =
            |appetite: &Appetite| if appetite.idle || appetite.now >= limit { appetite.now } else { 0 };
        let rooms = free.iter().map(|appetite| appetite.map_or(0, room)).collect();
        Portion { limit, rooms, all: chosen == 0 }
    }

    /// What a turn with this portion found: by channel, whether anything was there.
    pub(crate) fn found(&mut self, portion: &Portion, there: impl Fn(usize) -> bool) {
        for (channel, appetite) in self.each.iter_mut().enumerate() {
            if portion.rooms[channel] > 0 {
                appetite.idle = !there(channel);
            }
        }
    }

    /// So many messages were sent to a channel, and claiming and sending took so long.
    pub(crate) fn learn(&mut self, channel: usize, sent: usize, took: Duration) {
        self.each[channel].learn(sent, took);
    }

    /// The channels that are free have no backlog.
    pub(crate) fn rest(&mut self, free: impl Fn(usize) -> bool) {
        for (_, appetite) in self.each.iter_mut().enumerate().filter(|(channel, _)| free(*channel)) {
            appetite.now = appetite.first;
        }
    }
}

/// One of them.
#[derive(Clone, Copy, Debug)]
struct Appetite {
    /// The last time, nothing was there.
    idle: bool,
    now: usize,
    first: usize,
    most: usize,
}

impl Appetite {
    fn new(most: usize) -> Self {
        let most = most.max(1);
        let first = FIRST.min(most);
        Self { idle: true, now: first, first, most }
    }

    fn learn(&mut self, sent: usize, took: Duration) {
        if took > SLOW {
            let share = SLOW.as_secs_f64() / took.as_secs_f64();
            self.now = ((self.now as f64 * share) as usize).max(self.first);
        } else if sent < self.now / 4 {
            // No more was there, no more had room, or the broker took no more.
            self.now = (self.now / 2).max(self.first);
        } else if took < QUICK && sent >= self.now / 2 {
            self.now = (self.now * 2).min(self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: usize = 3_000;
    const SOON: Duration = Duration::from_millis(50);
    const MIDDLING: Duration = Duration::from_millis(200);

    fn after(batches: &[(usize, Duration)]) -> usize {
        let mut appetite = Appetite::new(MOST);
        batches.iter().for_each(|(sent, took)| appetite.learn(*sent, *took));
        appetite.now
    }

    /// Two channels, of which the first has grown.
    fn grown_and_small() -> Appetites {
        let mut appetites = Appetites::new(MOST, &[Settle::After; 2]);
        let portion = appetites.share_out(|_| true);
        appetites.found(&portion, |_| true);
        appetites.learn(0, FIRST, SOON);
        appetites
    }

    fn portion(limit: usize, rooms: [usize; 2]) -> Portion {
        Portion { limit, rooms: rooms.to_vec(), all: rooms[1] > 0 || limit == 1 }
    }

    #[test]
    fn full_batches_that_are_quick_grow_up_to_the_limit() {
        assert_eq!(after(&[(500, SOON)]), 1_000);
        assert_eq!(after(&[(500, SOON), (1_000, SOON), (2_000, SOON), (3_000, SOON)]), MOST);
    }

    #[test]
    fn at_a_middling_pace_nothing_changes() {
        assert_eq!(after(&[(500, SOON), (1_000, MIDDLING), (1_000, MIDDLING)]), 1_000);
    }

    #[test]
    fn a_slow_batch_makes_the_next_one_as_much_smaller_and_never_smaller_than_the_first() {
        let grown = [(500, SOON), (1_000, SOON)];
        assert_eq!(after(&[grown[0], grown[1], (2_000, SLOW * 2)]), 1_000);
        assert_eq!(after(&[grown[0], grown[1], (2_000, SLOW * 100)]), FIRST);
    }

    #[test]
    fn it_shrinks_where_little_is_sent() {
        let grown = [(500, SOON), (1_000, SOON), (2_000, SOON)];
        assert_eq!(after(&[grown[0], grown[1], grown[2], (10, SOON)]), MOST / 2);
    }

    #[test]
    fn a_channel_gets_no_more_than_it_can_swallow_and_none_waits_for_more_than_a_turn() {
        let mut appetites = grown_and_small();
        assert_eq!(appetites.share_out(|_| true), portion(FIRST, [2 * FIRST, FIRST]));
        assert_eq!(appetites.share_out(|_| true), portion(2 * FIRST, [2 * FIRST, 0]));
        assert_eq!(appetites.share_out(|channel| channel == 1), portion(FIRST, [0, FIRST]));
        assert_eq!(appetites.share_out(|_| false), portion(1, [0, 0]));
    }

    #[test]
    fn a_channel_without_messages_makes_no_other_take_less() {
        let mut appetites = grown_and_small();
        let small = appetites.share_out(|_| true);
        appetites.found(&small, |channel| channel == 0);
        for _ in 0..3 {
            assert_eq!(appetites.share_out(|_| true), portion(2 * FIRST, [2 * FIRST, FIRST]));
        }
        appetites.found(&small, |_| true);
        assert_eq!(appetites.share_out(|_| true).limit + appetites.share_out(|_| true).limit, 3 * FIRST);
    }

    #[test]
    fn a_channel_without_a_backlog_begins_anew_and_one_on_its_way_keeps_what_it_learned() {
        let mut appetites = grown_and_small();
        appetites.rest(|channel| channel == 1);
        assert_eq!(appetites.share_out(|channel| channel == 0).limit, 2 * FIRST);
        appetites.rest(|_| true);
        assert_eq!(appetites.share_out(|_| true), portion(FIRST, [FIRST, FIRST]));
    }

    #[test]
    fn a_limit_below_the_first_is_kept() {
        let mut appetite = Appetite::new(100);
        appetite.learn(100, SOON);
        assert_eq!(appetite.now, 100);
        appetite.learn(100, SLOW * 2);
        assert_eq!(appetite.now, 100);
    }
}
