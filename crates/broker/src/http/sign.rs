//! Standard Webhooks: how a receiver knows that a message is ours, unchanged and fresh.
//!
//! Signed is `id.timestamp.payload`. Each attempt is signed anew, because receivers refuse an old timestamp. With
//! several secrets a message has several signatures and one that is known is enough: that is how a secret is replaced
//! without a message being refused.

use std::fmt;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use chrono::{DateTime, Utc};
use ed25519_dalek::{Signer, SigningKey, VerifyingKey};
use hmac::{Hmac, Mac};
use hyper::HeaderMap;
use sha2::Sha256;

pub(super) const ID: &str = "webhook-id";
pub(super) const TIMESTAMP: &str = "webhook-timestamp";
pub(super) const SIGNATURE: &str = "webhook-signature";

/// Bytes of a shared secret, as the specification has them.
const SECRET: std::ops::RangeInclusive<usize> = 24..=64;

/// Signatures that are looked at in one request: a hostile sender must not buy work with a long header.
const SIGNATURES: usize = 16;

/// A secret or key of Standard Webhooks. Never shown.
#[derive(Clone)]
pub struct Key(Kind);

#[derive(Clone)]
enum Kind {
    /// `whsec_`: both sides have it.
    Shared(Hmac<Sha256>),
    /// `whsk_`: the sender's.
    Private(Box<SigningKey>),
    /// `whpk_`: the receiver's.
    Public(VerifyingKey),
}

/// Why a text is not a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadKey {
    /// It does not begin as it must.
    #[error("use a secret that begins with `whsec_`, or a key that begins with `whsk_` or `whpk_`")]
    Prefix,
    /// What follows is not base64.
    #[error("what follows `whsec_`, `whsk_` or `whpk_` must be base64")]
    Encoding,
    /// A secret that is too short to be safe, or too long to be read by others.
    #[error("use a secret of 24 to 64 random bytes: `echo whsec_$(openssl rand -base64 32)` makes one")]
    Length,
    /// Not an ed25519 key.
    #[error("use an ed25519 key: 32 bytes, or 64 with the public half, in base64")]
    Ed25519,
}

impl Key {
    /// Reads `whsec_…` (a shared secret of 24 to 64 bytes), `whsk_…` (an ed25519 private key) or `whpk_…` (its public
    /// half).
    ///
    /// # Errors
    /// Says what would be accepted.
    pub fn parse(text: &str) -> Result<Self, BadKey> {
        let (prefix, encoded) = text.split_at_checked(6).ok_or(BadKey::Prefix)?;
        if prefix == "whsec_" {
            let secret = BASE64.decode(encoded).map_err(|_| BadKey::Encoding)?;
            if !SECRET.contains(&secret.len()) {
                return Err(BadKey::Length);
            }
            let hmac = Hmac::new_from_slice(&secret).expect("every length makes an HMAC key");
            return Ok(Self(Kind::Shared(hmac)));
        }
        let decoded = |encoded: &str| BASE64.decode(encoded).map_err(|_| BadKey::Encoding);
        match text.split_at_checked(5).ok_or(BadKey::Prefix)? {
            ("whsk_", encoded) => {
                let bytes = decoded(encoded)?;
                let key = match bytes.len() {
                    32 => SigningKey::try_from(&bytes[..]),
                    _ => <&[u8; 64]>::try_from(&bytes[..])
                        .map_err(|_| BadKey::Ed25519)
                        .map(SigningKey::from_keypair_bytes)?,
                };
                Ok(Self(Kind::Private(Box::new(key.map_err(|_| BadKey::Ed25519)?))))
            }
            ("whpk_", encoded) => {
                let key = VerifyingKey::try_from(&decoded(encoded)?[..]).map_err(|_| BadKey::Ed25519)?;
                Ok(Self(Kind::Public(key)))
            }
            _ => Err(BadKey::Prefix),
        }
    }

    /// Whether messages can be signed with it: the public half only verifies.
    pub fn can_sign(&self) -> bool {
        !matches!(self.0, Kind::Public(_))
    }

