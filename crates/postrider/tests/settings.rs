//! Settings, right and wrong, as the command meets them.

mod harness;

use harness::Folder;

#[test]
fn without_a_file_the_built_in_settings_are_good() {
    let folder = Folder::new();
    folder.run(&["config", "check"]).answered(&["built-in settings: good"]);
    assert!(!folder.path().join("postrider-data").exists(), "a question must not leave a database behind");
}

#[test]
fn the_usual_file_the_named_file_and_the_variable_are_found() {
    let folder = Folder::with("[relay]\nbatch = 11\n");
    folder.write("other.toml", "[relay]\nbatch = 22\n");
    folder.write("third.toml", "[relay]\nbatch = 33\n");
    assert_eq!(folder.json(&["config", "show"])["relay"]["batch"], 11);
    let folder = folder.variable("POSTRIDER_CONFIG", "other.toml");
    assert_eq!(folder.json(&["config", "show"])["relay"]["batch"], 22);
    assert_eq!(folder.json(&["--config", "third.toml", "config", "show"])["relay"]["batch"], 33);
    folder
        .run(&["--config", "nowhere.toml", "config", "check"])
        .failed(2, &["nowhere.toml", "there is no such file"]);
}

#[test]
fn variables_go_over_the_file() {
    let folder = Folder::with("[relay]\nbatch = 11\n")
        .variable("POSTRIDER__RELAY__BATCH", "12")
        .variable("POSTRIDER__ROUTES__DEFAULT__RETRY__MAX_ATTEMPTS", "3")
        .variable("POSTRIDER__CONSUMERS__analytics-group__KEEP_IDS", "9d");
    let shown = folder.json(&["config", "show"]);
    assert_eq!(shown["relay"]["batch"], 12);
    assert_eq!(shown["routes"]["default"]["retry"]["max_attempts"], 3);
    assert_eq!(shown["consumers"]["analytics-group"]["keep_ids"], "9d");
    folder.run(&["config", "check"]).answered(&["postrider.toml: good", "POSTRIDER__RELAY__BATCH"]);
}

#[test]
fn every_mistake_is_told_with_its_place_and_nothing_is_opened() {
    let folder = Folder::with("[relay]\nleese = \"30s\"\n[producer]\nlisten = \"0.0.0.0:80\"\n")
        .variable("POSTRIDER__STORE__ULR", "x");
    for command in [&["serve"][..], &["config", "check"], &["status"], &["send", "t", "m"], &[]] {
        folder.run(command).failed(
            2,
            &[
                "3 things are wrong",
                "relay.leese (line 2, column 1): unknown setting; did you mean `lease`?",
                "producer.listen (line 4, column 1): `0.0.0.0:80` can be reached from other machines",
                "store.ulr (POSTRIDER__STORE__ULR): unknown setting; did you mean `url`?",
            ],
        );
    }
    assert!(!folder.path().join("postrider-data").exists());
}

#[test]
fn what_no_broker_can_keep_is_refused_by_whoever_is_asked_and_nothing_is_made() {
    let folder = Folder::with(
        "[brokers.hook]\nurl = \"https://example.com/hook\"\n\
         [routes.once]\ntopics = [\"x\"]\nsemantics = \"exactly-once\"\n[consumers]\n",
    );
    let told =
        ["routes.once.semantics", "cannot be had of `hook`", "the nearest that can is \"effectively-once\""];
    for command in [&["config", "check"][..], &["contract"], &["serve"]] {
        folder.run(command).failed(2, &told);
    }
    assert!(!folder.path().join("postrider-data").exists());
}

#[test]
fn what_is_not_toml_is_told_by_line() {
    Folder::with("[relay]\nlease = \n").run(&["config", "check"]).failed(2, &["line 2", "not TOML"]);
}

#[test]
fn a_script_hears_of_mistakes_in_json() {
    let run = Folder::with("[relay]\nbatch = 0\n").run(&["--json", "config", "check"]);
    run.failed(2, &["bad-settings"]);
    let error: serde_json::Value = serde_json::from_str(&run.err).expect("JSON on standard error");
    assert_eq!(error["error"]["exit"], 2);
}

#[test]
fn secrets_are_not_shown() {
    let folder = Folder::with(
        "[consumer]\nacknowledge_to = \"http://ann:hush@127.0.0.1:1\"\n[routes.default]\ntopics = [\"*\"]\nidempotent = true\n\
         [consumers.g]\ntopics = [\"t\"]\nhandler = { http = \"http://127.0.0.1:9/?token=hush\" }\n",
    );
    for run in [folder.run(&["config", "show"]), folder.run(&["--json", "config", "show"])] {
        run.answered(&["ann:***@", "9/?***"]);
        assert!(!run.out.contains("hush"), "{run:?}");
    }
}

