//! Every command, on a real store.

#![cfg(unix)]

mod harness;

use harness::Folder;
use serde_json::Value;

/// A broker that takes hardly anything: what is larger is dead at once.
const NARROW: &str = "[brokers.main]\nurl = \"embedded://?max_payload=40B\"\n";

/// A folder with three dead letters: two of key `a` on `order-events`, where the second waits for the first until it is
/// discarded, and one of key `b` on `user-events`.
fn with_dead_letters() -> (Folder, Vec<String>) {
    let folder = Folder::with(&format!("{NARROW}[routes.default]\ntopics = [\"*\"]\non_dead = \"skip\"\n"));
    let large = format!("\"{}\"", "x".repeat(64));
    let sent = |topic: &str, key: &str| {
        let answer = folder.json(&["send", topic, &large, "--key", key, "--type", "Large"]);
        answer["messageId"].as_str().expect("an id").to_owned()
    };
    let ids = vec![sent("order-events", "a"), sent("order-events", "a"), sent("user-events", "b")];
    let mut server = folder.serve(&["--only", "producer,relay"]);
    server.until(&format!("{}/api/dead", server.producer), |page| {
        page["items"].as_array().is_some_and(|items| items.len() == 3)
    });
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
    (folder, ids)
}

#[test]
fn a_message_is_sent_listed_and_shown() {
    let folder = Folder::new();
    let send = folder.run(&[
        "send",
        "user-events",
        "A user came",
        "--key",
        "7",
        "--type",
        "UserCame",
        "--header",
        "a=b",
    ]);
    send.answered(&[]);
    let id = send.out.trim();
    folder.run(&["status", id]).answered(&[
        id,
        "Pending",
        "user-events",
        "UserCame",
        "\"A user came\"",
        "a: b",
        "not yet",
    ]);
    folder.run(&["list"]).answered(&["MESSAGE", id, "Pending", "ago)"]);
    folder.run(&["status"]).answered(&["PENDING", "no relay is running", "default-consumer-group"]);
    let view = folder.json(&["status", id]);
    assert_eq!((view["messageId"].as_str(), view["payload"].as_str()), (Some(id), Some("A user came")));
    assert_eq!(folder.json(&["status"])["counts"]["pending"], 1);
}

