//! Settings as people write them, right and wrong.

use super::*;

fn loaded(text: &str, variables: &[(&str, &str)]) -> Result<Loaded, Rejected> {
    let table = tree::parse(text).expect("the test writes TOML");
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    from_parts(None, table, variables)
}

fn complaints(text: &str, variables: &[(&str, &str)]) -> String {
    match loaded(text, variables) {
        Ok(_) => panic!("should be refused: {text}"),
        Err(rejected) => rejected.to_string(),
    }
}

#[test]
fn nothing_written_is_the_built_in_settings() {
    let config = loaded("", &[]).expect("the defaults are good").config;
    assert_eq!(config.store.url, "sqlite://postrider-data/postrider.db");
    assert_eq!(config.producer.listen.to_string(), "127.0.0.1:5299");
    assert_eq!(config.consumer.listen.to_string(), "127.0.0.1:5287");
    assert_eq!(config.routes["default"].broker, "main");
    assert_eq!(config.consumers["default-consumer-group"].topics, ["user-events", "order-events"]);
    assert_eq!(config.consumers["analytics-group"].topics, ["analytics-events"]);
}

#[test]
fn what_is_shown_can_be_loaded_and_shows_the_same() {
    let text = r#"
        [consumer]
        acknowledge_to = "http://127.0.0.1:1/"
        [routes.orders]
        topics = ["order-*"]
        why = "money \"moves\""
        idempotent = true
        retry = { max_attempts = 3, count_outages = true }
        [routes.alarms]
        topics = ["alarm-*"]
        semantics = "at-most-once"
        copy_to = "order-record"
        [consumers.a]
        topics = ["order-events"]
        handler = { http = "http://127.0.0.1:9/x", timeout = "5s" }
        [consumers.b]
        topics = ["order-events"]
        handler = { command = ["sh", "-c", "cat"] }
        [consumers.c]
        topics = ["order-events"]
        handler = { sql = "INSERT INTO seen VALUES (:id)" }
    "#;
    let shown = loaded(text, &[]).expect("good settings").config.to_toml();
    let again = loaded(&shown, &[]).expect("what is shown is good").config.to_toml();
    assert_eq!(shown, again);
    let defaults = loaded("", &[]).expect("good").config.to_toml();
    assert_eq!(defaults, loaded(&defaults, &[]).expect("good").config.to_toml());
}

#[test]
fn the_environment_goes_over_the_file_and_over_the_defaults() {
    let variables = [
        ("POSTRIDER__ROUTES__DEFAULT__RETRY__MAX_ATTEMPTS", "3"),
        ("POSTRIDER__CONSUMERS__DEFAULT_CONSUMER_GROUP__KEEP_IDS", "9d"),
        ("POSTRIDER__RELAY__LEASE", "5s"),
        ("POSTRIDER__CONSUMERS__extra-group__TOPICS", "[\"a\"]"),
        ("OTHER__RELAY__LEASE", "1s"),
    ];
    let loaded = loaded("[relay]\nlease = \"20s\"\nbatch = 7\n", &variables).expect("good settings");
    let config = loaded.config;
    assert_eq!(config.routes["default"].retry.max_attempts, 3);
    assert_eq!(super::super::duration_text(config.consumers["default-consumer-group"].keep_ids), "9d");
    assert_eq!((config.relay.lease.as_secs(), config.relay.batch), (5, 7));
    assert_eq!(config.consumers["extra-group"].topics, ["a"]);
    assert_eq!(loaded.variables.len(), 4);
}

#[test]
fn every_mistake_is_told_at_once_with_its_place() {
    let text = "[relay]\nleese = \"30s\"\nbatch = \"many\"\n[producer]\nlisten = \"0.0.0.0:5299\"\n[rely]\n";
    let told = complaints(text, &[("POSTRIDER__STORE__ULR", "x"), ("POSTRIDER__", "x")]);
    for expected in [
        "6 things are wrong",
        "relay.leese (line 2, column 1): unknown setting; did you mean `lease`?",
        "relay.batch (line 3, column 1): expected a whole number, found a text",
        "producer.listen (line 5, column 1): `0.0.0.0:5299` can be reached from other machines",
        "rely (line 6, column 2): unknown setting; did you mean `relay`?",
        "store.ulr (POSTRIDER__STORE__ULR): unknown setting; did you mean `url`?",
        "POSTRIDER__: write it as POSTRIDER__SECTION__SETTING",
    ] {
        assert!(told.contains(expected), "{told}\n\nshould say: {expected}");
    }
}