#[test]
fn what_is_shown_is_a_file_that_loads() {
    let folder = Folder::new();
    let shown = folder.run(&["config", "show"]).out;
    folder.write("shown.toml", &shown);
    assert_eq!(folder.run(&["--config", "shown.toml", "config", "show"]).out, shown);
}

#[test]
fn a_handler_that_may_run_twice_is_warned_about() {
    let folder = Folder::with("[consumers.g]\ntopics = [\"t\"]\nhandler = { command = \"true\" }\n");
    folder.run(&["config", "check"]).answered(&["good", "warning: consumers.g.handler", "idempotent = true"]);
}

#[test]
fn the_example_files_are_good() {
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/config");
    for entry in std::fs::read_dir(examples).expect("there are examples") {
        let path = entry.expect("readable").path();
        let path = path.to_str().expect("a plain name");
        let run = Folder::new().run(&["--config", path, "config", "check"]);
        run.answered(&["good"]);
        assert!(!run.out.contains("warning"), "{run:?}");
    }
}

#[test]
fn routes_and_groups_are_shown() {
    let folder = Folder::with(
        "[routes.orders]\ntopics = [\"order-*\"]\nwhy = \"money moves\"\n[consumers.billing]\ntopics = [\"order-events\"]\n",
    );
    folder.run(&["routes"]).answered(&["orders", "order-*", "effectively-once", "money moves", "billing"]);
    let routes = folder.json(&["routes"]);
    assert_eq!(routes["routes"][0]["name"], "orders");
    assert_eq!(routes["consumers"][0]["group"], "billing");
}

#[test]
fn a_command_written_as_one_text_is_split_at_spaces_but_not_within_quotes() {
    let folder =
        Folder::with("[consumers.g]\ntopics = [\"t\"]\nhandler = { command = \"sh -c 'cat > a'\" }\n");
    let shown = folder.run(&["config", "show"]);
    assert!(shown.out.contains("[\"sh\", \"-c\", \"cat > a\"]"), "{}", shown.out);
    let folder = Folder::with("[consumers.g]\ntopics = [\"t\"]\nhandler = { command = \"sh -c 'cat\" }\n");
    let refused = folder.run(&["config", "check"]);
    assert!(refused.err.contains("consumers.g.handler.command"), "{}", refused.err);
}

#[test]
fn the_contract_says_what_is_promised_by_what_and_what_remains() {
    let folder = Folder::with(
        "[routes.orders]\ntopics = [\"order-*\"]\nwhy = \"money moves\"\nretry = { max_attempts = 7 }\n\
         [consumers.billing]\ntopics = [\"order-events\"]\nhandler = { command = [\"true\"] }\n",
    );
    folder.run(&["send", "order-events", "1"]).answered(&[]);
    let contract = folder.json(&["contract"]);
    let (route, group) = (&contract["routes"][0], &contract["consumers"][0]);
    assert_eq!((&route["semantics"], &route["why"]), (&"effectively-once".into(), &"money moves".into()));
    assert_eq!(route["settings"]["retry.max_attempts"], "7");
    assert_eq!(group["settings"]["handler"], "command");
    assert_eq!(group["semantics"], "at-least-once", "nobody said that doing it again changes nothing");
    for (part, name) in [(route, "orders"), (group, "billing")] {
        assert_eq!(part["name"], name);
        for section in ["promises", "mechanisms", "loss", "duplicates", "needs"] {
            assert!(part[section].as_array().is_some_and(|lines| !lines.is_empty()), "{name}: {section}");
        }
    }
    folder.run(&["contract"]).answered(&["STORE", "ROUTE orders", "money moves", "twice", "GROUP billing"]);
    folder.run(&["contract", "--markdown"]).answered(&[
        "## Route `orders`",
        "**effectively-once, because: money moves**",
        "- retry.max_attempts = 7",
        "## Group `billing`",
    ]);
    let idempotent = Folder::with(
        "[routes.orders]\ntopics = [\"order-*\"]\nidempotent = true\n\
         [consumers.billing]\ntopics = [\"order-events\"]\nhandler = { command = [\"true\"] }\n",
    );
    idempotent.run(&["migrate"]).answered(&[]);
    assert_eq!(idempotent.json(&["contract"])["consumers"][0]["semantics"], "effectively-once");
    let heard = Folder::with("[producer]\nacknowledgements = { topic = \"done\", group = \"shop\" }\n");
    heard.run(&["migrate"]).answered(&[]);
    heard.run(&["contract"]).answered(&["the topic `done` of `main`", "the group `shop`", "is believed"]);
    let copied = Folder::with(
        "[routes.alarms]\ntopics = [\"alarms\"]\nsemantics = \"at-most-once\"\ncopy_to = \"record\"\n\
         [routes.all]\ntopics = [\"*\"]\n[consumers]\n",
    );
    copied.run(&["migrate"]).answered(&[]);
    copied
        .run(&["contract"])
        .answered(&["a copy of it on `record` is sent until it is confirmed", "copy_to"]);
}

