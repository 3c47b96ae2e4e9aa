//! The rules of claims, one by one, without a relay.

use std::time::Duration;

use message::MessageId;
use redis::Commands;
use relay::claims::redis::RedisClaims;
use relay::claims::{Answer, Claims, End, Over, Wanted};
use uuid::Uuid;

use crate::world::{PATIENCE, Server, World, free_port};

/// One exchange for one message.
async fn want(claims: &RedisClaims, id: MessageId, owner: Uuid, delivery: u32, attempts: u32) -> Answer {
    let wanted = [Wanted { id, owner, delivery, attempts }];
    claims.exchange(&[], &wanted).await.expect("an answer").remove(0)
}

async fn give_back(claims: &RedisClaims, id: MessageId, owner: Uuid, end: End) {
    claims.exchange(&[Over { id, owner, end }], &[]).await.expect("an answer");
}

fn is_held_by(answer: Answer, whom: Uuid) -> bool {
    matches!(answer, Answer::Held { owner: Some(owner), rest: Some(_) } if owner == whom)
}

#[tokio::test]
async fn only_its_owner_gives_a_lock_back_however_often_he_says_so() {
    let world = World::new(Duration::from_secs(60));
    let claims = RedisClaims::new(&world.claims).expect("claims");
    let (id, mine, other) = (MessageId::new(), Uuid::new_v4(), Uuid::new_v4());
    assert_eq!(want(&claims, id, mine, 0, 0).await, Answer::Locked);
    for end in [End::Finished, End::Failed, End::Released] {
        give_back(&claims, id, other, end).await;
    }
    assert!(is_held_by(want(&claims, id, other, 0, 0).await, mine));
    give_back(&claims, id, mine, End::Failed).await;
    assert_eq!(want(&claims, id, other, 0, 1).await, Answer::Locked);
    // The answer to the first time was lost.
    give_back(&claims, id, mine, End::Failed).await;
    assert!(is_held_by(want(&claims, id, mine, 0, 1).await, other));
}

#[tokio::test]
async fn what_is_released_was_never_counted() {
    let world = World::new(Duration::from_secs(60));
    let claims = RedisClaims::new(&world.claims).expect("claims");
    let (id, batch) = (MessageId::new(), Uuid::new_v4());
    for _ in 0..5 {
        assert_eq!(want(&claims, id, batch, 0, 1).await, Answer::Locked);
        assert_eq!(world.redis().get::<_, String>(world.lock(id)).expect("a lock"), "2");
        give_back(&claims, id, batch, End::Released).await;
    }
    assert_eq!(world.counter(id)["attempts"], "1");
}

#[tokio::test]
async fn a_lock_whose_attempt_the_store_has_settled_holds_nobody() {
    let world = World::new(Duration::from_secs(60));
    let claims = RedisClaims::new(&world.claims).expect("claims");
    let (id, dead, next) = (MessageId::new(), Uuid::new_v4(), Uuid::new_v4());
    // The worker settled a failure and died before it gave the lock back.
    assert_eq!(want(&claims, id, dead, 0, 0).await, Answer::Locked);
    assert_eq!(want(&claims, id, next, 0, 1).await, Answer::Locked);
    assert_eq!(world.redis().get::<_, String>(world.lock(id)).expect("a lock"), "2");
    // So it is with one that a person sends again, and only with a later delivery.
    assert!(is_held_by(want(&claims, id, dead, 0, 1).await, next));
    assert_eq!(want(&claims, id, dead, 1, 0).await, Answer::Locked);
    assert_eq!((&*world.counter(id)["attempts"], &*world.counter(id)["delivery"]), ("1", "1"));
}

#[tokio::test]
async fn keys_of_others_break_nothing_and_a_lock_without_an_end_gets_one() {
    let world = World::new(Duration::from_millis(300));
    let claims = RedisClaims::new(&world.claims).expect("claims");
    let (id, batch) = (MessageId::new(), Uuid::new_v4());
    let _: () = world.redis().set(format!("{}:attempts", world.lock(id)), "text").expect("a key");
    let _: () = world.redis().set(world.lock(id), "1").expect("a lock");
    give_back(&claims, id, batch, End::Finished).await;
    assert!(matches!(want(&claims, id, batch, 0, 0).await, Answer::Held { owner: None, rest: Some(_) }));
    let ended = || async { want(&claims, id, batch, 0, 0).await == Answer::Locked };
    assert!(testkit::eventually(PATIENCE, ended).await);
}

#[tokio::test]
async fn a_batch_of_any_size_is_exchanged_in_order_and_a_lost_script_is_loaded_again() {
    let (port, folder) = (free_port(), tempfile::tempdir().expect("a folder"));
    let _server = Server::start(port, folder.path()).await;
    let world = World::on(format!("redis://127.0.0.1:{port}"), Duration::from_secs(60));
    let claims = RedisClaims::new(&world.claims).expect("claims");
    let owner = Uuid::new_v4();
    let ids: Vec<MessageId> = (0..2_500).map(|_| MessageId::new()).collect();
    let wanted: Vec<Wanted> =
        ids.iter().map(|id| Wanted { id: *id, owner, delivery: 0, attempts: 0 }).collect();
    let held = want(&claims, ids[1_234], Uuid::nil(), 0, 0).await;
    assert_eq!(held, Answer::Locked);
    let _: () = redis::cmd("SCRIPT").arg("FLUSH").query(&mut world.redis()).expect("flushed");
    let answers = claims.exchange(&[], &wanted).await.expect("answers");
    assert_eq!(answers.len(), 2_500);
    assert!(is_held_by(answers[1_234], Uuid::nil()));
    assert_eq!(answers.iter().filter(|answer| **answer == Answer::Locked).count(), 2_499);
    let mut over: Vec<Over> = ids.iter().map(|id| Over { id: *id, owner, end: End::Finished }).collect();
    over[1_234].owner = Uuid::nil();
    assert_eq!(claims.exchange(&over, &wanted[..3]).await.expect("answers"), [Answer::Locked; 3]);
    assert_eq!(world.keys().len(), 6);
}
