//! Faults that a real server does not have on request: librdkafka's own cluster of imitations, told to fail.

use std::time::{Duration, Instant};

use broker::kafka::{Broker, Config};
use broker::{Outcome, Outgoing, Publisher};
use message::Message;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message as _;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

type Cluster = MockCluster<'static, DefaultProducerContext>;

fn cluster(servers: i32, partitions: i32) -> Cluster {
    let cluster = MockCluster::new(servers).expect("imitations can be started");
    cluster.create_topic("orders", partitions, servers).expect("a topic can be made");
    cluster
}

fn broker(cluster: &Cluster, timeout: Duration) -> Broker {
    let config = Config { timeout, ..Config::new(cluster.bootstrap_servers()) };
    Broker::open(config).expect("librdkafka can be used")
}

fn outgoing(key: String, seq: i64) -> Outgoing {
    Outgoing::new(Message::new("orders", seq.to_string()).key(key), seq)
}

/// The numbers that are stored, partition by partition.
fn stored(cluster: &Cluster, partitions: i32, count: usize) -> Vec<i64> {
    let mut settings = ClientConfig::new();
    settings.set("bootstrap.servers", cluster.bootstrap_servers()).set("group.id", "bare");
    let consumer: BaseConsumer = settings.create().expect("a client can be made");
    let mut all = TopicPartitionList::new();
    for partition in 0..partitions {
        all.add_partition_offset("orders", partition, Offset::Beginning).expect("it is a place");
    }
    consumer.assign(&all).expect("it can be read");
    let (mut numbers, mut last) = (Vec::new(), Instant::now());
    // Until all are there, and for a moment longer: there may be more than there should.
    while last.elapsed() < Duration::from_secs(if numbers.len() < count { 20 } else { 1 }) {
        let Some(Ok(record)) = consumer.poll(Duration::from_millis(100)) else { continue };
        let text = std::str::from_utf8(record.payload().unwrap_or_default()).expect("a number");
        numbers.push(text.parse().expect("a number"));
        last = Instant::now();
    }
    numbers
}