#[test]
fn a_route_that_is_advised_is_accepted_as_it_stands() {
    let folder = Folder::new();
    let answers = ["--lost", "no", "--twice", "no", "--kafka", "no", "--idempotent", "yes"];
    let advice = folder.json(&[&["advise", "--topic", "payments"], &answers[..]].concat());
    assert_eq!(advice["semantics"], "effectively-once");
    let accepted = Folder::with(advice["route"].as_str().expect("a route"));
    accepted.run(&["routes"]).answered(&["payments", "effectively-once", "must not be lost"]);
    folder
        .run(&["advise", "--lost", "yes", "--once", "yes"])
        .answered(&["at-most-once", "semantics = \"at-most-once\""]);
    folder.run(&["advise", "--lost", "no"]).failed(2, &["--twice yes or --twice no"]);
    folder.run(&["advise", "--lost", "perhaps"]).failed(2, &["answer yes or no"]);
}

/// Answers that lead to each of the promises.
const ANSWERS: [(&str, &[&str]); 6] = [
    ("none", &["--lost", "yes", "--once", "no", "--matters", "no"]),
    ("best-effort", &["--lost", "yes", "--once", "no", "--matters", "yes"]),
    ("at-most-once", &["--lost", "yes", "--once", "yes"]),
    ("at-least-once", &["--lost", "no", "--twice", "yes"]),
    ("effectively-once", &["--lost", "no", "--twice", "no", "--kafka", "no", "--idempotent", "yes"]),
    ("exactly-once", &["--lost", "no", "--twice", "no", "--kafka", "yes"]),
];

/// What is advised for `topic` to whoever has `settings`, and what else must be done, in one text; and the settings that
/// `settings` with the advised route are.
#[track_caller]
fn advised(settings: &str, topic: &str, semantics: &str) -> (String, serde_json::Value) {
    let answers = ANSWERS.iter().find(|(found, _)| *found == semantics).expect("one of the six").1;
    let folder = Folder::new();
    folder.write("mine.toml", settings);
    let advice = folder.json(&[&["--config", "mine.toml", "advise", "--topic", topic], answers].concat());
    assert_eq!(advice["semantics"], semantics);
    let together = format!("{settings}\n{}", advice["route"].as_str().expect("a route"));
    let together = Folder::with(&together);
    together.run(&["config", "check"]).answered(&["good"]);
    (advice["also"].to_string(), together.json(&["config", "show"]))
}

#[test]
fn a_route_that_is_advised_names_its_broker_where_there_are_several() {
    let brokers = "[brokers.a]\nurl = \"sqs://eu-west-1\"\n[brokers.b]\nurl = \"embedded://\"\n\
                   [brokers.c]\nurl = \"kafka://10.0.0.1:9092\"\n[routes.all]\ntopics = [\"*\"]\nbroker = \"c\"\n\
                   [consumers.g]\ntopics = [\"clicks\"]\nbroker = \"b\"\n";
    for (semantics, _) in ANSWERS {
        let unheard = brokers
            .replace("\"*\"", "\"other\"")
            .replace("clicks\"]\nbroker = \"b", "other\"]\nbroker = \"c");
        let (_, settings) = advised(&unheard, "clicks", semantics);
        let first = if semantics == "exactly-once" { "c" } else { "b" };
        assert_eq!(settings["routes"]["clicks"]["broker"], first, "{semantics}: the first that fits");
        let (_, settings) = advised(&unheard, "other.topic", semantics);
        assert_eq!(settings["routes"]["other_topic"]["semantics"], semantics);
    }
    let present = brokers.replace("\"*\"", "\"x*\"");
    let (_, settings) = advised(&present, "clicks", "at-least-once");
    assert_eq!(settings["routes"]["clicks"]["broker"], "b", "where it is heard");
    let (_, settings) = advised(&present, "xyz", "at-least-once");
    assert_eq!(settings["routes"]["xyz"]["broker"], "c", "where it goes now");
}