#[test]
fn a_message_is_json_a_text_a_file_or_the_input() {
    let folder = Folder::new();
    folder.write("order.json", "{ \"order\": 12345678901234567890123 }");
    let payload = |id: &str| folder.run(&["status", id.trim()]).out;
    let json = folder.run(&["send", "t", "{\"a\": 1}"]).out;
    assert!(payload(&json).contains("{\"a\": 1}"));
    let text = folder.run(&["send", "t", "{\"a\": 1}", "--text"]).out;
    assert!(payload(&text).contains(r#""{\"a\": 1}""#));
    let file = folder.run(&["send", "t", "@order.json"]).out;
    assert!(payload(&file).contains("12345678901234567890123"), "digits are not lost");
    let input = folder.run_with(&["send", "t", "-"], "from a pipe").out;
    assert!(payload(&input).contains("\"from a pipe\""));
    folder.run(&["send", "t", "@nowhere"]).failed(2, &["cannot read nowhere"]);
}

#[test]
fn a_repeated_send_with_a_key_writes_once_and_another_under_the_key_is_refused() {
    let folder = Folder::new();
    let once = |message: &str| folder.run(&["send", "t", message, "--idempotency-key", "order-1"]);
    let first = once("1");
    let second = once("1");
    assert_eq!((first.code, second.code), (0, 0));
    assert_eq!(first.out, second.out);
    assert!(second.err.contains("nothing was written now"), "{second:?}");
    once("2").failed(4, &["Idempotency-Key"]);
    assert_eq!(folder.json(&["status"])["counts"]["pending"], 1);
    let by_content = || folder.run(&["send", "t", "[3]", "--id-from", "content"]).out;
    assert_eq!(by_content(), by_content());
    let by_field =
        |note: &str| folder.run(&["send", "t", &format!("{{\"a\": 1, \"note\": {note}}}"), "--id-from", "a"]);
    assert_eq!(by_field("1").code, 0);
    by_field("2").failed(4, &["different request"]);
}

#[test]
fn what_cannot_be_sent_is_refused_and_nothing_is_written() {
    let folder = Folder::with("[routes.orders]\ntopics = [\"order-*\"]\n[producer]\nbody_limit = \"100B\"\n");
    let cases: [(&[&str], &str); 8] = [
        (&["send", "users", "1"], "No route takes the topic `users`"),
        (&["send", "order events", "1"], "cannot be a topic"),
        (&["send", "order-x", &"x".repeat(200)], "the limit is 100"),
        (&["send", "order-x", "1", "--key", "a\nb"], "control character"),
        (&["send", "order-x", "1", "--header", "a b=c"], "header name"),
        (&["send", "order-x", "1", "--header", "novalue"], "name=value"),
        (&["send", "order-x", "1", "--id", "seven"], "UUID"),
        (&["send", "order-x", "1", "--group", "nobody"], "consumer group"),
    ];
    for (arguments, words) in cases {
        folder.run(arguments).failed(2, &[words]);
    }
    assert_eq!(folder.json(&["status"])["counts"]["pending"], 0);
}

#[test]
fn a_list_is_filtered_and_paged() {
    let folder = Folder::new();
    for number in 0..5 {
        let topic = if number % 2 == 0 { "even" } else { "odd" };
        folder.run(&["send", topic, &number.to_string(), "--key", "k"]).answered(&[]);
    }
    let payloads = |page: &Value| -> Vec<i64> {
        page["items"].as_array().expect("items").iter().filter_map(|item| item["payload"].as_i64()).collect()
    };
    assert_eq!(payloads(&folder.json(&["list"])), [4, 3, 2, 1, 0]);
    assert_eq!(payloads(&folder.json(&["list", "--oldest-first", "--topic", "odd"])), [1, 3]);
    assert_eq!(payloads(&folder.json(&["list", "--status", "dead,sent"])), [0; 0]);
    let first = folder.json(&["list", "--limit", "2"]);
    let next = first["next"].as_str().expect("there is more");
    assert_eq!(payloads(&folder.json(&["list", "--limit", "2", "--after", next])), [2, 1]);
    let shown = folder.run(&["list", "--limit", "2"]);
    assert!(shown.err.contains("more with --after"), "{shown:?}");
    folder.run(&["list", "--limit", "0"]).failed(2, &["use 1 to 1000"]);
    folder.run(&["list", "--status", "lost"]).failed(2, &["is not a status"]);
    folder.run(&["list", "--group", "nobody"]).failed(3, &["nobody"]);
}

#[test]
fn questions_about_what_is_not_there_say_so_by_exit_code() {
    let folder = Folder::new();
    folder.run(&["status"]).failed(5, &["there is no store at postrider-data/postrider.db yet"]);
    folder.run(&["migrate"]).answered(&["applied 1"]);
    folder.run(&["status", "not-an-id"]).failed(2, &["is not a message id"]);
    folder.run(&["status", "019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e55"]).failed(3, &["No message has the id"]);
    folder
        .run(&["dead", "show", "019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e55"])
        .failed(3, &["No message has the id"]);
    let alive = folder.run(&["send", "t", "1"]).out;
    folder.run(&["dead", "requeue", alive.trim()]).failed(4, &["is Pending"]);
    folder.run(&["nonsense"]).failed(2, &["nonsense"]);
    folder.run(&["dead", "requeue"]).failed(2, &[]);
    folder.run(&["dead", "requeue", "--all", "--topic", "t"]).failed(2, &[]);
}

#[test]
fn dead_letters_are_listed_shown_requeued_and_discarded() {
    let (folder, ids) = with_dead_letters();
    folder.run(&["dead", "list"]).answered(&[&ids[0], &ids[1], &ids[2], "DEAD BECAUSE", "Large"]);
    folder.run(&["dead", "list", "--topic", "user-events"]).answered(&[&ids[2]]);
    folder.run(&["dead", "show", &ids[0]]).answered(&["Dead", "last error", "TRIED", "40"]);
    assert_eq!(folder.json(&["dead", "show", &ids[0]])["message"]["status"], "Dead");

    folder.run(&["dead", "requeue", "--all", "--dry-run"]).answered(&["3 would be requeued"]);
    assert_eq!(folder.json(&["status"])["counts"]["dead"], 3);
    folder.run(&["dead", "requeue", "--topic", "order-events"]).answered(&["2 of 2 requeued"]);
    folder.run(&["dead", "discard", &ids[2], "--dry-run"]).answered(&["1 would be discarded"]);
    folder.run(&["dead", "discard", "--key", "b"]).answered(&["1 of 1 discarded"]);
    folder.run(&["status", &ids[2]]).failed(3, &[]);
    let counts = &folder.json(&["status"])["counts"];
    assert_eq!((counts["dead"].as_u64(), counts["pending"].as_u64()), (Some(0), Some(2)));
    let none = folder.run(&["dead", "list"]);
    assert!(none.code == 0 && none.err.contains("no dead letters"), "{none:?}");
}

#[test]
fn some_of_several_ids_can_fail_and_the_rest_is_done() {
    let (folder, ids) = with_dead_letters();
    let unknown = "019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e55";
    let run = folder.run(&["dead", "requeue", &ids[0], unknown, &ids[2]]);
    run.failed(3, &[unknown]);
    assert!(run.out.contains("2 requeued"), "{run:?}");
}

#[test]
fn a_dead_letter_is_mended_and_arrives() {
    let (folder, ids) = with_dead_letters();
    folder.run(&["dead", "edit", &ids[0]]).failed(2, &["say what to change"]);
    folder
        .run(&["dead", "edit", &ids[0], "--payload", "{broken"])
        .failed(2, &["not JSON", "--content-type text/plain"]);
    folder.run(&["dead", "edit", &ids[0], "--payload", "\"short\""]).answered(&["mended and requeued"]);
    folder.write("plain.txt", "plain");
    let plain = [
        "dead",
        "edit",
        &ids[1],
        "--payload",
        "@plain.txt",
        "--content-type",
        "text/plain",
        "--header",
        "x=y",
    ];
    folder.run(&plain).answered(&["mended and requeued"]);
    let server = folder.serve(&[]);
    for (id, payload) in [(&ids[0], "short"), (&ids[1], "plain")] {
        let url = format!("{}/api/messages/status/{id}", server.producer);
        let view = server.until(&url, |view| !view["acknowledgements"][0]["acknowledgedAt"].is_null());
        assert_eq!((view["status"].as_str(), view["payload"].as_str()), (Some("Sent"), Some(payload)));
    }
}

#[test]
fn what_a_handler_gave_up_is_seen_and_mended_in_the_inbox_of_its_group() {
    let folder = Folder::with(
        "[routes.default]\ntopics = [\"*\"]\nidempotent = true\n\
         [consumers.picky]\ntopics = [\"t\"]\nhandler = { command = [\"sh\", \"-c\", \"test -e ready || exit 65\"] }\n",
    );
    let id = folder.run(&["send", "t", "1"]).out.trim().to_owned();
    let server = folder.serve(&[]);
    let kept = format!("{}/api/consumer/parked/picky", server.consumer);
    server.until(&kept, |page| page["items"][0]["dead"] == true);
    folder.run(&["dead", "list", "--group", "picky"]).answered(&[&id, "yes"]);
    folder.run(&["dead", "show", &id, "--group", "picky"]).answered(&[&id, "picky", "payload"]);
    folder.run(&["dead", "list", "--group", "nobody"]).failed(3, &["nobody"]);
    folder.write("ready", "");
    folder.run(&["dead", "requeue", &id, "--group", "picky"]).answered(&["1 requeued"]);
    server.until(&format!("{}/api/consumer/processed/picky", server.consumer), |page| {
        page["items"][0]["messageId"] == id.as_str()
    });
}

#[test]
fn lanes_are_shown_and_set() {
    let folder = Folder::new();
    folder.run(&["migrate"]).answered(&[]);
    let before = folder.json(&["lanes"])["count"].as_u64().expect("a number");
    folder.run(&["lanes"]).answered(&["LANE", "EPOCH", "OWNER"]);
    folder.run(&["lanes", "set", "3"]).failed(2, &["not a power of two"]);
    let asked = if before == 8 { "4" } else { "8" };
    folder.run(&["lanes", "set", asked]).answered(&[&format!("there are {asked} lanes now")]);
    assert_eq!(folder.json(&["lanes"])["count"].to_string(), asked);
}

#[test]
fn lanes_can_be_changed_while_a_relay_runs() {
    let folder = Folder::with("[relay]\nlease = \"3s\"\n");
    let server = folder.serve(&[]);
    server.until(&format!("{}/api/lanes", server.producer), |view| !view["lanes"][0]["owner"].is_null());
    folder.run(&["lanes", "set", "4"]).answered(&["as soon as the running relays have drained"]);
    server.until(&format!("{}/api/lanes", server.producer), |view| {
        view["count"] == 4 && !view["lanes"][0]["owner"].is_null()
    });
    server
        .post(&format!("{}/api/messages/send", server.producer), r#"{"topic": "user-events", "message": 1}"#);
    server.until(&format!("{}/api/consumer/processed/default-consumer-group", server.consumer), |page| {
        page["items"].as_array().is_some_and(|items| items.len() == 1)
    });
}

#[test]
fn the_schema_is_printed_applied_and_known() {
    let folder = Folder::new();
    folder.run(&["schema", "--print"]).answered(&["CREATE TABLE", "outbox_events"]);
    folder.run(&["schema"]).answered(&["run `postrider migrate`"]);
    folder.run(&["migrate", "--dry-run"]).answered(&["would apply 1: outbox"]);
    assert!(!folder.path().join("postrider-data").exists(), "a dry run must not leave a database behind");
    folder.run(&["migrate"]).answered(&["applied 1: outbox"]);
    folder.run(&["migrate"]).answered(&["is up to date"]);
    assert_eq!(folder.json(&["schema"])["steps"][0]["applied"], true);
}

#[test]
fn completions_help_and_version_are_answered() {
    let folder = Folder::with("broken = ");
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        folder.run(&["completions", shell]).answered(&["postrider"]);
    }
    folder.run(&["--help"]).answered(&["Exit codes:", "serve", "dead", "completions"]);
    folder.run(&["dead", "requeue", "--help"]).answered(&["--dry-run", "--all"]);
    folder.run(&["--version"]).answered(&[env!("CARGO_PKG_VERSION")]);
}

#[test]
fn there_is_no_colour_where_nobody_sees_it() {
    let folder = Folder::new();
    folder.run(&["send", "t", "1"]).answered(&[]);
    assert!(!folder.run(&["list"]).out.contains('\u{1b}'));
}
