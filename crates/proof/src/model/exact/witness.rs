//! What must hold in every state, and what must be possible.

use stateright::Property;

use super::log::Transaction;
use super::protocol::Protocol;
use super::relay::Claim;
use super::world::World;
use crate::model::Faulty;

type Must = Property<Protocol>;

pub(super) fn properties(protocol: &Protocol) -> Vec<Must> {
    let mut properties = vec![
        Must::always("no message is in the log twice", |_, world| !world.log.twice),
        Must::always("what is settled as sent is in the log", |_, world| {
            world.settled & !world.log.committed == 0
        }),
        Must::always("without further faults everything is sent", |protocol, world| {
            all_sent(protocol, world) || !protocol.helpful(world).is_empty()
        }),
    ];
    if protocol.is_sound() {
        properties.extend([
            Must::always("what is in the log and not settled is in a note of somebody with a claim", noted),
            Must::always("a lane has one sender", |protocol, world| {
                (0..protocol.bounds.lanes).all(|lane| senders(world, lane) <= 1)
            }),
        ]);
        properties.extend(possible(protocol));
    }
    properties
}

fn possible(protocol: &Protocol) -> Vec<Must> {
    let faults = protocol.bounds.faults;
    let mut properties = vec![Must::sometimes("everything is sent", all_sent)];
    if faults.crashes + faults.pauses > 0 {
        properties.push(Must::sometimes("a taker has only to settle what another sent", found));
    }
    if faults.crashes + faults.lost > 0 {
        properties.push(Must::sometimes("a commit is on its way when nobody waits for it", orphaned));
    }
    if faults.pauses > 0 {
        properties.push(Must::sometimes("a relay is fenced in its transaction", |_, world| {
            world
                .relays
                .iter()
                .filter(|relay| relay.sending != 0)
                .any(|relay| relay.sender.is_some_and(|sender| world.log.of(sender).fenced))
        }));
    }
    if faults.crashes + faults.pauses + faults.lost > 1 {
        properties.push(Must::sometimes("the third sender of a lane finds what the first one left", third));
    }
    properties
}

fn all_sent(protocol: &Protocol, world: &World) -> bool {
    world.settled.count_ones() as usize == protocol.bounds.messages.len()
}

/// How many could send messages of a lane.
fn senders(world: &World, lane: u8) -> usize {
    let good = world.relays.iter().filter(|relay| relay.seat(lane).claim == Claim::Good);
    good.filter_map(|relay| relay.sender).filter(|sender| !world.log.of(*sender).fenced).count()
}

fn noted(protocol: &Protocol, world: &World) -> bool {
    let claims = world.log.claims.iter();
    let noted = claims.fold(0, |all, (lane, sender)| all | world.log.of(*sender).note & protocol.of(*lane));
    world.log.committed & !world.settled & !noted == 0
}

/// A batch in hand is in the log, none of it by its relay's sender, and the lease is good.
fn found(protocol: &Protocol, world: &World) -> bool {
    world.relays.iter().any(|relay| {
        let note = relay.sender.map_or(0, |sender| world.log.of(sender).note);
        (0..protocol.bounds.lanes).filter(|lane| relay.may_settle(*lane)).any(|lane| {
            relay.seat(lane).hand.is_some_and(|hand| {
                hand.messages != 0 && hand.messages & note == 0 && world.stands(lane, hand.epoch)
            })
        })
    })
}

fn orphaned(_: &Protocol, world: &World) -> bool {
    (0..).zip(&world.log.senders).any(|(sender, row)| {
        matches!(row.transaction, Transaction::Sent { .. })
            && world.relays.iter().all(|relay| relay.sender != Some(sender))
    })
}

fn third(protocol: &Protocol, world: &World) -> bool {
    world.relays.iter().any(|relay| {
        (0..protocol.bounds.lanes).any(|lane| {
            let seat = relay.seat(lane);
            let mut claims = world.log.claims.iter().filter(|claim| claim.0 == lane);
            let first = claims.next().map_or(0, |claim| world.log.of(claim.1).note & protocol.of(lane));
            let second = claims.next().map_or(0, |claim| world.log.of(claim.1).note);
            seat.claim == Claim::Good && seat.formers.count_ones() >= 2 && first & relay.open & !second != 0
        })
    })
}
