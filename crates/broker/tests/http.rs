//! HTTP destinations: the publisher's rules against a server that writes down what it is asked. There is no subscriber,
//! so the common suite does not fit. What hostile servers do is in `http_hostile.rs`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod http_server;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use broker::http::{Key, read, verify};
use broker::{Examine, Format, Health, Outcome, Outgoing, Plan, Publisher, Surroundings};
use chrono::DateTime;
use message::Message;
use testkit::eventually;
use tokio::net::TcpListener;
use tokio::sync::Notify;

use http_server::{Answer, Server, answer, batch, open, outgoing, status};

const PATIENCE: Duration = Duration::from_secs(20);
const OLD: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const NEW: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oDC2FVsBQIhrs=";

fn kind(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Confirmed => "Confirmed",
        Outcome::Deferred { after: None, .. } => "Deferred",
        Outcome::Deferred { after: Some(_), .. } => "Deferred for a time",
        Outcome::Unreachable { .. } => "Unreachable",
        Outcome::Unconfirmed { .. } => "Unconfirmed",
        Outcome::Rejected { .. } => "Rejected",
        Outcome::Misconfigured { .. } => "Misconfigured",
        Outcome::Held => "Held",
    }
}

fn text(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::Confirmed | Outcome::Held => "",
        Outcome::Deferred { error, .. }
        | Outcome::Unreachable { error }
        | Outcome::Unconfirmed { error }
        | Outcome::Rejected { error }
        | Outcome::Misconfigured { error } => error,
    }
}

/// Rules 1 and 4.
#[tokio::test]
async fn every_message_has_one_outcome_in_its_place_and_a_refusal_harms_no_other() {
    let server = Server::start(|asked| match asked.number() % 10 {
        3 => answer(422, "", "no such order"),
        _ => status(200),
    })
    .await;
    let broker = open(&server.url(""));
    let mut messages = batch(0..100);
    Arc::make_mut(&mut messages[50].message).content_type = "text/plain\r\nx: y".to_owned();
    let outcomes = broker.publish(messages).await;
    assert_eq!(outcomes.len(), 100);
    for (number, outcome) in outcomes.iter().enumerate() {
        let expected = if number % 10 == 3 || number == 50 { "Rejected" } else { "Confirmed" };
        assert_eq!(kind(outcome), expected, "{number}: {outcome:?}");
    }
    assert!(text(&outcomes[3]).ends_with("answered 422 Unprocessable Entity: no such order"), "{outcomes:?}");
    assert!(text(&outcomes[50]).contains("content-type"), "{:?}", outcomes[50]);
    assert_eq!(server.asked().len(), 99);
    assert_eq!(broker.publish(Vec::new()).await, []);
    assert!(server.connections() < 50, "connections are used again: {}", server.connections());
}

/// Rule 2: the destination's word is the confirmation, and no other word is.
#[tokio::test]
async fn every_status_has_its_meaning() {
    let elsewhere = Server::start(|_| status(200)).await;
    let location = format!("location: http://{}/\r\n", elsewhere.address);
    let cases: &[(u16, &str, &str)] = &[
        (200, "", "Confirmed"),
        (201, "", "Confirmed"),
        (202, "", "Confirmed"),
        (204, "", "Confirmed"),
        (200, "retry-after: 5\r\n", "Confirmed"),
        (300, &location, "Rejected"),
        (301, &location, "Rejected"),
        (302, &location, "Rejected"),
        (303, &location, "Rejected"),
        (304, "", "Rejected"),
        (307, &location, "Rejected"),
        (308, &location, "Rejected"),
        (400, "", "Rejected"),
        (401, "", "Rejected"),
        (403, "", "Rejected"),
        (404, "", "Rejected"),
        (405, "", "Rejected"),
        (409, "", "Rejected"),
        (413, "", "Rejected"),
        (422, "retry-after: 5\r\n", "Rejected"),
        (408, "", "Deferred"),
        (425, "", "Deferred"),
        (429, "", "Deferred"),
        (429, "retry-after: 5\r\n", "Deferred for a time"),
        (429, "retry-after: Fri, 01 Jan 2100 00:00:00 GMT\r\n", "Deferred for a time"),
        (429, "retry-after: soon\r\n", "Deferred"),
        (408, "retry-after: 5\r\n", "Deferred for a time"),
        (500, "", "Deferred"),
        (500, "retry-after: 5\r\n", "Deferred for a time"),
        (501, "", "Deferred"),
        (502, "", "Unconfirmed"),
        (503, "", "Unreachable"),
        (503, "retry-after: 5\r\n", "Deferred for a time"),
        (504, "", "Unconfirmed"),
        (504, "retry-after: 5\r\n", "Deferred for a time"),
        (599, "", "Deferred"),
        (410, "", "Misconfigured"),
        (410, "retry-after: 5\r\n", "Misconfigured"),
        (101, "connection: upgrade\r\nupgrade: x\r\n", "Deferred"),
        (700, "", "Deferred"),
    ];
    for (code, headers, expected) in cases.iter().copied() {
        let fixed = answer(code, headers, "");
        let server = Server::start(move |_| fixed.clone()).await;
        let outcomes = open(&server.url("timeout=10s")).publish(batch(0..1)).await;
        assert_eq!(kind(&outcomes[0]), expected, "{code} {headers}: {outcomes:?}");
        assert_eq!(server.asked().len(), 1, "{code}: one attempt is one request");
        if (300..400).contains(&code) && code != 304 {
            assert!(text(&outcomes[0]).contains("redirects are not followed"), "{outcomes:?}");
        }
    }
    assert_eq!(elsewhere.connections(), 0, "no redirect was followed");
}

