//! Dead letters: messages that a group gave up, in a topic of their own.
//!
//! A letter must arrive, or its partition stands still: what its topic does not take is left out, and its headers say so. The
//! message itself is still in the topic that it came from.

use message::Message;
use sha2::{Digest, Sha256};

use super::hand::Item;

/// Characters of a reason that travel with a dead letter.
const SHOWN: usize = 1_000;

/// A key that every broker takes.
const SHORT: usize = 1_024;

/// What is left out of a dead letter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Cut {
    /// Nothing.
    #[default]
    Nothing,
    /// The payload.
    Payload,
    /// All but a short key and what we say ourselves.
    Most,
}

impl Cut {
    /// What is left out of a letter that was not taken like this, if there is anything more.
    pub(super) fn more(self) -> Option<Self> {
        match self {
            Self::Nothing => Some(Self::Payload),
            Self::Payload => Some(Self::Most),
            Self::Most => None,
        }
    }
}

/// Where the messages go that a group gave up.
pub(super) fn dead_topic(group: &str) -> String {
    format!("{group}-dead")
}

/// The message as it came, or what `cut` leaves of it, and in its headers why it was given up.
pub(super) fn dead_letter(group: &str, item: &Item, error: &str) -> Message {
    let message = &item.arrival.message;
    let mut letter = message.clone();
    letter.topic = dead_topic(group);
    if item.cut == Cut::Most {
        let headers: usize = message.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        letter.headers.clear();
        letter = letter.header("dead-headers", left_out(headers));
        if let Some(long) = letter.key.take_if(|key| key.len() > SHORT) {
            letter = letter.header("dead-key", left_out(long.len()));
        }
        (letter.kind, letter.content_type) = (None, "application/octet-stream".to_owned());
    }
    if item.cut != Cut::Nothing {
        let digest = Sha256::digest(&message.payload);
        let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        // The lower half is Kafka's own number within the topic.
        let partition = item.position.partition & u64::from(u32::MAX);
        letter.payload = Default::default();
        letter = letter
            .header("dead-payload", left_out(message.payload.len()))
            .header("dead-payload-sha256", digest)
            .header("dead-partition", partition.to_string())
            .header("dead-offset", item.position.offset.to_string());
    }
    letter
        .header("dead-reason", plain(error))
        .header("dead-group", group)
        .header("dead-topic", &message.topic)
        .header("dead-attempts", item.attempts.max(1).to_string())
}

fn left_out(bytes: usize) -> String {
    format!("left out, {bytes} bytes")
}

/// Without what no header can have.
fn plain(text: &str) -> String {
    let plain = text.chars().map(|character| if character.is_control() { ' ' } else { character });
    plain.take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use broker::{Delivery, Position};

    use super::super::hand::Hand;
    use super::*;

    fn letter(message: &Message, cut: Cut) -> Message {
        let (message, position) = (message.clone(), Position { partition: (7 << 32) | 2, offset: 9 });
        let mut hand = Hand::default();
        hand.take(vec![Delivery { message, seq: None, delivery: 0, position }]);
        let item = hand.item((position.partition, 0)).expect("it is there");
        (item.attempts, item.cut) = (3, cut);
        dead_letter("billing", item, "no\nway")
    }

    fn headers(letter: &Message) -> Vec<(&str, &str)> {
        letter.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }

    const WHY: [(&str, &str); 4] = [
        ("dead-attempts", "3"),
        ("dead-group", "billing"),
        ("dead-reason", "no way"),
        ("dead-topic", "orders"),
    ];

    #[test]
    fn a_dead_letter_is_the_message_and_the_reason_in_its_headers() {
        let message = Message::new("orders", "1").key("k").header("a", "b");
        let letter = letter(&message, Cut::Nothing);
        assert_eq!((letter.id, letter.key.as_deref()), (message.id, Some("k")));
        assert_eq!(letter.topic, "billing-dead");
        assert_eq!(headers(&letter), [&[("a", "b")][..], &WHY].concat());
        letter.check(&message::Limits::default()).expect("it can be sent");
    }

    #[test]
    fn a_letter_without_its_payload_says_where_the_message_is() {
        let letter = letter(&Message::new("orders", "1").key("k").header("a", "b"), Cut::Payload);
        assert!(letter.payload.is_empty());
        let digest = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b";
        let mut expected = [
            &WHY[..],
            &[("a", "b"), ("dead-offset", "9"), ("dead-partition", "2")],
            &[("dead-payload", "left out, 1 bytes"), ("dead-payload-sha256", digest)],
        ]
        .concat();
        expected.sort_unstable();
        assert_eq!(headers(&letter), expected);
    }

    #[test]
    fn what_is_left_in_the_end_is_small_whoever_wrote_the_message() {
        let long = "x".repeat(100_000);
        // A dead letter that another group gave up has headers like ours.
        let mut message = Message::new("orders", long.clone()).key(long.clone()).kind(long.clone());
        message.content_type = long.clone();
        let message = message.header("a", long.clone()).header("dead-key", long.clone());
        let letter = letter(&message, Cut::Most);
        assert_eq!((letter.id, &letter.key), (message.id, &None));
        assert_eq!(letter.headers["dead-key"], "left out, 100000 bytes");
        assert_eq!(letter.headers["dead-headers"], "left out, 200009 bytes");
        assert!(letter.size() < 1_000, "{}", letter.size());
        letter.check(&message::Limits::default()).expect("it can be sent");
        assert_eq!(Cut::Most.more(), None);
    }
}
