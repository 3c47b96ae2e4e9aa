//! Whether two topic patterns can both fit one topic, and which.
//!
//! Routes are chosen by the most specific pattern. Two equally specific ones that fit the same topic would
//! make the choice depend on the order of names in a file, so they are refused, with the topic as proof.

use message::TopicPattern;

/// The shortest topic that both patterns fit, if there is one.
pub(super) fn witness(a: &TopicPattern, b: &TopicPattern) -> Option<String> {
    let (a, b): (Vec<char>, Vec<char>) = (a.as_str().chars().collect(), b.as_str().chars().collect());
    // best[i][j]: the shortest text that a[i..] and b[j..] both fit.
    let mut best: Vec<Vec<Option<String>>> = vec![vec![None; b.len() + 1]; a.len() + 1];
    for i in (0..=a.len()).rev() {
        for j in (0..=b.len()).rev() {
            best[i][j] = shortest(&a, &b, i, j, &best);
        }
    }
    best[0][0].take().map(|text| if text.is_empty() { "x".to_owned() } else { text })
}

fn shortest(a: &[char], b: &[char], i: usize, j: usize, best: &[Vec<Option<String>>]) -> Option<String> {
    let mut found: Vec<String> = Vec::new();
    match (a.get(i), b.get(j)) {
        (None, None) => found.push(String::new()),
        (Some('*'), _) if best[i + 1][j].is_some() => found.extend(best[i + 1][j].clone()),
        _ => {}
    }
    if b.get(j) == Some(&'*') {
        found.extend(best[i].get(j + 1).cloned().flatten());
    }
    match (a.get(i), b.get(j)) {
        // A star takes the other's character and stays.
        (Some('*'), Some(c)) if *c != '*' => {
            found.extend(best[i][j + 1].as_ref().map(|rest| format!("{c}{rest}")))
        }
        (Some(c), Some('*')) if *c != '*' => {
            found.extend(best[i + 1][j].as_ref().map(|rest| format!("{c}{rest}")))
        }
        (Some(c), Some(d)) if c == d && *c != '*' => {
            found.extend(best[i + 1][j + 1].as_ref().map(|rest| format!("{c}{rest}")));
        }
        _ => {}
    }
    found.into_iter().min_by_key(String::len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_witness_fits_both_patterns_and_there_is_none_when_nothing_does() {
        let cases = [
            ("order-*", "*-order", Some("order-order")),
            ("a*", "*b", Some("ab")),
            ("*", "*", Some("x")),
            ("order-*", "user-*", None),
            ("abc", "abc", Some("abc")),
            ("a*c", "ab*", Some("abc")),
            ("*-events", "order-*", Some("order-events")),
            ("ab", "abc", None),
        ];
        for (a, b, expected) in cases {
            let (a, b) = (TopicPattern::new(a), TopicPattern::new(b));
            let found = witness(&a, &b);
            assert_eq!(found.is_some(), expected.is_some(), "{a} and {b}: {found:?}");
            if let Some(topic) = &found {
                assert!(a.matches(topic) && b.matches(topic), "{a} and {b}: {topic}");
                assert!(topic.len() <= expected.map_or(0, str::len), "{topic}");
            }
        }
    }
}
