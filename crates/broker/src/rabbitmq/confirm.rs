//! Which message was stored, by the confirmations and returns of one call.
//!
//! RabbitMQ *acknowledges* what it could route nowhere. Only the `mandatory` flag makes it send such a message back, just
//! before it acknowledges it. The client hands a return out with whichever confirmation it sees next; as confirmations
//! come several at once and in any order, that is often another message's. So a return counts for the message whose id is
//! in it, and nobody is confirmed while a return that may be its own is still on the way.

use std::collections::HashSet;

use crate::Outcome;

/// What was heard of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Nothing yet.
    Silence,
    /// It was never sent.
    Unsent,
    /// Acknowledged; `alone` when no return came with it. Then all returns before it have been handed out.
    Acked { alone: bool },
    /// Refused.
    Nacked,
    /// The channel broke first.
    Lost(String),
}

/// All that was heard in one call.
#[derive(Debug)]
pub(super) struct Tally {
    /// In the order in which they were sent.
    pub(super) answers: Vec<Answer>,
    /// The ids of those that came back.
    pub(super) returned: HashSet<String>,
}

impl Tally {
    pub(super) fn new(count: usize) -> Self {
        Self { answers: vec![Answer::Silence; count], returned: HashSet::new() }
    }

    /// Whether the broker has said its last word on all of them. Then every return has been handed out too.
    pub(super) fn complete(&self) -> bool {
        self.answers.iter().all(|answer| matches!(answer, Answer::Acked { .. } | Answer::Nacked))
    }

    /// What became of the message with this place and id.
    pub(super) fn judge(&self, index: usize, id: &str) -> Outcome {
        if self.returned.contains(id) {
            return Outcome::Misconfigured { error: "no queue is bound to it".to_owned() };
        }
        let unconfirmed = |error: &str| Outcome::Unconfirmed { error: error.to_owned() };
        match &self.answers[index] {
            Answer::Acked { alone } if *alone || self.complete() => Outcome::Confirmed,
            Answer::Acked { .. } => {
                unconfirmed("the answers to others are missing, and it may have come back")
            }
            Answer::Nacked => Outcome::Deferred {
                error: "RabbitMQ could not store it: a queue is full, or has no leader".to_owned(),
                after: None,
            },
            Answer::Lost(error) => unconfirmed(error),
            Answer::Silence => unconfirmed("RabbitMQ has not confirmed it in time"),
            Answer::Unsent => Outcome::Unreachable { error: "RabbitMQ takes no more for now".to_owned() },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A generator of the same numbers in every run.
    struct Chance(u64);

    impl Chance {
        fn below(&mut self, limit: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % limit
        }
    }

    /// As RabbitMQ and the client do it: a return precedes its own confirmation, confirmations come in any order, and
    /// each takes the oldest return that nobody has taken yet.
    fn play(chance: &mut Chance, cut: bool) -> (Tally, Vec<bool>) {
        let count = 1 + chance.below(12);
        let unroutable: Vec<bool> = (0..count).map(|_| chance.below(3) == 0).collect();
        let mut unanswered: Vec<usize> = (0..count).collect();
        let mut tally = Tally::new(count);
        let mut waiting = VecDeque::new();
        let last = if cut { chance.below(count + 1) } else { 0 };
        let mut announced = HashSet::new();
        while unanswered.len() > last {
            // Some returns run ahead of their confirmations.
            for index in unanswered.iter().filter(|index| unroutable[**index]) {
                if chance.below(2) == 0 && announced.insert(*index) {
                    waiting.push_back(*index);
                }
            }
            let index = unanswered.swap_remove(chance.below(unanswered.len()));
            if unroutable[index] && announced.insert(index) {
                waiting.push_back(index);
            }
            let taken: Option<usize> = waiting.pop_front();
            tally.returned.extend(taken.map(|index| index.to_string()));
            tally.answers[index] = Answer::Acked { alone: taken.is_none() };
        }
        (tally, unroutable)
    }

    #[test]
    fn what_came_back_is_never_confirmed_however_the_answers_are_mixed() {
        let mut chance = Chance(1);
        for round in 0..100_000 {
            let (tally, unroutable) = play(&mut chance, round % 2 == 0);
            for (index, unroutable) in unroutable.iter().enumerate() {
                let outcome = tally.judge(index, &index.to_string());
                assert!(!unroutable || outcome != Outcome::Confirmed, "round {round}: {tally:?}");
                // With all answers in, nobody is left in doubt either.
                let certain = *unroutable || outcome == Outcome::Confirmed;
                assert!(certain || !tally.complete(), "round {round}: {tally:?}");
            }
        }
    }

    #[test]
    fn every_answer_has_its_outcome() {
        let mut tally = Tally::new(4);
        tally.answers =
            vec![Answer::Nacked, Answer::Lost("gone".to_owned()), Answer::Silence, Answer::Unsent];
        assert!(matches!(tally.judge(0, "a"), Outcome::Deferred { .. }));
        assert!(matches!(tally.judge(1, "b"), Outcome::Unconfirmed { error } if error == "gone"));
        assert!(matches!(tally.judge(2, "c"), Outcome::Unconfirmed { .. }));
        assert!(matches!(tally.judge(3, "d"), Outcome::Unreachable { .. }));
        assert!(!tally.complete());
    }
}