    /// The signature as it stands in the header.
    fn sign(&self, id: &str, timestamp: &str, payload: &[u8]) -> Option<String> {
        match &self.0 {
            Kind::Shared(hmac) => {
                let signature = feed(hmac, id, timestamp, payload).finalize().into_bytes();
                Some(format!("v1,{}", BASE64.encode(signature)))
            }
            Kind::Private(key) => {
                let signature = key.sign(&signed(id, timestamp, payload)).to_bytes();
                Some(format!("v1a,{}", BASE64.encode(signature)))
            }
            Kind::Public(_) => None,
        }
    }

    /// Whether `signature`, of the scheme `version`, is of this key. Takes as long for a wrong one as for the right one.
    fn made(&self, version: &str, signature: &[u8], id: &str, timestamp: &str, payload: &[u8]) -> bool {
        let ed25519 = |key: &VerifyingKey| {
            let signature = ed25519_dalek::Signature::from_slice(signature);
            signature
                .is_ok_and(|signature| key.verify_strict(&signed(id, timestamp, payload), &signature).is_ok())
        };
        match (&self.0, version) {
            (Kind::Shared(hmac), "v1") => feed(hmac, id, timestamp, payload).verify_slice(signature).is_ok(),
            (Kind::Private(key), "v1a") => ed25519(&key.verifying_key()),
            (Kind::Public(key), "v1a") => ed25519(key),
            _ => false,
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Shared(_) => "whsec_***",
            Kind::Private(_) => "whsk_***",
            Kind::Public(_) => "whpk_***",
        })
    }
}

fn feed(hmac: &Hmac<Sha256>, id: &str, timestamp: &str, payload: &[u8]) -> Hmac<Sha256> {
    let mut hmac = hmac.clone();
    for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", payload] {
        hmac.update(part);
    }
    hmac
}

fn signed(id: &str, timestamp: &str, payload: &[u8]) -> Vec<u8> {
    [id.as_bytes(), timestamp.as_bytes(), payload].join(&b'.')
}

/// The value of `webhook-signature`: one signature for each key that can sign.
pub(super) fn sign(keys: &[Key], id: &str, timestamp: &str, payload: &[u8]) -> String {
    let signatures: Vec<String> = keys.iter().filter_map(|key| key.sign(id, timestamp, payload)).collect();
    signatures.join(" ")
}

/// A request that is what its sender sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// The same at every attempt: remember it, and do nothing the second time.
    pub id: String,
    /// When this attempt was made, by the sender's clock.
    pub at: DateTime<Utc>,
}

/// Why a request must not be believed. Answer it with 401.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A header is missing, is there twice, or cannot be read.
    #[error("the header `{0}` is missing or makes no sense")]
    Header(&'static str),
    /// It was sent too long ago, so it may be a replay; or the clocks differ.
    #[error("the timestamp is too far from now: it is a replay, or one of the clocks is wrong")]
    Stale,
    /// No signature is of a known key.
    #[error("no signature is of a key that is known here")]
    Signature,
}

/// Whether a request is from somebody who has one of `keys`, is unchanged, and was sent no longer than `tolerance` ago
/// (five minutes is usual). `body` must be the bytes that arrived, not JSON that was read and written again.
///
/// # Errors
/// Says why the request must not be believed.
pub fn verify(
    keys: &[Key],
    headers: &HeaderMap,
    body: &[u8],
    tolerance: Duration,
) -> Result<Verified, Refusal> {
    verify_at(keys, headers, body, tolerance, Utc::now())
}

/// The same by another clock.
///
/// # Errors
/// Says why the request must not be believed.
pub fn verify_at(
    keys: &[Key],
    headers: &HeaderMap,
    body: &[u8],
    tolerance: Duration,
    now: DateTime<Utc>,
) -> Result<Verified, Refusal> {
    let id = only(headers, ID)?;
    let timestamp = only(headers, TIMESTAMP)?;
    let signatures = only(headers, SIGNATURE)?;
    let bare = !timestamp.is_empty() && timestamp.bytes().all(|byte| byte.is_ascii_digit());
    let seconds = timestamp.parse().ok().filter(|_| bare).ok_or(Refusal::Header(TIMESTAMP))?;
    let at = DateTime::from_timestamp(seconds, 0).ok_or(Refusal::Header(TIMESTAMP))?;
    if (now - at).abs().to_std().map_or(true, |distance| distance > tolerance) {
        return Err(Refusal::Stale);
    }
    let known = signatures.split(' ').take(SIGNATURES).any(|signature| {
        let Some((version, encoded)) = signature.split_once(',') else { return false };
        let Ok(signature) = BASE64.decode(encoded) else { return false };
        keys.iter().any(|key| key.made(version, &signature, id, timestamp, body))
    });
    known.then(|| Verified { id: id.to_owned(), at }).ok_or(Refusal::Signature)
}

