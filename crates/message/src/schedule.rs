//! When a message may be sent, and until when: two headers, so that every way to write a message can say it.

use std::time::Duration;

use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};

use crate::{Invalid, Message};

/// The header with the time before which a message is not sent, as RFC 3339 writes times.
pub const DELIVER_AT: &str = "postrider-deliver-at";

/// The header with the time from which on a message is not sent any more.
pub const EXPIRES_AT: &str = "postrider-expires-at";

/// What the headers say about sending a message now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Send it.
    Now,
    /// Not before this wait is over.
    Later(Duration),
    /// Not any more, since this time.
    Expired(String),
    /// This header says no time.
    Unreadable(&'static str),
}

impl Message {
    /// Send it when so much time has passed since it happened, and not before. Later messages of its key do not wait for
    /// it.
    #[must_use]
    pub fn deliver_after(self, wait: Duration) -> Self {
        let at = after(self.occurred_at, wait);
        self.header(DELIVER_AT, at)
    }

    /// Do not send it any more when so much time has passed since it happened: it is Dead then.
    #[must_use]
    pub fn expires_after(self, wait: Duration) -> Self {
        let at = after(self.occurred_at, wait);
        self.header(EXPIRES_AT, at)
    }

    /// What its headers say about sending it at `now`.
    pub fn schedule(&self, now: DateTime<Utc>) -> Schedule {
        if self.headers.is_empty() {
            return Schedule::Now;
        }
        match (self.time(DELIVER_AT), self.time(EXPIRES_AT)) {
            (Err(header), _) | (_, Err(header)) => Schedule::Unreadable(header),
            (_, Ok(Some(end))) if end <= now => Schedule::Expired(written(end)),
            (Ok(Some(begin)), _) if begin > now => {
                Schedule::Later((begin - now).to_std().unwrap_or_default())
            }
            _ => Schedule::Now,
        }
    }

    /// Since when it may be sent, if it was to wait.
    pub fn since_due(&self, now: DateTime<Utc>) -> Option<Duration> {
        let due = self.time(DELIVER_AT).ok().flatten()?;
        Some((now - due).to_std().unwrap_or_default())
    }

    /// Whether somebody has said when to send it, or until when.
    pub fn is_scheduled(&self) -> bool {
        self.written_as(DELIVER_AT).or_else(|| self.written_as(EXPIRES_AT)).is_some()
    }

    /// The same, to be sent at any time.
    pub(crate) fn unscheduled(mut self) -> Self {
        let says_when =
            |name: &String| name.eq_ignore_ascii_case(DELIVER_AT) || name.eq_ignore_ascii_case(EXPIRES_AT);
        self.headers.retain(|name, _| !says_when(name));
        self
    }

    /// What is wrong with its schedule.
    pub(crate) fn check_schedule(&self) -> Result<(), Invalid> {
        let times = (self.time(DELIVER_AT), self.time(EXPIRES_AT));
        match times {
            (Err(header), _) | (_, Err(header)) => Err(Invalid::Time(header)),
            (Ok(Some(begin)), Ok(Some(end))) if end <= begin => Err(Invalid::NeverSent),
            _ => Ok(()),
        }
    }

    /// Headers have no case.
    fn written_as(&self, header: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case(header));
        found.map(|(_, value)| value.as_str())
    }

    fn time(&self, header: &'static str) -> Result<Option<DateTime<Utc>>, &'static str> {
        let Some(text) = self.written_as(header) else { return Ok(None) };
        DateTime::parse_from_rfc3339(text).map(|time| Some(time.to_utc())).map_err(|_| header)
    }
}

/// Not past the last time that there is.
fn after(time: DateTime<Utc>, wait: Duration) -> String {
    let wait = TimeDelta::from_std(wait).unwrap_or(TimeDelta::MAX);
    // RFC 3339 has years of four digits.
    let last = DateTime::from_timestamp_millis(253_402_300_799_999).unwrap_or(DateTime::<Utc>::MAX_UTC);
    written(time.checked_add_signed(wait).map_or(last, |time| time.min(last)))
}

fn written(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Millis, true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_message_waits_for_its_time_and_expires_after_it() {
        let plain = Message::new("t", "1");
        let now = plain.occurred_at;
        assert_eq!(plain.schedule(now), Schedule::Now);
        let both = plain.deliver_after(MINUTE).expires_after(3 * MINUTE);
        assert!(both.is_scheduled() && both.check(&Limits::default()).is_ok());
        let Schedule::Later(wait) = both.schedule(now) else { panic!("{:?}", both.schedule(now)) };
        assert!(wait <= MINUTE && wait > MINUTE - Duration::from_millis(2), "{wait:?}");
        assert_eq!(both.schedule(now + 2 * MINUTE), Schedule::Now);
        assert_eq!(both.since_due(now), Some(Duration::ZERO));
        assert!(both.since_due(now + 2 * MINUTE).is_some_and(|since| since >= MINUTE));
        let shouted = Message::new("t", "1").header("Postrider-Expires-At", "2026-01-01T00:00:00Z");
        assert!(matches!(shouted.schedule(now), Schedule::Expired(_)), "headers have no case");
        assert!(matches!(both.schedule(now + 3 * MINUTE), Schedule::Expired(_)));
        assert_eq!(Message::new("t", "1").header("a", "b").schedule(now), Schedule::Now);
    }

    #[test]
    fn what_is_no_time_or_leaves_none_is_refused() {
        for (message, expected) in [
            (Message::new("t", "1").header(DELIVER_AT, "soon"), "`postrider-deliver-at` is not a time"),
            (Message::new("t", "1").header(EXPIRES_AT, "2026-13-01T00:00:00Z"), "`postrider-expires-at`"),
            (Message::new("t", "1").deliver_after(MINUTE).expires_after(MINUTE), "before it may be sent"),
        ] {
            let error = message.check(&Limits::default()).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
        let odd = Message::new("t", "1").header(DELIVER_AT, "soon");
        assert_eq!(odd.schedule(odd.occurred_at), Schedule::Unreadable(DELIVER_AT));
    }

    #[test]
    fn for_ever_is_a_time_too() {
        let late = Message::new("t", "1").deliver_after(Duration::MAX);
        assert!(late.check(&Limits::default()).is_ok(), "{:?}", late.headers);
        assert!(matches!(late.schedule(late.occurred_at), Schedule::Later(_)));
    }
}
