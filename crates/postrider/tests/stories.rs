//! Stories that people tell of duplicates, each on real servers and to its end: one debit, one charge, the newest price,
//! one message.

#![cfg(all(
    unix,
    feature = "postgres",
    feature = "mysql",
    feature = "redis",
    feature = "redis-streams",
    feature = "nats",
    feature = "sqs",
    feature = "failpoints"
))]

mod harness;
#[path = "harness/place.rs"]
mod place;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use harness::{Folder, Server, until};
use place::{Place, fresh_name, mariadb, postgres, redis, sqlite};
use reqwest::blocking::Client;
use serde_json::{Value, json};

/// The same fact on several stores, as a test for each.
macro_rules! on {
    ($($store:ident)+: fn $fact:ident($shop:ident: Shop) $shown:block) => {
        mod $fact {
            use super::*;

            fn shown($shop: Shop) $shown

            $(#[test]
            fn $store() {
                shown(Shop::$store());
            })+
        }
    };
}

/// A store with the tables of a shop, and what stands beside it in the settings.
struct Shop {
    place: Place,
    /// What stands under `[consumer]`.
    consumer: String,
    /// What stands under the group, beside its handler.
    group: &'static str,
}

impl Shop {
    fn on(place: Place) -> Self {
        Self { place, consumer: String::new(), group: "" }
    }

    fn sqlite() -> Self {
        Self::on(sqlite())
    }

    fn postgres() -> Self {
        Self::on(postgres())
    }

    fn mariadb() -> Self {
        Self::on(mariadb())
    }

    fn redis() -> Self {
        Self::on(redis())
    }

    /// PostgreSQL decides, and Redis answers for what it has seen.
    fn hybrid() -> Self {
        let consumer = format!("[consumer]\nredis = \"{}\"", testkit::servers::url("redis"));
        Self { place: postgres(), consumer, group: "dedup = \"hybrid\"" }
    }

    fn kind(&self) -> &str {
        self.place.url.split_once("://").map_or("redis", |(kind, _)| kind)
    }

    /// A folder whose group `shop` handles `topic` so; its tables are made.
    fn furnish(&self, topic: &str, handler: &str, tables: &str) -> Folder {
        let Self { place, consumer, group } = self;
        // Short leases: nobody waits long for a process that was killed.
        let folder = Folder::with(&format!(
            "[store]\n{}\n{consumer}\n[relay]\nlease = \"2s\"\n[brokers.main]\nurl = \"embedded://?lease=2s\"\n\
             [consumers.shop]\ntopics = [\"{topic}\"]\n{group}\nhandler = {{ {handler} }}\n",
            place.settings
        ));
        let made = folder.run(&["migrate"]);
        assert_eq!(made.code, 0, "{made:?}");
        if !place.is_redis() {
            place.ask(tables);
        }
        folder
    }

    /// Takes `amount` of the payload from the balance of the key.
    fn debit(&self) -> String {
        match self.kind() {
            "postgres" => "sql = \"UPDATE accounts SET balance = balance - \
                 (convert_from(:payload, 'UTF8')::json ->> 'amount')::int WHERE id = :key\""
                .to_owned(),
            "mysql" => "sql = \"UPDATE accounts SET balance = balance - JSON_EXTRACT(:payload, '$.amount') \
                        WHERE id = :key\""
                .to_owned(),
            "sqlite" => "sql = \"UPDATE accounts SET balance = balance - json_extract(:payload, '$.amount') \
                         WHERE id = :key\""
                .to_owned(),
            _ => format!(
                "script = \"redis.call('DECRBY', '{}:balance:' .. message.key, \
                 cjson.decode(message.payload).amount)\"",
                self.place.url
            ),
        }
    }

    const ACCOUNTS: &str = "CREATE TABLE accounts (id varchar(40) PRIMARY KEY, balance int NOT NULL)";

    /// Opens an account with 1,000 on it.
    fn open_account(&self, account: &str) {
        match self.place.is_redis() {
            true => self.place.ask(&format!("SET \"{}:balance:{account}\" 1000", self.place.url)),
            false => self.place.ask(&format!("INSERT INTO accounts VALUES ('{account}', 1000)")),
        };
    }