/// The value of a header that must be there once: of two, a proxy might have judged the other one.
fn only<'a>(headers: &'a HeaderMap, name: &'static str) -> Result<&'a str, Refusal> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().and_then(|value| value.to_str().ok()).filter(|value| !value.is_empty());
    value.filter(|_| values.next().is_none()).ok_or(Refusal::Header(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
    const SENT: &str = "1614265330";
    const BODY: &[u8] = br#"{"test": 2432232314}"#;
    const SHARED: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const PRIVATE: &str = "whsk_VEVTVFNJR05JTkdLRVlET05PVFVTRVRISVNGT1JBTlk=";
    const TOLERANCE: Duration = Duration::from_secs(300);

    fn key(text: &str) -> Key {
        Key::parse(text).expect(text)
    }

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).expect("a time")
    }

    fn headers(signature: &str) -> HeaderMap {
        [(ID, MESSAGE), (TIMESTAMP, SENT), (SIGNATURE, signature)]
            .into_iter()
            .map(|(name, value)| (name.parse().expect("a name"), value.parse().expect("a value")))
            .collect()
    }

    fn refused(keys: &[Key], headers: &HeaderMap, body: &[u8], now: i64) -> Option<Refusal> {
        verify_at(keys, headers, body, TOLERANCE, at(now)).err()
    }

    #[test]
    fn signatures_are_those_of_the_specification() {
        let shared = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
        let private =
            "v1a,tQ9V2XOqn7jL/DQenEFpqIugdBVtiMmER5mhSkXBNwM0mkATuDe6KYYUuxqtaiHeYGb7KaaBRdM5WqyeFiL8Ag==";
        let keys = [key(SHARED), key(PRIVATE)];
        assert_eq!(sign(&keys[..1], MESSAGE, SENT, BODY), shared);
        assert_eq!(sign(&keys[1..], MESSAGE, SENT, BODY), private);
        assert_eq!(sign(&keys, MESSAGE, SENT, BODY), format!("{shared} {private}"));
    }

    #[test]
    fn one_known_signature_of_several_is_enough() {
        let (old, new) = (key(SHARED), key("whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"));
        let both = headers(&sign(&[new.clone(), old.clone()], MESSAGE, SENT, BODY));
        let now = 1_614_265_331;
        for keys in [vec![old.clone()], vec![new.clone()], vec![old.clone(), new.clone()]] {
            let verified = verify_at(&keys, &both, BODY, TOLERANCE, at(now)).expect("one is known");
            assert_eq!(verified, Verified { id: MESSAGE.to_owned(), at: at(1_614_265_330) });
        }
        let foreign =
            format!("v2,AAAA v1,AAAA junk {}", sign(std::slice::from_ref(&old), MESSAGE, SENT, BODY));
        assert_eq!(refused(&[old], &headers(&foreign), BODY, now), None);
        assert_eq!(refused(&[new], &headers(&foreign), BODY, now), Some(Refusal::Signature));
    }

    #[test]
    fn the_public_half_verifies_and_cannot_sign() {
        let private = key(PRIVATE);
        let Kind::Private(inner) = &private.0 else { panic!("it is private") };
        let public = key(&format!("whpk_{}", BASE64.encode(inner.verifying_key())));
        let pair = key(&format!("whsk_{}", BASE64.encode(inner.to_keypair_bytes())));
        assert!(!public.can_sign() && private.can_sign());
        assert_eq!(sign(std::slice::from_ref(&public), MESSAGE, SENT, BODY), "");
        let signed = headers(&sign(&[pair], MESSAGE, SENT, BODY));
        assert_eq!(refused(&[public], &signed, BODY, 1_614_265_330), None);
        assert_eq!(refused(&[key(SHARED)], &signed, BODY, 1_614_265_330), Some(Refusal::Signature));
    }

    #[test]
    fn whatever_was_changed_is_refused() {
        let keys = [key(SHARED), key(PRIVATE)];
        let good = headers(&sign(&keys, MESSAGE, SENT, BODY));
        let now = 1_614_265_330;
        assert_eq!(refused(&keys, &good, BODY, now), None);
        assert_eq!(refused(&keys, &good, b"{\"test\": 2432232315}", now), Some(Refusal::Signature));
        assert_eq!(refused(&[], &good, BODY, now), Some(Refusal::Signature));
        assert_eq!(refused(&keys, &good, BODY, now + 300), None);
        assert_eq!(refused(&keys, &good, BODY, now + 301), Some(Refusal::Stale));
        assert_eq!(refused(&keys, &good, BODY, now - 301), Some(Refusal::Stale));
        let changes = [
            (ID, "msg_other", Refusal::Signature),
            (TIMESTAMP, "1614265331", Refusal::Signature),
            (TIMESTAMP, "+1614265330", Refusal::Header(TIMESTAMP)),
            (TIMESTAMP, "now", Refusal::Header(TIMESTAMP)),
            (TIMESTAMP, "99999999999999999999", Refusal::Header(TIMESTAMP)),
            (SIGNATURE, "v1,", Refusal::Signature),
            (SIGNATURE, "v1a,", Refusal::Signature),
            (SIGNATURE, "v1", Refusal::Signature),
            (SIGNATURE, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OF=", Refusal::Signature),
        ];
        for (name, value, expected) in changes {
            let mut changed = good.clone();
            changed.insert(name, value.parse().expect("a value"));
            assert_eq!(refused(&keys, &changed, BODY, now), Some(expected), "{name}: {value}");
            changed.remove(name);
            assert_eq!(refused(&keys, &changed, BODY, now), Some(Refusal::Header(name)));
            changed.insert(name, good[name].clone());
            changed.append(name, good[name].clone());
            assert_eq!(refused(&keys, &changed, BODY, now), Some(Refusal::Header(name)), "twice");
        }
    }

    #[test]
    fn nothing_that_differs_by_a_bit_is_believed() {
        let keys = [key(SHARED)];
        let mut good = headers(&sign(&keys, MESSAGE, SENT, BODY));
        let (signature, mut body) = (good[SIGNATURE].as_bytes().to_vec(), BODY.to_vec());
        // Every bit of the body, and every byte of the signature in every other value that a header may have.
        for bit in 0..8 * body.len() {
            body[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(refused(&keys, &good, &body, 1_614_265_330), Some(Refusal::Signature), "bit {bit}");
            body[bit / 8] ^= 1 << (bit % 8);
        }
        for place in 0..signature.len() {
            for byte in (b' '..=b'~').filter(|byte| *byte != signature[place]) {
                let mut changed = signature.clone();
                changed[place] = byte;
                good.insert(SIGNATURE, hyper::header::HeaderValue::from_bytes(&changed).expect("a value"));
                let refusal = refused(&keys, &good, BODY, 1_614_265_330);
                assert_eq!(refusal, Some(Refusal::Signature), "{byte} at {place}");
            }
        }
    }

    #[test]
    fn a_text_that_is_no_key_is_refused_with_what_would_be_one_and_no_key_is_shown() {
        let of = |length: usize| format!("whsec_{}", BASE64.encode(vec![7; length]));
        assert!(Key::parse(&of(24)).is_ok() && Key::parse(&of(64)).is_ok());
        let cases = [
            (of(23), BadKey::Length),
            (of(65), BadKey::Length),
            ("hush".to_owned(), BadKey::Prefix),
            ("hush-hush-hush".to_owned(), BadKey::Prefix),
            ("whsec_ü".to_owned(), BadKey::Encoding),
            ("whsec".to_owned(), BadKey::Prefix),
            ("whsk_AAAA".to_owned(), BadKey::Ed25519),
            ("whpk_AAAA".to_owned(), BadKey::Ed25519),
            ("whpk_*".to_owned(), BadKey::Encoding),
        ];
        for (text, expected) in cases {
            assert_eq!(Key::parse(&text).expect_err(&text), expected, "{text}");
        }
        assert_eq!(format!("{:?} {:?}", key(SHARED), key(PRIVATE)), "whsec_*** whsk_***");
    }
}