#[test]
fn what_cannot_work_is_refused_with_what_can() {
    let cases = [
        ("[store]\nsent = \"delete\"", "only a store on PostgreSQL or MySQL has this setting"),
        ("[store]\nreplicas = 1", "only a store on Redis has this setting"),
        ("[relay]\nclaims_ttl = \"1s\"", "belongs to `claims`"),
        ("[producer]\nacknowledge_secrets = []", "name a secret"),
        ("[producer]\nacknowledge_secrets = [\"hush\"]", "at least 16 bytes"),
        ("[store]\nurl = \"ftp://x\"", "`ftp://` is not a store"),
        ("[store]\nurl = \"sqlite://\"", "name the file"),
        ("[store]\nretention = { sent = \"soon\" }", "`soon` is not a duration"),
        ("[producer]\nlisten = \"here\"", "`here` is not an address to listen on"),
        ("[producer]\nbody_limit = \"1.5MB\"", "is not a size"),
        ("[consumer]\nacknowledge_to = \"host\"", "expected a URL"),
        ("[consumer]\nacknowledge_to = { broker = \"main\" }", "needs a `topic`"),
        ("[consumer]\nacknowledge_to = { topic = \"acks\", broker = \"mian\" }", "there is no broker `mian`"),
        ("[producer]\nacknowledgements = { topic = \"a b\" }", "topic"),
        ("[producer]\nacknowledgements = { topic = \"acks\", group = \"\" }", "group"),
        ("[relay]\nlease = \"10ms\"\npoll = \"5ms\"", "10ms is too short"),
        ("[relay]\nlease = \"2s\"\npoll = \"5s\"", "5s is longer than the lease of 2s"),
        ("[relay]\nlease = 30", "expected a text in quotes, found a whole number"),
        ("[relay]\nlease = \"0s\"", "must be longer than nothing"),
        ("[relay]\nbatch = 0", "0 is not between 1 and 100000"),
        ("relay = 1", "expected a table of settings, found a whole number"),
        ("[log]\nformat = \"xml\"", "`xml` is not a choice here"),
        ("[log]\nlevel = \"a=b=c\"", "is not a log level"),
        ("[brokers.main]\nurl = \"kafak://x\"", "did you mean `kafka://`?"),
        ("[routes.a]\ntopics = [\"*\"]\nsource = \"/x\"", "only CloudEvents have a source"),
        ("[routes.a]\ntopics = [\"*\"]\ncloudevents = \"on\"", "off"),
        (
            "[routes.a]\ntopics = [\"a\"]\nsemantics = \"at-most-once\"\ncopy_to = \"b *\"",
            "cannot be a topic",
        ),
        ("[routes.a]\ntopics = [\"a\"]\nsemantics = \"at-most-once\"\ncopy_to = \"b\"", "no route takes `b`"),
        (
            "[routes.a]\ntopics = [\"*\"]\nsemantics = \"at-most-once\"\ncopy_to = \"b\"",
            "routes.a takes `b` and promises at-most-once",
        ),
        (
            "[routes.a]\ntopics = [\"a\"]\nsemantics = \"none\"\ncopy_to = \"b\"\n[routes.b]\ntopics = [\"b\"]",
            "the nearest that has copies is \"at-most-once\"",
        ),
        (
            "[routes.a]\ntopics = [\"*\"]\ncopy_to = \"b\"",
            "sent until they are confirmed: leave `copy_to` out",
        ),
        ("[brokers.main]\nurl = \"embedded://?parts=3\"", "partitions"),
        ("[brokers.main]", "needs a `url`"),
        ("[routes]", "there is no route"),
        ("[routes.a]", "name the topics that this route takes"),
        ("[routes.a]\ntopics = [\"a b\"]", "`a b` cannot be a topic pattern"),
        ("[routes.a]\ntopics = [\"*\", \"*\"]", "`*` is there twice"),
        ("[routes.a]\ntopics = [\"*\"]\n[routes.b]\ntopics = [\"*\"]", "`*` is also in routes.a"),
        ("[routes.a]\ntopics = [\"a*\"]\n[routes.b]\ntopics = [\"*b\"]", "fit `ab` equally well"),
        (
            "[routes.a]\ntopics = [\"*\"]\nbroker = \"mian\"",
            "there is no broker `mian`; did you mean `main`?",
        ),
        (
            "[consumers.g]\ntopics = [\"t\"]\nsemantics = \"best-effort\"\nhandler = { sql = \"x\" }",
            "the nearest that can is \"at-most-once\"",
        ),
        ("[consumers.g]\ntopics = [\"t\"]\nsemantics = \"none\"\nacknowledge = {}", "acknowledges to nobody"),
        ("[consumers.g]\ntopics = [\"t\"]\nsemantics = \"none\"\nreplay = \"1d\"", "recognises no duplicate"),
        (
            "[consumers.g]\ntopics = [\"t\"]\nsemantics = \"exactly-once\"",
            "log makes none; the nearest that can is \"effectively-once\"",
        ),
        (
            "[consumers.g]\ntopics = [\"t\"]\nsemantics = \"exactly-once\"\nhandler = { command = \"x\" }\nacknowledge = {}",
            "acknowledges to nobody",
        ),
        (
            "[consumers.g]\ntopics = [\"t\"]\nsemantics = \"exactly-once\"\nhandler = { command = \"x\" }\nkeep_ids = \"9d\"",
            "keeps no ids",
        ),
        ("[routes.a]\ntopics = [\"*\"]\nsemantics = \"atleastonce\"", "did you mean `at-least-once`?"),
        ("[routes.a]\ntopics = [\"*\"]\norder = \"keys\"", "did you mean `key`?"),
        (
            "[routes.a]\ntopics = [\"*\"]\nretry = { first = \"9s\", cap = \"2s\" }",
            "the cap of 2s is shorter",
        ),
        ("[routes.a]\ntopics = [\"*\"]\nretry = { max_atempts = 3 }", "did you mean `max_attempts`?"),
        ("[consumers.\"a b\"]\ntopics = [\"t\"]", "`a b` cannot be a consumer group"),
        ("[consumers.g]\ntopics = [\"t*\"]", "one by one, without *"),
        ("[consumers.g]\ntopics = [\"t\", \"t\"]", "`t` is there twice"),
        ("[consumers.g]\ntopics = 3", "expected a list of texts"),
        ("[consumers.g]\ntopics = [\"t\"]\ndedup = \"memory\"", "is not a way to recognise duplicates"),
        ("[consumers.g]\ntopics = [\"t\"]\nhandler = { script = \"x\" }", "scripts run in Redis"),
        (
            "[consumers.g]\ntopics = [\"t\"]\nkeep_ids = \"3d\"",
            "3d is too short: routes.default may send a message again for 3d",
        ),
        (
            "[consumers.g]\ntopics = [\"t\"]\nacknowledge = { timeout = \"8h\", max_redeliveries = 5 }",
            "for 5d 3m (retry.give_up_after, acknowledge)",
        ),
        (
            "[consumers.g]\ntopics = [\"t\"]\nacknowledge = { timeout = \"1d\" }\nkeep_ids = \"30d\"\n[consumers.h]\ntopics = [\"t\"]",
            "consumers.h.keep_ids",
        ),
        (
            "[consumers.g]\ntopics = [\"t\"]\nacknowledge = { every = \"8h\" }",
            "what can be set here is timeout",
        ),
        ("[consumers.g]\ntopics = [\"t\"]\nacknowledge = \"8h\"", "expected"),
        (
            "[consumers.g]\ntopics = [\"t\"]\nsemantics = \"at-most-once\"\nacknowledge = {}",
            "the group promises at-most-once",
        ),
        (
            "[routes.r]\ntopics = [\"t\"]\nsemantics = \"at-most-once\"\nwhy = \"w\"\n[consumers.g]\ntopics = [\"t\"]\nacknowledge = {}",
            "routes.r promises at-most-once, so nothing of it is sent again",
        ),
        ("[consumers.g]\ntopics = [\"t\"]\nhandler = { log = true, sql = \"x\" }", "choose one of"),
        ("[consumers.g]\ntopics = [\"t\"]\nhandler = {}", "choose one of"),
        ("[consumers.g]\ntopics = [\"t\"]\nhandler = { log = false }", "choose one of"),
        ("[consumers.g]\ntopics = [\"t\"]\nhandler = { http = \"nowhere\" }", "expected a URL"),
        ("[consumers.g]\ntopics = [\"t\"]\nhandler = { command = [] }", "name a program"),
        (
            "[consumers.g]\ntopics = [\"t\"]\nhandler = { log = true, timeout = \"1s\" }",
            "only http and command handlers",
        ),
    ];
    for (text, expected) in cases {
        let told = complaints(text, &[]);
        assert!(told.contains(expected), "{text}\n\ntold: {told}\n\nshould say: {expected}");
        assert!(!told.contains("things are wrong"), "one mistake, one complaint: {told}");
    }
}