    fn balance(&self, account: &str) -> i64 {
        let said = match self.place.is_redis() {
            true => self.place.ask(&format!("GET \"{}:balance:{account}\"", self.place.url)),
            false => self.place.ask(&format!("SELECT balance FROM accounts WHERE id = '{account}'")),
        };
        said.parse().expect("a balance")
    }

    /// Applies the price of the payload unless a newer version was applied.
    fn reprice(&self) -> String {
        match self.kind() {
            "postgres" => "sql = \"INSERT INTO prices SELECT CAST(:key AS text), (new ->> 'price')::int, (new ->> 'version')::int \
                           FROM (SELECT convert_from(:payload, 'UTF8')::json AS new) AS it \
                           WHERE postrider_newer('shop', CAST(:key AS text), (new ->> 'version')::bigint) \
                           ON CONFLICT (item) DO UPDATE SET price = EXCLUDED.price, version = EXCLUDED.version\""
                .to_owned(),
            "mysql" => "sql = \"INSERT INTO prices SELECT :key, JSON_EXTRACT(:payload, '$.price'), \
                        JSON_EXTRACT(:payload, '$.version') FROM DUAL \
                        WHERE postrider_newer('shop', :key, JSON_EXTRACT(:payload, '$.version')) \
                        ON DUPLICATE KEY UPDATE price = VALUES(price), version = VALUES(version)\""
                .to_owned(),
            "sqlite" => "sql = \"INSERT INTO prices VALUES (:key, json_extract(:payload, '$.price'), \
                         json_extract(:payload, '$.version')) ON CONFLICT (item) DO UPDATE \
                         SET price = excluded.price, version = excluded.version \
                         WHERE excluded.version > prices.version\""
                .to_owned(),
            _ => format!(
                "script = \"local new, item = cjson.decode(message.payload), '{}:price:' .. message.key \
                 if postrider.newer('shop', message.key, new.version) then \
                 redis.call('HSET', item, 'price', new.price, 'version', new.version) end\"",
                self.place.url
            ),
        }
    }

    /// Applies the price of the payload if nobody has since the sender looked, which saw the version `seen`.
    fn replace_price(&self) -> String {
        match self.kind() {
            "postgres" => "sql = \"UPDATE prices SET price = (new ->> 'price')::int, version = version + 1 \
                           FROM (SELECT convert_from(:payload, 'UTF8')::json AS new) AS it \
                           WHERE item = CAST(:key AS text) AND postrider_swap('shop', CAST(:key AS text), \
                           (new ->> 'seen')::bigint, (new ->> 'seen')::bigint + 1)\""
                .to_owned(),
            "mysql" => {
                "sql = \"UPDATE prices SET price = JSON_EXTRACT(:payload, '$.price'), version = version + 1 \
                        WHERE item = :key AND postrider_swap('shop', :key, JSON_EXTRACT(:payload, '$.seen'), \
                        JSON_EXTRACT(:payload, '$.seen') + 1)\""
                    .to_owned()
            }
            "sqlite" => {
                "sql = \"UPDATE prices SET price = json_extract(:payload, '$.price'), version = version + 1 \
                         WHERE item = :key AND version = json_extract(:payload, '$.seen')\""
                    .to_owned()
            }
            _ => format!(
                "script = \"local new, item = cjson.decode(message.payload), '{}:price:' .. message.key \
                 if postrider.swap('shop', message.key, new.seen, new.seen + 1) then \
                 redis.call('HSET', item, 'price', new.price) redis.call('HINCRBY', item, 'version', 1) end\"",
                self.place.url
            ),
        }
    }

    const PRICES: &str =
        "CREATE TABLE prices (item varchar(40) PRIMARY KEY, price int NOT NULL, version int NOT NULL)";

    fn price(&self, item: &str) -> i64 {
        self.of_price(item, "price")
    }

    fn of_price(&self, item: &str, column: &str) -> i64 {
        let said = match self.place.is_redis() {
            true => self.place.ask(&format!("HGET \"{}:price:{item}\" {column}", self.place.url)),
            false => self.place.ask(&format!("SELECT {column} FROM prices WHERE item = '{item}'")),
        };
        said.parse().expect("a number")
    }

    /// Sets the first price of an item.
    fn set_price(&self, item: &str, price: i64) {
        match self.place.is_redis() {
            true => {
                self.place.ask(&format!("HSET \"{}:price:{item}\" price {price} version 0", self.place.url))
            }
            false => self.place.ask(&format!("INSERT INTO prices VALUES ('{item}', {price}, 0)")),
        };
    }
}