#[tokio::test]
async fn while_leaders_come_and_go_nothing_is_lost_doubled_or_overtaken() {
    let cluster = cluster(3, 1);
    let broker = broker(&cluster, Duration::from_secs(30));
    for round in 0..20 {
        let batch = (0..500).map(|n| outgoing("a".to_owned(), round * 500 + n)).collect();
        let flaps = async {
            for leader in [1, 2, 3, 2, 1] {
                cluster.partition_leader("orders", 0, Some(leader)).expect("the leader can be changed");
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let (outcomes, ()) = tokio::join!(broker.publish(batch), flaps);
        super::confirmed(&outcomes);
    }
    assert_eq!(stored(&cluster, 1, 10_000), (0..10_000).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_batch_that_is_refused_takes_no_other_with_it_and_nothing_of_its_keys_follows() {
    let cluster = cluster(1, 4);
    let broker = broker(&cluster, Duration::from_secs(20));
    super::confirmed(&broker.publish(vec![outgoing("warm".to_owned(), 0)]).await);
    let refused = RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_RECORD;
    for round in 1..=5 {
        cluster.request_errors(RDKafkaApiKey::Produce, &[refused]);
        // Eight keys in four partitions, five messages of each.
        let batch = (0..40).map(|n| outgoing(format!("key-{}", n % 8), round * 40 + n)).collect();
        let outcomes = broker.publish(batch).await;
        let refused = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Deferred { .. })).count();
        let confirmed = outcomes.iter().filter(|outcome| **outcome == Outcome::Confirmed).count();
        assert!((1..=20).contains(&refused) && confirmed >= 20, "{outcomes:?}");
        for key in 0..8 {
            let of_key: Vec<_> = outcomes.iter().skip(key).step_by(8).collect();
            let stopped = of_key.iter().position(|outcome| **outcome != Outcome::Confirmed).unwrap_or(5);
            let later = of_key[stopped..].iter().all(|outcome| **outcome != Outcome::Confirmed);
            assert!(later, "one overtook another: {of_key:?}");
        }
        super::confirmed(&broker.publish(vec![outgoing("warm".to_owned(), 0)]).await);
    }
}

#[tokio::test]
async fn what_is_not_answered_in_time_is_unconfirmed_and_the_next_call_goes_on() {
    let cluster = cluster(1, 1);
    let broker = broker(&cluster, Duration::from_secs(4));
    super::confirmed(&broker.publish(vec![outgoing("a".to_owned(), 0)]).await);
    for round in 1..=3 {
        cluster.broker_round_trip_time(1, Duration::from_secs(30)).expect("it can be slowed");
        let asked = Instant::now();
        let outcomes = broker.publish(vec![outgoing("a".to_owned(), round)]).await;
        assert!(matches!(outcomes[0], Outcome::Unconfirmed { .. }), "{outcomes:?}");
        assert!(asked.elapsed() < Duration::from_secs(6), "{:?}", asked.elapsed());
        cluster.broker_round_trip_time(1, Duration::ZERO).expect("it can be quick again");
        super::confirmed(&broker.publish(vec![outgoing("a".to_owned(), round)]).await);
    }
    let mut numbers = stored(&cluster, 1, 4);
    numbers.dedup();
    assert_eq!(numbers, [0, 1, 2, 3], "perhaps twice, and never out of order");
}

#[tokio::test]
async fn a_producer_that_failed_for_good_is_replaced() {
    let cluster = cluster(1, 1);
    let broker = broker(&cluster, Duration::from_secs(20));
    super::confirmed(&broker.publish(vec![outgoing("a".to_owned(), 0)]).await);
    for round in 1..=50 {
        let fatal = RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER;
        cluster.request_errors(RDKafkaApiKey::Produce, &[fatal]);
        let begun = Instant::now();
        while broker.publish(vec![outgoing("a".to_owned(), round)]).await != [Outcome::Confirmed] {
            assert!(begun.elapsed() < Duration::from_secs(5), "it does not recover");
        }
        cluster.clear_request_errors(RDKafkaApiKey::Produce);
    }
}

#[tokio::test]
async fn a_new_producer_whose_first_request_is_refused_loses_nothing_and_overtakes_nothing() {
    // A server that does not know a producer takes whatever sequence comes first: as one does that has just become the
    // leader again, when it refuses the first request and takes the second. librdkafka believes then that it has both.
    let refused = RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION;
    for _ in 0..2 {
        let cluster = cluster(1, 2);
        let broker = broker(&cluster, Duration::from_secs(20));
        // In the other partition: the producer is at work, and this one has not heard of it.
        super::confirmed(&broker.publish(vec![outgoing("abc".to_owned(), 0)]).await);
        cluster.broker_round_trip_time(1, Duration::from_millis(50)).expect("it can be slowed");
        cluster.request_errors(RDKafkaApiKey::Produce, &[refused]);
        // The next are on their way before the first are answered: each has a request of its own.
        let broker = &broker;
        let calls = (1..10).map(|call| async move {
            tokio::time::sleep(Duration::from_millis(10 * call)).await;
            let key = if call % 2 == 0 { "21" } else { "foobar" };
            broker.publish(vec![outgoing(key.to_owned(), call as i64)]).await
        });
        for outcomes in futures::future::join_all(calls).await {
            super::confirmed(&outcomes);
        }
        let numbers = stored(&cluster, 2, 10);
        let of = |key: i64| numbers.iter().copied().filter(|n| n % 2 == key).collect::<Vec<i64>>();
        assert_eq!(
            [of(0), of(1)],
            [vec![0, 2, 4, 6, 8], vec![1, 3, 5, 7, 9]],
            "all there, each key in order"
        );
    }
}

#[tokio::test]
async fn a_topic_that_nobody_may_write_to_stops_alone() {
    let cluster = cluster(1, 4);
    let broker = broker(&cluster, Duration::from_secs(5));
    let denied = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED; 64];
    cluster.request_errors(RDKafkaApiKey::Produce, &denied);
    let outcomes = broker.publish((0..40).map(|n| outgoing(format!("key-{n}"), n)).collect()).await;
    let alone = |outcome: &Outcome| matches!(outcome, Outcome::Misconfigured { .. } | Outcome::Held);
    assert!(outcomes.iter().all(alone), "nothing says that the broker is away: {outcomes:?}");
    assert!(outcomes.iter().any(|outcome| *outcome != Outcome::Held), "{outcomes:?}");
}