#[test]
fn where_an_advised_route_needs_kafka_and_there_is_none_it_comes_with_it() {
    for settings in ["", "[brokers.main]\nurl = \"embedded://\"\n", "[relay]\nbatch = 10\n"] {
        let (_, settings) = advised(settings, "order-events", "exactly-once");
        assert_eq!(settings["brokers"]["kafka"]["url"], "kafka://127.0.0.1:9092");
        assert_eq!(settings["routes"]["order-events"]["broker"], "kafka");
        assert_eq!(
            settings["consumers"]["default-consumer-group"]["broker"], "kafka",
            "it hears of the topic"
        );
        assert_eq!(settings["consumers"]["analytics-group"]["broker"], "main", "it does not");
    }
    let route = Folder::new().json(&[&["advise", "--topic", "ledger"], ANSWERS[5].1].concat());
    Folder::with(route["route"].as_str().expect("a route")).run(&["config", "check"]).answered(&["good"]);

    let settings = "[brokers.kafka]\nurl = \"embedded://\"\n[brokers.b]\nurl = \"embedded://\"\n\
                    [routes.all]\ntopics = [\"*\"]\nbroker = \"b\"\n[consumers]\n";
    let (_, settings) = advised(settings, "ledger", "exactly-once");
    assert_eq!(settings["routes"]["ledger"]["broker"], "kafka-2", "the name is taken");

    let open = "[routes.all]\ntopics = [\"*\"]\n[consumers.g]\ntopics = [\"clicks\"]\n[consumers.h]\ntopics = [\"ledger\"]\n";
    let folder = Folder::with(open);
    let run = folder.run(&[&["advise", "--topic", "ledger"], ANSWERS[5].1].concat());
    run.answered(&[
        "say broker = \"main\" in routes.all, consumers.g.",
        "Say broker = \"kafka\" in consumers.h",
        "[brokers.main]\nurl = \"embedded://\"\n",
    ]);
    let advice = folder.json(&[&["advise", "--topic", "ledger"], ANSWERS[5].1].concat());
    let mended = open
        .replace("[\"*\"]", "[\"*\"]\nbroker = \"main\"")
        .replace("[\"clicks\"]", "[\"clicks\"]\nbroker = \"main\"");
    let mended = mended.replace("[\"ledger\"]", "[\"ledger\"]\nbroker = \"kafka\"");
    let mended = format!("{mended}{}", advice["route"].as_str().expect("a route"));
    Folder::with(&mended).run(&["config", "check"]).answered(&["good"]);
}

#[test]
fn what_is_advised_says_what_groups_need_and_watches_what_somebody_counts() {
    let (also, _) = advised("", "alarms", "at-most-once");
    assert!(also.contains("semantics = \\\"at-most-once\\\" as well"), "{also}");
    let (also, _) = advised("", "ledger", "exactly-once");
    assert!(also.contains("semantics = \\\"exactly-once\\\" as well"), "{also}");
    let (_, settings) = advised("", "clicks", "best-effort");
    assert_eq!(settings["routes"]["clicks"]["watch"]["window"], "5m");
    let (_, settings) = advised("", "clicks", "none");
    assert!(settings["routes"]["clicks"]["watch"].is_null(), "{settings}");
}

#[test]
fn an_advised_route_does_not_take_the_name_or_the_topic_of_another() {
    let (_, settings) = advised("[routes.clicks]\ntopics = [\"*\"]\n", "clicks", "at-least-once");
    assert_eq!(settings["routes"]["clicks"]["topics"][0], "*");
    assert_eq!(settings["routes"]["clicks-2"]["topics"][0], "clicks");
    let folder = Folder::with("[routes.all]\ntopics = [\"clicks\", \"views\"]\n");
    folder
        .run(&["advise", "--topic", "clicks", "--lost", "no", "--twice", "yes"])
        .answered(&["Take `clicks` out of routes.all"]);
}

#[test]
fn nothing_is_advised_on_answers_that_contradict_each_other() {
    let folder = Folder::new();
    for (answers, words) in [
        (
            &["--lost", "yes", "--twice", "no"][..],
            &["--twice decides nothing with --lost yes", "--lost yes --once yes"][..],
        ),
        (&["--lost", "no", "--once", "yes"], &["--once decides nothing with --lost no"]),
        (
            &["--lost", "yes", "--once", "yes", "--matters", "yes"],
            &["--matters decides nothing with --once yes"],
        ),
        (
            &["--lost", "no", "--twice", "yes", "--kafka", "yes"],
            &["--kafka decides nothing with --twice yes"],
        ),
    ] {
        folder.run(&[&["advise"], answers].concat()).failed(2, words);
    }
}