/// Posts `body`. Nothing when the connection broke: whoever was to answer has died.
fn post(url: &str, key: Option<&str>, body: &Value) -> Option<(u16, Value)> {
    let mut request = Client::new().post(url).header("content-type", "application/json");
    if let Some(key) = key {
        request = request.header("Idempotency-Key", key);
    }
    let response = request.body(body.to_string()).send().ok()?;
    Some((response.status().as_u16(), response.json().ok()?))
}

/// Posts `bodies` all at once, and answers in their order.
fn post_together(url: &str, key: Option<&str>, bodies: &[Value]) -> Vec<Option<(u16, Value)>> {
    thread::scope(|scope| {
        let posts: Vec<_> = bodies.iter().map(|body| scope.spawn(move || post(url, key, body))).collect();
        posts.into_iter().map(|post| post.join().expect("no panic")).collect()
    })
}

/// Sends a message that is written once under its id.
fn send(server: &Server, message: &Value) -> String {
    let (status, answer) =
        server.post(&format!("{}/api/messages/send", server.producer), &message.to_string());
    assert_eq!(status, 202, "{answer}");
    answer["messageId"].as_str().expect("an id").to_owned()
}

/// Waits until the group has acknowledged it.
fn acknowledged(server: &Server, id: &str) {
    server.until(&format!("{}/api/messages/status/{id}", server.producer), |view| {
        view["acknowledgements"]
            .as_array()
            .is_some_and(|all| !all.is_empty() && all.iter().all(|one| !one["acknowledgedAt"].is_null()))
    });
}

/// The same message as the broker would deliver it, `times` times at once. What each came to.
fn deliver(server: &Server, message: &Value, times: usize) -> Vec<String> {
    let mut arrival = message.clone();
    arrival["consumerGroup"] = "shop".into();
    let url = format!("{}/api/consumer/test-process", server.consumer);
    let answers = post_together(&url, None, &vec![arrival; times]);
    answers
        .into_iter()
        .flatten()
        .map(|(_, answer)| answer["result"].as_str().unwrap_or_default().to_owned())
        .collect()
}

/// Every step between receiving a message and forgetting it.
const STEPS: [&str; 5] =
    ["inbox::received", "inbox::handled", "inbox::marked", "inbox::acknowledged", "inbox::finished"];

on! { sqlite postgres mariadb redis hybrid:
    fn a_debit_of_100_is_taken_once_whatever_dies_and_however_often_it_comes(shop: Shop) {
        let mut folder = shop.furnish("debits", &shop.debit(), Shop::ACCOUNTS);
        for (number, step) in STEPS.iter().enumerate() {
            let account = format!("account-{number}");
            shop.open_account(&account);
            let debit = json!({
                "topic": "debits", "key": account, "message": { "amount": 100 },
                "messageId": format!("019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e{number:02}"),
            });
            folder = folder.variable("FAILPOINTS", &format!("{step}=3*panic->off"));
            let server = folder.serve(&[]);
            let id = send(&server, &debit);
            let answers = deliver(&server, &debit, 64);
            assert!(answers.iter().filter(|result| *result == "new").count() <= 1, "{answers:?}");
            let died = || server.said().contains(&format!("failpoint {step} panic"));
            until(died).unwrap_or_else(|()| panic!("nobody died at {step}: {}", server.said()));
            // The process is killed too, with whatever it has in hand.
            drop(server);

            folder = folder.variable("FAILPOINTS", "");
            let server = folder.serve(&[]);
            let answers = deliver(&server, &debit, 64);
            assert!(answers.len() == 64 && answers.iter().filter(|result| *result == "new").count() <= 1);
            acknowledged(&server, &id);
            assert_eq!(deliver(&server, &debit, 1), ["duplicate"]);
            assert_eq!(shop.balance(&account), 900, "{step}");
        }
    }
}

