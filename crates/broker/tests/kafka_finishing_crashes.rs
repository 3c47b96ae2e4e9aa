//! A member that dies at each step of a transaction, and a group that changes in the middle of one.
//!
//! Crash points are of the whole process, so these are apart from the other tests and go one after another.

#[allow(dead_code, reason = "this is the world of the other tests too")]
mod kafka_world;

use std::time::Duration;

use broker::kafka::Broker;
use broker::{Delivery, FinishTogether, Outgoing, Position, Publisher, Subscriber, Unfinished};
use fail::FailScenario;
use kafka_world::{World, confirmed};
use message::Message;
use rdkafka::consumer::{BaseConsumer, Consumer};

/// Long enough for anything that happens at all.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is done by whoever dies there is not seen, but at the last.
const STEPS: [&str; 4] =
    ["kafka::finish_begun", "kafka::finish_sent", "kafka::finish_offsets", "kafka::finish_committed"];

fn order(seq: i64) -> Outgoing {
    Outgoing::new(Message::new("orders", seq.to_string()).key(format!("key {seq}")), seq)
}

fn bills_of(deliveries: &[Delivery]) -> Vec<Outgoing> {
    let bill = |delivery: &Delivery| Message::new("bills", delivery.message.payload.clone());
    deliveries.iter().map(|delivery| Outgoing::new(bill(delivery), 0)).collect()
}

fn positions(deliveries: &[Delivery]) -> Vec<Position> {
    deliveries.iter().map(|delivery| delivery.position).collect()
}

async fn member(broker: &Broker) -> Box<dyn FinishTogether> {
    let together = broker.together().expect("Kafka has transactions");
    together.subscribe("billing", &["orders".to_owned()]).await.expect("the group can be joined")
}

async fn receive(member: &mut dyn FinishTogether, max: usize) -> Vec<Delivery> {
    let came = tokio::time::timeout(PATIENCE, member.receive(max)).await.expect("in time");
    came.expect("messages can be received")
}

/// Works until the last of the orders is finished.
async fn work(broker: &Broker, last: i64) {
    let mut member = member(broker).await;
    let mut finished = None;
    while finished < Some(last) {
        let came = receive(&mut *member, 7).await;
        member.finish(&positions(&came), bills_of(&came)).await.expect("it is committed");
        finished = finished.max(came.iter().filter_map(|delivery| delivery.seq).max());
    }
    member.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_step_a_member_dies_at_each_order_has_one_bill() {
    let scenario = FailScenario::setup();
    let world = World::new();
    // In one partition the last order is behind all others.
    let broker = world.broker("&partitions=1");
    let mut orders = 0;
    for step in STEPS {
        confirmed(&broker.publish((orders..orders + 10).map(order).collect()).await);
        fail::cfg(step, "1*panic->off").expect("a crash point");
        let dying = broker.clone();
        let died = tokio::spawn(async move {
            let mut member = member(&dying).await;
            let came = receive(&mut *member, 10).await;
            member.finish(&positions(&came), bills_of(&came)).await
        });
        assert!(died.await.is_err_and(|error| error.is_panic()), "{step}: it should have died");
        fail::remove(step);
        // One more, so that there is something to wait for where everything was committed.
        confirmed(&broker.publish(vec![order(orders + 10)]).await);
        orders += 11;
        work(&broker, orders - 1).await;
    }
    assert_eq!(world.numbers(&broker, "bills", orders as usize).await, (0..orders).collect::<Vec<_>>());
    scenario.teardown();
}

/// How many members the group has, and whether it has agreed on who has what.
fn agreed(looker: &BaseConsumer, group: &str) -> Option<usize> {
    let groups = looker.fetch_group_list(Some(group), PATIENCE).expect("Kafka answers");
    let group = groups.groups().first()?;
    (group.state() == "Stable").then(|| group.members().len())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_changes_in_the_middle_undoes_the_transaction() {
    let scenario = FailScenario::setup();
    let world = World::new();
    let broker = world.broker("&partitions=2");
    confirmed(&broker.publish((0..40).map(order).collect()).await);
    let looker: BaseConsumer = world.client().create().expect("a client can be made");
    let mut first = member(&broker).await;
    let mut came = Vec::new();
    while came.len() < 40 {
        came.extend(receive(&mut *first, 40).await);
    }
    fail::cfg("kafka::finish_sent", "pause").expect("a point to wait at");
    let finishing = tokio::spawn(async move {
        let ended = first.finish(&positions(&came), bills_of(&came)).await;
        (first, came, ended)
    });
    // It says who it is before it sends; the group has another generation when it sends its offsets.
    let second = member(&broker).await;
    let name = world.name("billing");
    testkit::until("a group of two", async || agreed(&looker, &name) == Some(2)).await;
    fail::remove("kafka::finish_sent");
    let (mut first, came, ended) = finishing.await.expect("it goes on");
    assert!(matches!(ended, Err(Unfinished::Undone(_))), "{ended:?}");
    first.finish(&positions(&came), bills_of(&came)).await.expect("everything is still with it");
    let (mut mine, mut theirs) = (first, second);
    confirmed(&broker.publish((40..80).map(order).collect()).await);
    let mut more = 0;
    while more < 40 {
        let (member, came) = tokio::select! {
            came = mine.receive(5) => (&mut mine, came),
            came = theirs.receive(5) => (&mut theirs, came),
        };
        let came = came.expect("messages can be received");
        member.finish(&positions(&came), bills_of(&came)).await.expect("it is committed");
        more += came.len();
    }
    mine.close().await;
    theirs.close().await;
    assert_eq!(world.numbers(&broker, "bills", 80).await, (0..80).collect::<Vec<_>>());
    scenario.teardown();
}