/// Rule 5, and what receivers in other languages see.
#[tokio::test]
async fn every_part_of_a_message_arrives_as_it_was_sent_and_signed() {
    let server = Server::start(|_| status(204)).await;
    let broker = open(&server.url(&format!("secret={OLD}&secret={NEW}")));
    let full = Message {
        content_type: "text/plain".to_owned(),
        occurred_at: DateTime::from_timestamp(1_700_000_000, 123_000_000).unwrap(),
        ..Message::new("orders", "1").key("k ö").kind("Placed").header("a", "\"ü\"").header("b", "")
    };
    // An event has a type, whatever its message has.
    let bare = Message { occurred_at: full.occurred_at, ..Message::new("orders", "").kind("Nothing") };
    let source: Arc<str> = "/shop".into();
    let mut sent = Vec::new();
    for format in [
        Format::Native,
        Format::CloudEvents { source: source.clone() },
        Format::CloudEventsStructured { source },
    ] {
        for message in [full.clone(), bare.clone()] {
            sent.push(Outgoing {
                message: message.into(),
                seq: i64::MAX,
                delivery: 7,
                format: format.clone(),
            });
        }
    }
    for (number, outgoing) in sent.iter().enumerate() {
        assert_eq!(broker.publish(vec![outgoing.clone()]).await, [Outcome::Confirmed]);
        let asked = server.asked()[number].clone();
        let came = read(&asked.headers, asked.body.clone()).unwrap();
        assert_eq!(came.message, *outgoing.message, "{:?}", outgoing.format);
        assert_eq!((came.seq, came.delivery), (Some(i64::MAX), 7));
        for key in [OLD, NEW] {
            let verified =
                verify(&[Key::parse(key).unwrap()], &asked.headers, &asked.body, Duration::from_secs(300));
            assert_eq!(verified.unwrap().id, format!("{}_7", outgoing.message.id));
            let theirs = standardwebhooks::Webhook::new(key).unwrap();
            theirs.verify(&asked.body, &asked.headers).unwrap();
        }
    }
    let asked = server.asked();
    assert_eq!(asked[0].header("postrider-topic"), "orders");
    assert_eq!(asked[0].header("postrider-key"), "k%20%C3%B6");
    assert_eq!(asked[0].header("content-type"), "text/plain");
    assert_eq!(asked[0].header("idempotency-key"), asked[0].header("webhook-id"));
    assert_eq!(asked[2].header("ce-type"), "Placed");
    assert_eq!(asked[2].header("ce-specversion"), "1.0");
    assert_eq!(asked[4].header("content-type"), "application/cloudevents+json");
}

#[tokio::test]
async fn what_is_ours_in_the_url_is_not_sent_and_what_is_theirs_is() {
    let server = Server::start(|_| {
        answer(422, "", "Authorization: Basic YW5uOmh1c2g= is unknown at /hook?token=t%26k")
    })
    .await;
    let url = server.url("token=t%26k&rate=100&x&timeout=5s&concurrency=2").replace("://", "://ann:hush@");
    let outcomes = open(&url).publish(batch(0..1)).await;
    let asked = &server.asked()[0];
    assert_eq!(asked.target, "/hook?token=t%26k&x");
    assert_eq!(asked.header("authorization"), "Basic YW5uOmh1c2g=");
    assert_eq!(asked.header("host"), server.address.to_string());
    assert!(asked.header("user-agent").starts_with("postrider/"));
    assert!(!asked.headers.contains_key("webhook-signature"), "there is no secret to sign with");
    assert_eq!(kind(&outcomes[0]), "Rejected");
    assert!(
        text(&outcomes[0]).ends_with("Authorization: Basic *** is unknown at ***?token=***"),
        "{outcomes:?}"
    );
}