on! { sqlite postgres mariadb redis hybrid:
    fn a_payment_that_is_sent_50_times_at_once_is_one_message_with_one_answer_and_one_debit(shop: Shop) {
        let folder = shop.furnish("debits", &shop.debit(), Shop::ACCOUNTS);
        shop.open_account("order-12345");
        let server = folder.serve(&[]);
        let payment = json!({ "topic": "debits", "key": "order-12345", "message": { "amount": 100 } });
        let url = format!("{}/api/messages/send", server.producer);
        let answers = post_together(&url, Some("order-12345-payment-1"), &vec![payment; 50]);
        let (status, first) = answers[0].clone().expect("an answer");
        assert_eq!(status, 202, "{first}");
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
        acknowledged(&server, first["messageId"].as_str().expect("an id"));
        assert_eq!(shop.balance("order-12345"), 900);
        let counts = &folder.json(&["status"])["counts"];
        assert_eq!((&counts["sent"], &counts["pending"]), (&1.into(), &0.into()), "{counts}");
    }
}

on! { sqlite postgres mariadb redis:
    fn a_price_of_200_stays_when_the_100_before_it_is_sent_again(shop: Shop) {
        let folder = shop.furnish("prices", &shop.reprice(), Shop::PRICES);
        let server = folder.serve(&[]);
        let price = |item: &str, version: u32, price: u32| {
            json!({ "topic": "prices", "key": item, "message": { "price": price, "version": version } })
        };
        // Each under an id of its own: no memory of ids can tell that the last is the first again.
        for message in [price("tea", 1, 100), price("tea", 2, 200), price("tea", 1, 100)] {
            let id = send(&server, &message);
            acknowledged(&server, &id);
        }
        assert_eq!(shop.price("tea"), 200);

        // All at once, in whatever order they come to be handled.
        let versions = (1..=32).map(|version| price("rice", version, version * 100));
        let arrivals: Vec<_> = versions
            .map(|mut message| {
                message["consumerGroup"] = "shop".into();
                message
            })
            .collect();
        let url = format!("{}/api/consumer/test-process", server.consumer);
        for answer in post_together(&url, None, &arrivals) {
            assert_eq!(answer.expect("an answer").1["result"], "new");
        }
        assert_eq!(shop.price("rice"), 3_200);
    }
}

on! { sqlite postgres mariadb redis:
    fn of_many_prices_that_replace_the_same_version_one_is_applied(shop: Shop) {
        // The version that the sender saw goes with the message: who was slower must look again.
        let folder = shop.furnish("prices", &shop.replace_price(), Shop::PRICES);
        shop.set_price("tea", 50);
        let server = folder.serve(&[]);
        let arrivals: Vec<_> = (1..=32)
            .map(|price| {
                json!({
                    "topic": "prices", "key": "tea", "consumerGroup": "shop",
                    "message": { "price": price * 100, "seen": 0 },
                })
            })
            .collect();
        let url = format!("{}/api/consumer/test-process", server.consumer);
        let answers = post_together(&url, None, &arrivals);
        assert!(answers.iter().flatten().all(|(_, answer)| answer["result"] == "new"), "{answers:?}");
        let (version, price) = (shop.of_price("tea", "version"), shop.price("tea"));
        assert_eq!((version, price % 100), (1, 0), "one of them was applied");
    }
}

on! { sqlite postgres mariadb redis:
    fn an_alarm_that_is_lost_on_the_way_to_its_broker_is_in_the_record(shop: Shop) {
        let folder = Folder::with(&format!(
            "[store]\n{}\n[relay]\nlease = \"2s\"\n[brokers.main]\nurl = \"embedded://?lease=2s\"\n\
             [routes.alarms]\ntopics = [\"alarms\"]\nsemantics = \"at-most-once\"\ncopy_to = \"record-of-alarms\"\n\
             [routes.all]\ntopics = [\"*\"]\n\
             [consumers.siren]\ntopics = [\"alarms\"]\nsemantics = \"at-most-once\"\n\
             [consumers.ledger]\ntopics = [\"record-of-alarms\"]\n",
            shop.place.settings
        ))
        .variable("FAILPOINTS", "relay::promised=1*panic->off");
        let server = folder.serve(&[]);
        let alarm = json!({ "topic": "alarms", "key": "gate-3", "message": { "id": 17 } });
        let processed = |group: &str| format!("{}/api/consumer/processed/{group}", server.consumer);
        let count = |view: &Value| view["items"].as_array().map_or(0, Vec::len);
        // The relay dies with the first between its settlement and its broker.
        let lost = send(&server, &alarm);
        let died = || server.said().contains("failpoint relay::promised panic");
        until(died).unwrap_or_else(|()| panic!("nobody died: {}", server.said()));
        let heard = send(&server, &alarm);
        server.until(&processed("ledger"), |view| count(view) == 2);
        let siren = server.until(&processed("siren"), |view| count(view) == 1);
        assert_eq!(siren["items"][0]["messageId"], heard.as_str());
        let counts = &folder.json(&["status"])["counts"];
        assert_eq!((&counts["sent"], &counts["pending"]), (&4.into(), &0.into()), "{lost}: {counts}");
    }
}

