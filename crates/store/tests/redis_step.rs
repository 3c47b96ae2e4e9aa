//! The transitions in Lua are those of [`message::step`]: every state and event is put to both.

#![cfg(feature = "redis")]

use message::{Event, Next, State, Status, step};
use redis::Client;

const EVENTS: [Event; 13] = [
    Event::Claim,
    Event::Confirmed,
    Event::Failed { max_attempts: 3 },
    Event::Rejected,
    Event::GaveUp,
    Event::Released,
    Event::Orphaned,
    Event::Unacknowledged,
    Event::Acknowledged,
    Event::Requeued,
    Event::Discarded,
    Event::Deleted,
    Event::Expired,
];

/// Puts one state and event to the Lua; answers what came of it, in words.
const ASK: &str = concat!(
    include_str!("../src/redis/prelude.lua"),
    "local state = { status = ARGV[1], rest = ARGV[2], attempts = tonumber(ARGV[3]), crashes = tonumber(ARGV[4]),
       delivery = tonumber(ARGV[5]) }
     local after = step(state, ARGV[6], 3)
     if not after then return 'refused' end
     if after == 'gone' then return 'gone' end
     return table.concat({ after.status, after.rest, after.attempts, after.crashes, after.delivery }, ' ')"
);

/// The word for a status in scripts.
fn word(status: Status) -> &'static str {
    match status {
        Status::Pending => "pending",
        Status::InFlight => "in_flight",
        Status::Sent => "sent",
        Status::Failed => "failed",
        Status::Dead => "dead",
    }
}

fn told(state: State, event: Event) -> String {
    match step(state, event) {
        Err(_) => "refused".to_owned(),
        Ok(Next::Gone) => "gone".to_owned(),
        Ok(Next::State(State { status, rest, attempts, crashes, delivery })) => {
            format!("{} {} {attempts} {crashes} {delivery}", word(status), word(rest))
        }
    }
}

#[test]
fn every_state_and_event_ends_alike_in_lua_and_in_rust() {
    let client = Client::open(testkit::servers::url("redis")).expect("a URL of Redis");
    let mut connection = client.get_connection().expect("Redis answers");
    for status in Status::ALL {
        let rests: &[Status] =
            if status == Status::InFlight { &[Status::Pending, Status::Failed] } else { &[status] };
        for (rest, attempts, crashes) in rests.iter().flat_map(|rest| {
            (0..4).flat_map(move |attempts| (0..6).map(move |crashes| (*rest, attempts, crashes)))
        }) {
            let state = State { status, rest, attempts, crashes, delivery: 2 };
            for event in EVENTS {
                let mut ask = redis::cmd("EVAL");
                ask.arg(ASK).arg(0).arg(word(status)).arg(word(rest)).arg(attempts).arg(crashes).arg(2);
                let answer: String = ask.arg(event.name()).query(&mut connection).expect("the script runs");
                assert_eq!(answer, told(state, event), "{state:?} {event:?}");
            }
        }
    }
}