/// Rule 6: nobody waits for longer than was agreed, and what was not tried is not blamed.
#[tokio::test]
async fn publish_ends_within_its_time_limit() {
    let server = Server::start(|_| Answer::Silence).await;
    let broker = open(&server.url("timeout=2s&concurrency=4"));
    let begun = Instant::now();
    let outcomes = broker.publish(batch(0..32)).await;
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let count = |wanted: &str| outcomes.iter().filter(|outcome| kind(outcome) == wanted).count();
    assert!(count("Unconfirmed") >= 4, "{outcomes:?}");
    assert_eq!(count("Unconfirmed") + count("Held"), 32, "{outcomes:?}");
    assert!(text(&outcomes[0]).contains("no answer within 2s"), "{outcomes:?}");
    assert!(server.asked().len() <= count("Unconfirmed"), "what was not tried was not sent");
}

/// Rule 7: a destination that says it is gone is left in peace, and others are not.
#[tokio::test]
async fn a_destination_that_is_gone_gets_no_further_request() {
    let server = Server::start(|_| answer(410, "", "we moved")).await;
    let other = Server::start(|_| status(200)).await;
    let (broker, unharmed) = (open(&server.url("concurrency=1")), open(&other.url("")));
    let outcomes = broker.publish(batch(0..5)).await;
    assert!(outcomes.iter().all(|outcome| kind(outcome) == "Misconfigured"), "{outcomes:?}");
    assert!(text(&outcomes[0]).contains("started again") && text(&outcomes[0]).contains("we moved"));
    let again = broker.clone().publish(batch(5..7)).await;
    assert!(again.iter().all(|outcome| kind(outcome) == "Misconfigured"), "{again:?}");
    assert_eq!(server.asked().len(), 1);
    assert_eq!(unharmed.publish(batch(0..1)).await, [Outcome::Confirmed]);
    let findings = broker.examine(&Plan::default()).await;
    assert!(findings.iter().any(|it| it.health == Health::Broken && it.text.contains("410")), "{findings:?}");
}

/// Rule 8: the destination was away, and nobody has to open another publisher.
#[tokio::test]
async fn a_publisher_goes_on_after_the_destination_was_away() {
    let server = Server::start(|_| status(200)).await;
    let (address, broker) = (server.address, open(&server.url("timeout=10s")));
    assert!(broker.publish(batch(0..20)).await.iter().all(|outcome| *outcome == Outcome::Confirmed));
    drop(server);
    let down = async || {
        let outcomes = broker.publish(batch(20..60)).await;
        let blameless = |outcome: &Outcome| matches!(kind(outcome), "Unreachable" | "Unconfirmed" | "Held");
        assert!(outcomes.iter().all(blameless), "no message is to blame: {outcomes:?}");
        outcomes.iter().any(|outcome| kind(outcome) == "Unreachable").then_some(outcomes)
    };
    let outcomes = testkit::within(PATIENCE, "the destination is seen to be down", down).await;
    let told = outcomes.iter().find(|outcome| kind(outcome) == "Unreachable").unwrap();
    assert!(text(told).contains("Connection refused"), "{told:?}");
    let server = Server::at(TcpListener::bind(address).await.unwrap(), None, |_| status(200));
    let back = eventually(PATIENCE, async || {
        let outcomes = broker.publish(batch(60..61)).await;
        assert!(kind(&outcomes[0]) != "Rejected", "{outcomes:?}");
        outcomes == [Outcome::Confirmed]
    });
    assert!(back.await);
    assert!(!server.asked().is_empty());
}