#[cfg(not(feature = "postgres"))]
#[test]
fn a_store_that_is_not_in_this_build_is_refused_with_the_feature_that_has_it() {
    let told = complaints("[store]\nurl = \"postgres://ann:hush@localhost/x\"", &[]);
    assert!(told.contains("build with `--features postgres`") && !told.contains("hush"), "{told}");
}

#[cfg(feature = "redis")]
#[test]
fn what_recognises_duplicates_must_fit_the_store_and_the_handler() {
    const GROUP: &str = "[consumers.g]\ntopics = [\"t\"]";
    let cases = [
        (format!("{GROUP}\ndedup = \"hybrid\""), "needs a Redis"),
        (
            format!(
                "[consumer]\nredis = \"redis://h\"\n{GROUP}\ndedup = \"redis\"\nhandler = {{ sql = \"x\" }}"
            ),
            "would be in Redis: a crash between",
        ),
        (format!("[store]\nurl = \"redis://h\"\n{GROUP}\nhandler = {{ sql = \"x\" }}"), "which has no SQL"),
        (format!("[store]\nurl = \"redis://h\"\n{GROUP}\ndedup = \"hybrid\""), "use \"redis\""),
        (
            "[store]\nurl = \"redis://h\"\naccept_loss = \"yes\"".to_owned(),
            "I accept that messages may be lost",
        ),
        (
            "[store]\nurl = \"redis://h\"\n[relay]\nclaims = \"redis://h\"".to_owned(),
            "keeps locks and attempts already",
        ),
    ];
    for (text, expected) in cases {
        let told = complaints(&text, &[]);
        assert!(told.contains(expected), "{text}\n\ntold: {told}\n\nshould say: {expected}");
    }
}

