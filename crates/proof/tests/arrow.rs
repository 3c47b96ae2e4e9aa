//! The whole arrow under kills, crashes, stops and wrong clocks, on real stores, in processes of their own.

mod stores;

use std::path::Path;
use std::time::Duration;

use proof::ground::Ground;
use proof::nemesis::{Nemesis, Worker};
use proof::scenario::{ChangeLanes, Clocks, Crash, Handle, Kill, Once, Scenario, Stop, Writers, prove};
use stores::{SQLITE, on};

const PROGRAM: &str = env!("CARGO_BIN_EXE_proof");

async fn holds(scenario: impl Scenario, store: &str) {
    let figures = prove(&scenario, Path::new(PROGRAM), store).await.expect("every promise is kept");
    eprintln!("{figures}");
}

#[tokio::test]
async fn thirty_kills_lose_nothing_double_nothing_and_keep_every_key_in_order() {
    let life = Duration::from_millis(2_500);
    holds(Kill { messages: 100_000, keys: 1_000, kills: 30, life }, SQLITE).await;
}

on! { postgres mariadb redis:
    async fn kills_lose_nothing_double_nothing_and_keep_every_key_in_order(store: &str) {
        let life = Duration::from_millis(2_000);
        holds(Kill { messages: 20_000, keys: 1_000, kills: 10, life }, store).await;
    }
}

on! { sqlite postgres mariadb redis:
    async fn a_route_and_a_group_that_promise_at_most_once_do_nothing_twice_under_kills(store: &str) {
        let life = Duration::from_millis(1_000);
        let broker = "embedded".to_owned();
        holds(Once { messages: 10_000, keys: 200, kills: 10, life, broker, fault: false }, store).await;
    }
}

on! { sqlite postgres mariadb redis:
    async fn a_crash_at_any_point_between_claim_and_acknowledgement_breaks_no_promise(store: &str) {
        holds(Crash { messages: 500, times: 1 }, store).await;
    }
}

on! { sqlite postgres mariadb redis:
    async fn a_consumer_that_dies_between_any_two_steps_acknowledges_what_is_done_and_nothing_else(store: &str) {
        holds(Handle { crashes: 1, keys: 100, acknowledge: "store".to_owned() }, store).await;
    }
}

on! { sqlite postgres:
    async fn a_consumer_that_dies_between_any_two_steps_acknowledges_by_http_what_is_done_and_nothing_else(store: &str) {
        holds(Handle { crashes: 1, keys: 100, acknowledge: "http".to_owned() }, store).await;
    }
}

on! { sqlite postgres mariadb redis:
    async fn writers_that_overlap_lose_nothing_and_nothing_is_sent_twice(store: &str) {
        let (open, stall) = (Duration::from_millis(15), Duration::from_secs(3));
        holds(Writers { messages: 8_000, keys: 1_000, writers: 16, open, stall }, store).await;
    }
}

on! { sqlite postgres mariadb redis:
    async fn a_relay_that_was_stopped_for_three_leases_can_settle_nothing(store: &str) {
        holds(Stop { times: 8, lease: Duration::from_secs(1), pace: 50, keys: 500 }, store).await;
    }
}

on! { postgres mariadb redis:
    async fn wrong_clocks_claim_nothing_twice_and_retry_nothing_early(store: &str) {
        holds(Clocks { messages: 2_000, keys: 400, failing: 0.3 }, store).await;
    }
}

on! { sqlite postgres mariadb redis:
    async fn the_number_of_lanes_changes_under_traffic_while_relays_join_and_die(store: &str) {
        holds(ChangeLanes { changes: 8, lease: Duration::from_secs(1), pace: 50, keys: 500 }, store).await;
    }
}

on! { sqlite postgres mariadb redis:
    async fn three_relays_share_the_lanes_and_a_dead_ones_move_when_its_lease_ends(store: &str) {
        let (keys, lease) = (10, Duration::from_secs(3));
        let ground = Ground::fresh(store, keys).await.expect("fresh ground");
        let moved = ground.during(async |ground| {
            let nemesis = Nemesis { program: Path::new(PROGRAM), ground, keys, lease };
            let mut relays = Vec::new();
            for _ in 0..3 {
                relays.push(nemesis.worker(&["--only", "relay"])?);
            }
            let mut names: Vec<_> = relays.iter().map(Worker::relay_name).collect();
            nemesis.until_lanes_are_shared(&mut relays, &names).await?;
            names.remove(0);
            relays.remove(0).kill().await?;
            nemesis.until_lanes_are_shared(&mut relays, &names).await
        });
        let moved = moved.await.expect("the lanes move");
        // The others look every third of a lease.
        assert!(moved < lease + lease / 3 + Duration::from_secs(1), "the lanes took {moved:?} to move");
        // On SQLite they see that its process is gone.
        assert!(store != SQLITE || moved < lease, "the lanes took {moved:?} to move");
    }
}