/// The work was done and the answer was lost: the same id comes again, so that the work is done once.
#[tokio::test]
async fn after_a_lost_answer_the_same_id_comes_again() {
    const MESSAGES: i64 = 500;
    let done = Arc::new(Mutex::new(HashSet::new()));
    let effects = Arc::new(AtomicUsize::new(0));
    let (ids, work) = (Arc::clone(&done), Arc::clone(&effects));
    let server =
        Server::start(move |asked| match ids.lock().unwrap().insert(asked.header("webhook-id").to_owned()) {
            true => {
                work.fetch_add(1, Ordering::SeqCst);
                Answer::Last(Vec::new())
            }
            false => status(200),
        })
        .await;
    let broker = open(&server.url("timeout=10s"));
    let mut waiting = batch(0..MESSAGES);
    for round in 0.. {
        let size = broker.guarantees().max_batch;
        let outcomes = broker.publish(waiting.iter().take(size).cloned().collect()).await;
        for outcome in &outcomes {
            assert!(
                matches!(kind(outcome), "Confirmed" | "Unconfirmed" | "Unreachable" | "Held"),
                "{outcome:?}"
            );
        }
        let mut outcomes = outcomes.into_iter();
        waiting.retain(|_| outcomes.next() != Some(Outcome::Confirmed));
        if waiting.is_empty() {
            break;
        }
        assert!(round < 100, "{} are never confirmed", waiting.len());
    }
    assert_eq!(effects.load(Ordering::SeqCst), MESSAGES as usize, "each message had its effect once");
    let ids = server.ids();
    assert_eq!(ids.len(), MESSAGES as usize);
    assert!(ids.values().all(|times| *times == 2), "lost once and sent again: {ids:?}");
}

#[tokio::test]
async fn an_attempt_is_signed_anew_under_the_same_id() {
    let server = Server::start(|_| status(500)).await;
    let broker = open(&server.url(&format!("secret={OLD}")));
    let message = outgoing(1);
    let changed = eventually(PATIENCE, async || {
        broker.publish(vec![message.clone()]).await;
        let asked = server.asked();
        let (first, last) = (&asked[0], &asked[asked.len() - 1]);
        assert_eq!(first.header("webhook-id"), last.header("webhook-id"));
        let same_time = first.header("webhook-timestamp") == last.header("webhook-timestamp");
        let same_signature = first.header("webhook-signature") == last.header("webhook-signature");
        assert_eq!(same_time, same_signature);
        !same_time
    });
    assert!(changed.await);
}

/// A secret is replaced in three steps while messages flow, and none is refused.
#[tokio::test]
async fn a_secret_is_replaced_without_a_message_being_refused() {
    let known = Arc::new(Mutex::new(vec![Key::parse(OLD).unwrap()]));
    let keys = Arc::clone(&known);
    let server = Server::start(move |asked| {
        let keys = keys.lock().unwrap().clone();
        match verify(&keys, &asked.headers, &asked.body, Duration::from_secs(300)) {
            Ok(_) => status(200),
            Err(_) => status(401),
        }
    })
    .await;
    let all_confirmed = async |secrets: &str| {
        let outcomes = open(&server.url(secrets)).publish(batch(0..100)).await;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{secrets}: {outcomes:?}");
    };
    all_confirmed(&format!("secret={OLD}")).await;
    all_confirmed(&format!("secret={NEW}&secret={OLD}")).await;
    *known.lock().unwrap() = vec![Key::parse(NEW).unwrap()];
    all_confirmed(&format!("secret={NEW}&secret={OLD}")).await;
    all_confirmed(&format!("secret={NEW}")).await;
    let outcomes = open(&server.url(&format!("secret={OLD}"))).publish(batch(0..1)).await;
    assert_eq!(kind(&outcomes[0]), "Rejected", "the old one is known no more");
}

#[tokio::test]
async fn no_more_requests_are_under_way_than_the_window_has() {
    let word = Arc::new(Notify::new());
    let given = Arc::clone(&word);
    let Answer::Bytes(fine) = status(200) else { unreachable!("it is bytes") };
    let server = Server::start(move |_| Answer::When(Arc::clone(&given), fine.clone())).await;
    let broker = open(&server.url("concurrency=5&timeout=60s"));
    let sending = tokio::spawn(async move { broker.publish(batch(0..40)).await });
    let full = eventually(PATIENCE, async || {
        // Nobody is answered before the window is full.
        if server.busiest() == 5 {
            word.notify_waiters();
        }
        sending.is_finished()
    });
    assert!(full.await, "at most {} at once", server.busiest());
    let outcomes = sending.await.unwrap();
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    assert_eq!(server.busiest(), 5);
}