#[test]
fn a_group_on_another_broker_than_its_topics_is_refused() {
    let text = r#"
        [brokers.a]
        url = "embedded://a.db"
        [brokers.b]
        url = "embedded://b.db"
        [routes.default]
        topics = ["*"]
        broker = "a"
        [consumers.g]
        topics = ["t"]
        broker = "b"
    "#;
    assert!(complaints(text, &[]).contains("it would never hear of it"));
}

#[test]
fn a_handler_outside_the_transaction_is_warned_about_until_somebody_says_that_it_may_run_twice() {
    let text = |idempotent: bool| {
        format!(
            "[routes.default]\ntopics = [\"*\"]\nidempotent = {idempotent}\n\
             [consumers.g]\ntopics = [\"t\"]\nhandler = {{ http = \"http://127.0.0.1:9\" }}"
        )
    };
    let warnings = loaded(&text(false), &[]).expect("works").warnings;
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].to_string().contains("idempotent = true in routes.default"));
    assert!(loaded(&text(true), &[]).expect("works").warnings.is_empty());
}

#[test]
fn acknowledgements_that_anybody_may_write_are_warned_about_until_they_must_be_proven() {
    let text = |url: &str, secrets: &str| {
        format!(
            "[producer]\n{secrets}\nacknowledgements = {{ topic = \"done\", broker = \"far\" }}\n\
             [brokers.far]\nurl = \"{url}\"\n[consumers]\n"
        )
    };
    let warnings = |url: &str, secrets: &str| loaded(&text(url, secrets), &[]).expect("works").warnings;
    let told = warnings("https://example.com/in", "");
    assert_eq!(told.len(), 1, "{told:?}");
    let told = told[0].to_string();
    for words in ["producer.acknowledgements", "write to `done` on `far`", "producer.acknowledge_secrets"] {
        assert!(told.contains(words), "{words}: {told}");
    }
    assert!(warnings("https://example.com/in", "acknowledge_secrets = [\"0123456789abcdef\"]").is_empty());
    assert!(warnings("embedded://", "").is_empty(), "who can write there can write to the store");
}

#[test]
fn the_settings_of_the_manual_are_good() {
    let manual = include_str!("../../../../../examples/config/postrider.toml");
    let loaded = loaded(manual, &[]).expect("good settings");
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
}

#[test]
fn the_settings_of_the_two_services_are_good() {
    let services = include_str!("../../../../../examples/config/two-services.toml");
    let config = loaded(services, &[]).expect("good settings").config;
    assert_eq!((config.relay.batch, config.relay.poll.as_secs()), (100, 5));
    assert_eq!(config.routes["default"].retry.max_attempts, 3);
}
