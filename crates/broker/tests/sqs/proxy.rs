//! Somebody between us and SQS who changes what is asked and what is answered.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What is done to an answer.
pub(super) type Edit = Box<dyn FnOnce(&mut Answer) + Send>;

/// Sees the operation and what is asked, changes it, and says what is done to the answer.
pub(super) type Meddle = dyn Fn(&str, &mut Value) -> Edit + Send + Sync;

/// What SQS answers.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Value,
}

/// Starts one in front of `endpoint`; its own endpoint is returned. It lives as long as the test.
pub(super) async fn start(endpoint: &str, meddle: Arc<Meddle>) -> String {
    let server = endpoint.trim_start_matches("http://").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("it listens");
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (server, meddle) = (server.clone(), Arc::clone(&meddle));
            // A client that goes away in between is none of our business.
            tokio::spawn(async move { serve(client, &server, &*meddle).await });
        }
    });
    format!("http://{address}")
}

async fn serve(mut client: TcpStream, server: &str, meddle: &Meddle) -> std::io::Result<()> {
    let mut unread = Vec::new();
    while let Some((head, body)) = message(&mut client, &mut unread).await? {
        let target = header(&head, "x-amz-target").expect("every request names its operation").to_owned();
        let mut asked: Value = serde_json::from_slice(&body).expect("requests are JSON");
        let edit = meddle(target.trim_start_matches("AmazonSQS."), &mut asked);
        let nothing = asked["Entries"].as_array().is_some_and(Vec::is_empty);
        let mut answer = match nothing {
            // SQS would refuse a batch of nothing.
            true => Answer { status: 200, body: json!({ "Successful": [], "Failed": [] }) },
            false => ask(server, &target, &asked).await?,
        };
        edit(&mut answer);
        let body = answer.body.to_string();
        let head = format!(
            "HTTP/1.1 {} -\r\ncontent-type: application/x-amz-json-1.0\r\ncontent-length: {}\r\n\r\n",
            answer.status,
            body.len()
        );
        client.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await?;
    }
    Ok(())
}

async fn ask(server: &str, target: &str, asked: &Value) -> std::io::Result<Answer> {
    let mut stream = TcpStream::connect(server).await?;
    let body = asked.to_string();
    let head = format!(
        "POST / HTTP/1.1\r\nhost: {server}\r\nx-amz-target: {target}\r\ncontent-type: application/x-amz-json-1.0\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await?;
    let (head, body) = message(&mut stream, &mut Vec::new()).await?.expect("there is an answer");
    let status =
        head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("an answer has a status");
    Ok(Answer { status, body: serde_json::from_slice(&body).unwrap_or_else(|_| json!({})) })
}

/// The next request or answer: its head and its body.
async fn message(stream: &mut TcpStream, unread: &mut Vec<u8>) -> std::io::Result<Option<(String, Vec<u8>)>> {
    loop {
        if let Some(end) = unread.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&unread[..end]).into_owned();
            let length =
                header(&head, "content-length").map_or(0, |length| length.parse().expect("a number"));
            if unread.len() >= end + 4 + length {
                let rest = unread.split_off(end + 4 + length);
                let body = std::mem::replace(unread, rest).split_off(end + 4);
                return Ok(Some((head, body)));
            }
        }
        if stream.read_buf(unread).await? == 0 {
            return Ok(None);
        }
    }
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut headers = head.lines().filter_map(|line| line.split_once(':'));
    headers.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}
