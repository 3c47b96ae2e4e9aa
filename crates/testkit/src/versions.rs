//! Updates that carry a version: what every store must answer, however it is asked.
//!
//! They are no part of the store's contracts, because each store has them in the transaction of the application: as a
//! function of its driver, of the database or of a script. The questions and their answers are the same for all.

use std::future::Future;

/// What somebody asks before an update.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// Who asks, such as a group.
    pub scope: &'static str,
    /// What the version is of.
    pub entity: &'static str,
    /// The version that must have been applied last, 0 for none; nothing where any older one may have been.
    pub expected: Option<i64>,
    /// The version of the update.
    pub version: i64,
}

const fn newer(entity: &'static str, version: i64) -> Question {
    Question { scope: "prices", entity, expected: None, version }
}

const fn swap(entity: &'static str, expected: i64, version: i64) -> Question {
    Question { scope: "prices", entity, expected: Some(expected), version }
}

/// Beyond this a number with a fraction no longer tells one whole number from the next.
const LARGE: i64 = 1 << 53;

/// One after the other, on a store that knows no versions yet: the question, its answer, and why.
const CASES: [(Question, bool, &str); 31] = [
    (newer("42", 2), true, "it is the first"),
    (newer("42", 1), false, "it came late"),
    (newer("42", 2), false, "it came again"),
    (newer("42", 10), true, "ten is more than two"),
    (newer("42", 9), false, "nine is less than ten"),
    (newer("43", 1), true, "of another entity"),
    (newer("4\u{df}", 1), true, "of another entity"),
    (newer("42 ", 1), true, "a space makes it another entity"),
    (newer("a", 1), true, "of another entity"),
    (newer("A", 1), true, "and so does its case"),
    (Question { scope: "stock", ..newer("42", 1) }, true, "in another scope"),
    (Question { scope: "stock", ..newer("42", 1) }, false, "there it came again"),
    (newer("large", LARGE), true, "it is the first"),
    (newer("large", LARGE + 1), true, "one more is more, however large"),
    (newer("large", LARGE), false, "one less is less"),
    (newer("large", i64::MAX), true, "the largest"),
    (newer("cold", -5), true, "below nothing is something"),
    (newer("cold", -6), false, "it is less"),
    (newer("cold", -10), false, "so is this"),
    (newer("cold", -4), true, "it is more"),
    (newer("cold", 0), true, "so is this"),
    (swap("tea", 1, 2), false, "there is no version yet"),
    (swap("tea", 0, 1), true, "none was expected"),
    (swap("tea", 0, 2), false, "there is one now"),
    (swap("tea", 1, 5), true, "as expected"),
    (swap("tea", 1, 6), false, "somebody was quicker"),
    (newer("tea", 4), false, "a swap is remembered"),
    (swap("tea", 5, 3), true, "it need not be newer"),
    (newer("tea", 4), true, "now it is"),
    (swap("tea", 4, LARGE + 1), true, "a newer one is remembered"),
    (swap("tea", LARGE, 1), false, "one less is another, however large"),
];

/// Asks everything, one after the other.
///
/// # Panics
/// When an answer is wrong.
pub async fn stale_ones_are_told(mut ask: impl AsyncFnMut(Question) -> bool) {
    for (question, answer, why) in CASES {
        assert_eq!(ask(question).await, answer, "{question:?}: {why}");
    }
}

/// Asks the same at the same time, each with a version of its own: one of them may apply it.
///
/// # Panics
/// When none or several may, or one stops.
pub async fn one_of_many_swaps<A: Future<Output = bool> + Send + 'static>(ask: impl Fn(Question) -> A) {
    let asked: Vec<_> = (1..=8).map(|version| tokio::spawn(ask(swap("crowd", 0, version)))).collect();
    let mut applied = 0;
    for answer in asked {
        applied += usize::from(answer.await.expect("an answer"));
    }
    assert_eq!(applied, 1, "of those who expected no version one is the first");
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    type Known = BTreeMap<(&'static str, &'static str), i64>;

    /// What is right, if `broken` leaves it alone.
    fn answer(known: &mut Known, question: Question, broken: &str) -> bool {
        let scope = if broken == "scopes are mixed" { "" } else { question.scope };
        let entity = if broken == "spaces are cut" { question.entity.trim() } else { question.entity };
        let last = known.get(&(scope, entity)).copied();
        let applied = match question.expected {
            None if broken == "equal is newer" => last.is_none_or(|last| last <= question.version),
            #[allow(clippy::cast_precision_loss, reason = "that is what is broken")]
            None if broken == "numbers have fractions" => {
                last.is_none_or(|last| (last as f64) < question.version as f64)
            }
            None if broken == "numbers are texts" => {
                last.is_none_or(|last| last.to_string() < question.version.to_string())
            }
            None if broken == "nothing is zero" => last.unwrap_or(0) < question.version,
            None => last.is_none_or(|last| last < question.version),
            Some(_) if broken == "a swap is newer" => last.is_none_or(|last| last < question.version),
            Some(expected) => last.unwrap_or(0) == expected,
        };
        if applied || broken == "stale ones are remembered" {
            known.insert((scope, entity), question.version);
        }
        applied
    }

    /// Whether all answers are right.
    fn passes(broken: &'static str) -> bool {
        let ask = || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let mut known = Known::new();
            runtime.block_on(stale_ones_are_told(async |question| answer(&mut known, question, broken)));
        };
        std::panic::catch_unwind(ask).is_ok()
    }

    #[test]
    fn the_questions_tell_a_store_that_is_right_from_those_that_are_not() {
        assert!(passes("nothing"));
        for broken in [
            "scopes are mixed",
            "spaces are cut",
            "equal is newer",
            "numbers have fractions",
            "numbers are texts",
            "nothing is zero",
            "a swap is newer",
            "stale ones are remembered",
        ] {
            assert!(!passes(broken), "nobody notices that {broken}");
        }
    }
}
