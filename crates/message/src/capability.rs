//! Proof that whoever acknowledges a message has received it.
//!
//! ```text
//!  producer                          travels with the message         consumer group
//!  capability = HMAC(secret, id, delivery) ─────────────────► proof = HMAC(capability, group)
//!  knows the secret, makes the same proof ◄───────────────── acknowledges with the proof
//! ```
//!
//! A proof is good for one message, one group and one delivery. Who has not received the message cannot make it.

use std::fmt;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::MessageId;

/// The header in which a capability travels.
pub const CAPABILITY: &str = "postrider-capability";

/// Bytes of a secret at least.
const LEAST: usize = 16;

/// Bytes of a capability and of a proof.
const SIZE: usize = 16;

/// The producer's secrets, one at least: the first makes capabilities, all are good for proofs, so that they can be changed in
/// turn.
#[derive(Clone)]
pub struct Secrets(Vec<Hmac<Sha256>>);

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secrets({})", self.0.len())
    }
}

/// A secret that is too easily guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a secret must have at least {LEAST} bytes: make one with `openssl rand -hex 32`")]
pub struct ShortSecret;

impl Secrets {
    /// These secrets, the one for new capabilities first. None when there are none.
    ///
    /// # Errors
    /// When one is too short.
    pub fn new(secrets: &[impl AsRef<[u8]>]) -> Result<Option<Self>, ShortSecret> {
        let keys = secrets.iter().map(AsRef::as_ref).map(|secret| match secret.len() >= LEAST {
            true => Ok(keyed(secret)),
            false => Err(ShortSecret),
        });
        let keys = keys.collect::<Result<Vec<_>, _>>()?;
        Ok((!keys.is_empty()).then_some(Self(keys)))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// What travels with this delivery of a message.
    pub fn capability(&self, id: MessageId, delivery: u32) -> String {
        written(delivery, &of(&self.0[0], id, delivery))
    }

    /// Whether `group` proves that it has received the message.
    pub fn accept(&self, id: MessageId, group: &str, proof: &str) -> bool {
        let Some((delivery, proof)) = read(proof) else { return false };
        let accepts = |secret: &Hmac<Sha256>| {
            let mut mac = keyed(&of(secret, id, delivery));
            mac.update(group.as_bytes());
            mac.verify_truncated_left(&proof).is_ok()
        };
        self.0.iter().any(accepts)
    }
}

/// What `group` proves with that it has received the message that came with `capability`. None if that is none.
pub fn prove(capability: &str, group: &str) -> Option<String> {
    let (delivery, key) = read(capability)?;
    let mut mac = keyed(&key);
    mac.update(group.as_bytes());
    Some(written(delivery, &cut(mac)))
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("every length makes an HMAC key")
}

fn of(secret: &Hmac<Sha256>, id: MessageId, delivery: u32) -> [u8; SIZE] {
    let mut mac = secret.clone();
    mac.update(id.0.as_bytes());
    mac.update(&delivery.to_be_bytes());
    cut(mac)
}

fn cut(mac: Hmac<Sha256>) -> [u8; SIZE] {
    let whole = mac.finalize().into_bytes();
    std::array::from_fn(|place| whole[place])
}

/// The delivery, a dot, and the bytes in hexadecimal.
fn written(delivery: u32, bytes: &[u8; SIZE]) -> String {
    format!("{delivery}.{:032x}", u128::from_be_bytes(*bytes))
}

fn read(text: &str) -> Option<(u32, [u8; SIZE])> {
    let (delivery, bytes) = text.split_once('.')?;
    let plain = bytes.len() == 2 * SIZE && bytes.bytes().all(|byte| byte.is_ascii_hexdigit());
    let bytes = u128::from_str_radix(bytes, 16).ok().filter(|_| plain)?;
    Some((delivery.parse().ok()?, bytes.to_be_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OLD: &str = "an old secret of ours";
    const NEW: &str = "a new secret of ours";

    fn secrets(texts: &[&str]) -> Secrets {
        Secrets::new(texts).expect("long enough").expect("there are some")
    }

    #[test]
    fn who_received_a_message_can_prove_it_and_nobody_can_for_another_group_message_or_delivery() {
        let (ours, id) = (secrets(&[NEW]), MessageId::new());
        let proof = prove(&ours.capability(id, 2), "billing").expect("a capability");
        assert!(ours.accept(id, "billing", &proof));
        assert!(!ours.accept(id, "audit", &proof));
        assert!(!ours.accept(MessageId::new(), "billing", &proof));
        assert!(!ours.accept(id, "billing", &proof.replacen("2.", "3.", 1)));
        assert!(!ours.accept(id, "billing", &ours.capability(id, 2)), "the capability itself proves nothing");
        assert!(!secrets(&[OLD]).accept(id, "billing", &proof));
    }

    #[test]
    fn a_secret_can_be_changed_while_messages_are_under_way() {
        let (before, during, after) = (secrets(&[OLD]), secrets(&[NEW, OLD]), secrets(&[NEW]));
        let id = MessageId::new();
        let old = prove(&before.capability(id, 0), "g").expect("a capability");
        let new = prove(&during.capability(id, 0), "g").expect("a capability");
        assert!(during.accept(id, "g", &old) && during.accept(id, "g", &new) && after.accept(id, "g", &new));
        assert!(!after.accept(id, "g", &old));
    }

    #[test]
    fn a_short_secret_is_refused_and_no_secret_is_none() {
        assert_eq!(Secrets::new(&["0123456789abcde"]).err(), Some(ShortSecret));
        assert!(Secrets::new(&[] as &[&str]).expect("fine").is_none());
        assert!(!format!("{:?}", secrets(&[NEW])).contains("secret of ours"));
    }

    proptest! {
        #[test]
        fn what_is_made_up_is_not_accepted(text in "[0-9]{1,3}\\.[0-9a-fA-F+]{30,34}|.{0,50}") {
            prop_assert!(!secrets(&[NEW]).accept(MessageId::new(), "g", &text));
            let _ = prove(&text, "g");
        }
    }
}