/// How long the payment takes, and how long a broker waits for a member: thirty seconds and ten, in a tenth of the time.
const PAYMENT: Duration = Duration::from_secs(3);

/// The brokers that give a message to somebody else when its time is over, with a time of one second.
const IMPATIENT: [(&str, &str); 4] = [
    ("embedded", "lease=1s"),
    ("sqs", "fifo=true&visibility=1s"),
    ("nats", "lease=1s"),
    ("redis", "lease=1s"),
];

fn impatient(name: &str, parameters: &str) -> String {
    if name == "embedded" {
        return format!("embedded://?{parameters}");
    }
    let server = testkit::servers::url(name);
    let joint = if server.contains('?') { '&' } else { '?' };
    format!("{server}{joint}prefix={}&{parameters}", fresh_name().replace('_', "x"))
}

/// A bank that takes its time, and writes down whom it charged.
struct Bank {
    url: String,
    book: Arc<Book>,
}

#[derive(Default)]
struct Book {
    charged: Mutex<Vec<String>>,
    /// Nobody is answered before this.
    may_answer: AtomicBool,
}

impl Bank {
    fn open() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}/charge", listener.local_addr().expect("it is bound"));
        let bank = Self { url, book: Arc::default() };
        let book = Arc::clone(&bank.book);
        // It ends with the process of the test.
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let book = Arc::clone(&book);
                thread::spawn(move || charge(connection, &book));
            }
        });
        bank
    }

    fn charged(&self) -> Vec<String> {
        self.book.charged.lock().expect("no panic").clone()
    }
}

fn charge(mut connection: TcpStream, book: &Book) {
    let mut request = Vec::new();
    while !String::from_utf8_lossy(&request).contains("{\"amount\":100}") {
        let mut part = [0; 4_096];
        match connection.read(&mut part) {
            Ok(read) if read > 0 => request.extend_from_slice(&part[..read]),
            _ => return,
        }
    }
    let request = String::from_utf8_lossy(&request).to_lowercase();
    let key = request.lines().find_map(|line| line.strip_prefix("idempotency-key:"));
    book.charged.lock().expect("no panic").push(key.unwrap_or_default().trim().to_owned());
    thread::sleep(PAYMENT);
    let _ = until(|| book.may_answer.load(Ordering::SeqCst));
    // Who asked may be gone by now.
    let _ = connection.write_all(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n");
}

#[test]
fn a_payment_that_takes_longer_than_its_broker_waits_is_charged_once() {
    for (name, parameters) in IMPATIENT {
        let bank = Bank::open();
        let folder = Folder::with(&format!(
            "[brokers.main]\nurl = \"{}\"\n[routes.all]\ntopics = [\"*\"]\nidempotent = true\n\
             [consumers.shop]\ntopics = [\"payments\"]\nhandler = {{ http = \"{}\", timeout = \"25s\" }}\n",
            impatient(name, parameters),
            bank.url
        ));
        let first = folder.serve(&[]);
        let second = folder.serve(&["--only", "consumer"]);
        let payment = json!({
            "topic": "payments", "key": "order-12345", "message": { "amount": 100 },
            "messageId": "019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e55",
        });
        let id = send(&first, &payment);
        until(|| !bank.charged().is_empty()).unwrap_or_else(|()| panic!("{name}: {}", first.said()));
        // As if the broker had given it to others meanwhile: somebody is at it, so nothing is done.
        for server in [&first, &second] {
            assert_eq!(deliver(server, &payment, 8), ["unavailable"; 8], "{name}");
        }
        bank.book.may_answer.store(true, Ordering::SeqCst);
        acknowledged(&first, &id);
        assert_eq!(deliver(&second, &payment, 8), ["duplicate"; 8], "{name}");
        assert_eq!(bank.charged().len(), 1, "{name}: {:?}", bank.charged());
    }
}