#[tokio::test]
async fn requests_follow_each_other_no_faster_than_the_rate() {
    let server = Server::start(|_| status(200)).await;
    let broker = open(&server.url("rate=20"));
    assert_eq!(broker.guarantees().max_batch, 128);
    assert_eq!(open(&server.url("rate=2&timeout=10s")).guarantees().max_batch, 10);
    assert_eq!(open(&server.url("rate=0.01")).guarantees().max_batch, 1);
    let begun = Instant::now();
    let outcomes = broker.publish(batch(0..23)).await;
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    // Two of a burst, and then twenty in a second.
    let took = server.asked()[22].at - begun;
    assert!(took >= Duration::from_secs(1), "{took:?}");
}

/// One that is told to wait makes the others wait, and costs them nothing.
#[tokio::test]
async fn a_destination_that_asks_for_patience_is_left_alone_until_then() {
    let busy = Arc::new(AtomicBool::new(true));
    let now = Arc::clone(&busy);
    let server = Server::start(move |_| match now.load(Ordering::SeqCst) {
        true => answer(429, "retry-after: 2\r\n", ""),
        false => status(200),
    })
    .await;
    let broker = open(&server.url("concurrency=1"));
    let outcomes = broker.publish(batch(0..5)).await;
    let after = Some(Duration::from_secs(2));
    assert!(
        matches!(&outcomes[0], Outcome::Deferred { after: asked, .. } if *asked == after),
        "{outcomes:?}"
    );
    assert!(outcomes[1..].iter().all(|outcome| *outcome == Outcome::Held), "{outcomes:?}");
    busy.store(false, Ordering::SeqCst);
    let refused = AtomicUsize::new(0);
    let back = eventually(PATIENCE, async || {
        let outcomes = broker.publish(batch(1..2)).await;
        refused.fetch_add(usize::from(kind(&outcomes[0]) == "Unreachable"), Ordering::SeqCst);
        outcomes == [Outcome::Confirmed]
    });
    assert!(back.await);
    assert!(refused.into_inner() > 0, "it is said that it wants no request");
    let asked = server.asked();
    assert_eq!(asked.len(), 2, "nothing was sent in between");
    assert!(asked[1].at - asked[0].at >= Duration::from_secs(2), "{:?}", asked[1].at - asked[0].at);
}

#[tokio::test]
async fn a_url_opens_a_publisher_and_no_subscriber() {
    let server = Server::start(|_| status(200)).await;
    let surroundings = Surroundings { file: "unused.db".into(), max_payload: 1 << 20 };
    let connected = broker::open(&server.url(""), &surroundings).unwrap();
    assert!(connected.subscriber.is_none());
    let guarantees = connected.publisher.guarantees();
    assert!(guarantees.key_order && !guarantees.ordered_batches && !guarantees.groups);
    assert_eq!(connected.publisher.publish(batch(0..1)).await, [Outcome::Confirmed]);
    assert!(broker::check("http://127.0.0.1/").is_err() && broker::check("https://example.com/").is_ok());
}

#[tokio::test]
async fn the_doctor_connects_sends_nothing_and_says_what_is_doubtful() {
    let server = Server::start(|_| status(200)).await;
    let plan = Plan { groups: vec![("billing".to_owned(), vec!["orders".to_owned()])], ..Plan::default() };
    let findings = open(&server.url("concurency=4&allow_private=true")).examine(&plan).await;
    let says = |health: Health, words: &str| {
        let found = findings.iter().any(|it| it.health == health && it.text.contains(words));
        assert!(found, "{words}: {findings:#?}");
    };
    says(Health::Good, "accepts connections");
    says(Health::Doubtful, "not signed");
    says(Health::Doubtful, "`concurency` is sent to the destination");
    says(Health::Doubtful, "`allow_private` is set and not needed");
    says(Health::Broken, "`billing` would wait forever");
    assert!(findings.iter().all(|it| it.health == Health::Good || it.fix.is_some()));
    assert!(server.asked().is_empty(), "a request would be a message");

    let good = open(&server.url(&format!("secret={OLD}"))).examine(&Plan::default()).await;
    assert!(good.iter().all(|it| it.health == Health::Good), "{good:?}");
    let (address, url) = (server.address, server.url(""));
    drop(server);
    assert!(eventually(PATIENCE, async || TcpListener::bind(address).await.is_ok()).await);
    let away = open(&url).examine(&Plan::default()).await;
    let refused = |it: &broker::Finding| it.health == Health::Broken && it.text.contains("refused");
    assert!(away.iter().any(refused), "{away:?}");
}
