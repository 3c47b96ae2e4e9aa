//! Writing messages: in a transaction of ours, or in one of the application's.

use std::collections::{HashMap, HashSet};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use message::{Invalid, Message, MessageId, check_topic};
use tokio_postgres::GenericClient;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::PostgresStore;
use super::connection::{Transaction, repeat};
use super::error::Trouble;
use crate::column::{groups_json, headers_json};
use crate::{Append, Appended, Error, NewMessage, Turned};

/// What becomes of each message of a call; `None` until it is known.
type Results = Vec<Option<Result<Appended, Turned>>>;

#[async_trait]
impl Append for PostgresStore {
    async fn append(&self, messages: Vec<NewMessage>) -> Result<Vec<Result<Appended, Turned>>, Error> {
        let mut results: Results =
            messages.iter().map(|new| check(new).err().map(|invalid| Err(invalid.into()))).collect();
        let sound: Vec<usize> = (0..messages.len()).filter(|place| results[*place].is_none()).collect();
        if !sound.is_empty() {
            for (place, result) in repeat(|| self.store(&messages, &sound)).await? {
                results[place] = Some(result);
            }
            self.ring();
        }
        Ok(results
            .into_iter()
            .map(|result| result.expect("every message was stored or turned away"))
            .collect())
    }
}

/// Writes `message` in the transaction that is open on `client`, for applications that use tokio-postgres or deadpool.
/// One round trip.
///
/// # Errors
/// What the driver says; a message whose id is taken violates `outbox_id`.
///
/// # Cancel safety
/// A call that is dropped may have written the message into the transaction: roll it back.
pub async fn append(client: &impl GenericClient, message: &Message) -> Result<(), tokio_postgres::Error> {
    append_for(client, &NewMessage::from(message.clone())).await
}

/// Like [`append`], naming the groups that must acknowledge. `once` is not looked at: the caller's own
/// transaction decides whether it writes.
///
/// # Errors
/// As [`append`].
///
/// # Cancel safety
/// As [`append`].
pub async fn append_for(client: &impl GenericClient, new: &NewMessage) -> Result<(), tokio_postgres::Error> {
    let message = &new.message;
    client
        .execute_typed(
            include_str!("append.sql"),
            &[
                (&message.id.0, Type::UUID),
                (&message.topic, Type::TEXT),
                (&message.kind, Type::TEXT),
                (&message.key, Type::TEXT),
                (&&message.payload[..], Type::BYTEA),
                (&message.content_type, Type::TEXT),
                (&headers_json(message), Type::TEXT),
                (&message.occurred_at, Type::TIMESTAMPTZ),
                (&new.ack_groups.as_deref().map(groups_json), Type::TEXT),
            ],
        )
        .await?;
    Ok(())
}

/// What PostgreSQL could not store: its texts have no NUL.
fn check(new: &NewMessage) -> Result<(), Invalid> {
    let message = &new.message;
    check_topic(&message.topic)?;
    let nul = |text: &str| text.contains('\0');
    for (field, text) in [
        ("key", message.key.as_deref()),
        ("type", message.kind.as_deref()),
        ("contentType", Some(message.content_type.as_str())),
    ] {
        if text.is_some_and(nul) {
            return Err(Invalid::ControlCharacter { field });
        }
    }
    if let Some((name, _)) = message.headers.iter().find(|(name, value)| nul(name) || nul(value)) {
        return Err(Invalid::HeaderValue(name.clone()));
    }
    match new.ack_groups.iter().flatten().find(|group| nul(group)) {
        Some(group) => Err(Invalid::Group(group.clone())),
        None => Ok(()),
    }
}

impl PostgresStore {
    /// Stores the messages at `places` and says what became of each.
    async fn store(
        &self,
        messages: &[NewMessage],
        places: &[usize],
    ) -> Result<Vec<(usize, Result<Appended, Turned>)>, Trouble> {
        let tx = self.connections.transaction().await?;
        let result = async {
            let begin = tx.begin();
            if places.iter().all(|place| messages[*place].once.is_none()) {
                let insert = insert(&tx, self.parted, messages, places);
                let (begun, results) = tokio::join!(biased; begin, insert);
                begun?;
                return results;
            }
            let keys = remember(&tx, messages, places);
            let (begun, remembered) = tokio::join!(biased; begin, keys);
            begun?;
            let (mut results, new) = remembered?;
            let inserted = insert(&tx, self.parted, messages, &new).await?;
            forget(&tx, messages, &inserted).await?;
            resolve(messages, &inserted, &mut results);
            results.extend(inserted);
            Ok(results)
        }
        .await;
        tx.end(result).await
    }
}

/// Takes the keys of those that have one. Answers what is known of the others by now, and the places of those to insert.
async fn remember(
    tx: &Transaction,
    messages: &[NewMessage],
    places: &[usize],
) -> Result<(Vec<(usize, Result<Appended, Turned>)>, Vec<usize>), Trouble> {
    let mut first: HashMap<&str, usize> = HashMap::new();
    for place in places {
        if let Some(once) = &messages[*place].once {
            first.entry(&once.key).or_insert(*place);
        }
    }
    // In the order of keys: two calls that take the same ones must not wait for each other.
    let mut keys: Vec<&str> = first.keys().copied().collect();
    keys.sort_unstable();
    let once = |key: &str| messages[first[key]].once.as_ref().expect("it was found by its key");
    let fingerprints: Vec<&[u8]> = keys.iter().map(|key| &once(key).fingerprint[..]).collect();
    let ids: Vec<Uuid> = keys.iter().map(|key| messages[first[key]].message.id.0).collect();
    let taken = tx
        .query(
            "INSERT INTO outbox_idempotency_keys (key, fingerprint, message_id, created_at)
             SELECT k.*, clock_timestamp() FROM unnest($1::text[], $2::bytea[], $3::uuid[]) AS k
             ON CONFLICT (key) DO NOTHING RETURNING key",
            &[(&keys, Type::TEXT_ARRAY), (&fingerprints, Type::BYTEA_ARRAY), (&ids, Type::UUID_ARRAY)],
        )
        .await?;
    let taken: HashSet<String> = taken.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
    let earlier: Vec<&str> = keys.iter().copied().filter(|key| !taken.contains(*key)).collect();
    let mut known: HashMap<String, (MessageId, Vec<u8>)> = HashMap::new();
    if !earlier.is_empty() {
        let rows = tx
            .query(
                "SELECT key, message_id, fingerprint FROM outbox_idempotency_keys WHERE key = ANY ($1)",
                &[(&earlier, Type::TEXT_ARRAY)],
            )
            .await?;
        for row in rows {
            known.insert(row.try_get(0)?, (MessageId(row.try_get(1)?), row.try_get(2)?));
        }
    }
    let mut results = Vec::new();
    let mut new = Vec::new();
    for place in places {
        let Some(once) = &messages[*place].once else {
            new.push(*place);
            continue;
        };
        match known.get(&once.key) {
            Some((id, fingerprint)) if fingerprint[..] == once.fingerprint => {
                results.push((*place, Ok(Appended::Repeated(*id))));
            }
            Some(_) => results.push((*place, Err(Turned::KeyTaken))),
            None if first[once.key.as_str()] == *place => new.push(*place),
            // Twice in one call: known once the first is stored.
            None => {}
        }
    }
    Ok((results, new))
}

/// What becomes of those whose key came earlier in the same call.
fn resolve(
    messages: &[NewMessage],
    inserted: &[(usize, Result<Appended, Turned>)],
    results: &mut Vec<(usize, Result<Appended, Turned>)>,
) {
    let firsts: HashMap<&str, &(usize, Result<Appended, Turned>)> = inserted
        .iter()
        .filter_map(|one| messages[one.0].once.as_ref().map(|once| (once.key.as_str(), one)))
        .collect();
    for (place, new) in messages.iter().enumerate() {
        let Some(once) = &new.once else { continue };
        let Some((first, result)) = firsts.get(once.key.as_str()) else { continue };
        if place == *first {
            continue;
        }
        let same = messages[*first].once.as_ref().is_some_and(|other| other.fingerprint == once.fingerprint);
        results.push((
            place,
            match result {
                Ok(_) if same => Ok(Appended::Repeated(messages[*first].message.id)),
                Ok(_) => Err(Turned::KeyTaken),
                Err(turned) => Err(turned.clone()),
            },
        ));
    }
}

/// A message that was turned away has not used its key.
async fn forget(
    tx: &Transaction,
    messages: &[NewMessage],
    inserted: &[(usize, Result<Appended, Turned>)],
) -> Result<(), Trouble> {
    let unused: Vec<&str> = inserted
        .iter()
        .filter(|(_, result)| result.is_err())
        .filter_map(|(place, _)| messages[*place].once.as_ref().map(|once| once.key.as_str()))
        .collect();
    if !unused.is_empty() {
        tx.execute(
            "DELETE FROM outbox_idempotency_keys WHERE key = ANY ($1)",
            &[(&unused, Type::TEXT_ARRAY)],
        )
        .await?;
    }
    Ok(())
}

/// Writes what settlements carry. One whose id is taken is there already.
pub(super) async fn beside(tx: &Transaction, parted: bool, messages: &[NewMessage]) -> Result<(), Trouble> {
    // The rest was in this store before.
    for new in messages {
        check_topic(&new.message.topic).map_err(|invalid| Error::Refused(invalid.to_string()))?;
    }
    let places: Vec<usize> = (0..messages.len()).collect();
    insert(tx, parted, messages, &places).await.map(drop)
}

/// Inserts the messages at `places`, in order, in one statement.
async fn insert(
    tx: &Transaction,
    parted: bool,
    messages: &[NewMessage],
    places: &[usize],
) -> Result<Vec<(usize, Result<Appended, Turned>)>, Trouble> {
    if places.is_empty() {
        return Ok(Vec::new());
    }
    let of = || places.iter().map(|place| &messages[*place]);
    let ids: Vec<Uuid> = of().map(|new| new.message.id.0).collect();
    let topics: Vec<&str> = of().map(|new| new.message.topic.as_str()).collect();
    let kinds: Vec<Option<&str>> = of().map(|new| new.message.kind.as_deref()).collect();
    let keys: Vec<Option<&str>> = of().map(|new| new.message.key.as_deref()).collect();
    let payloads: Vec<&[u8]> = of().map(|new| &new.message.payload[..]).collect();
    let content_types: Vec<&str> = of().map(|new| new.message.content_type.as_str()).collect();
    let headers: Vec<String> = of().map(|new| headers_json(&new.message)).collect();
    let times: Vec<DateTime<Utc>> = of().map(|new| new.message.occurred_at).collect();
    let groups: Vec<Option<String>> = of().map(|new| new.ack_groups.as_deref().map(groups_json)).collect();
    let rows = tx
        .query(
            if parted { include_str!("append_to_parts.sql") } else { include_str!("append_many.sql") },
            &[
                (&ids, Type::UUID_ARRAY),
                (&topics, Type::TEXT_ARRAY),
                (&kinds, Type::TEXT_ARRAY),
                (&keys, Type::TEXT_ARRAY),
                (&payloads, Type::BYTEA_ARRAY),
                (&content_types, Type::TEXT_ARRAY),
                (&headers, Type::TEXT_ARRAY),
                (&times, Type::TIMESTAMPTZ_ARRAY),
                (&groups, Type::TEXT_ARRAY),
            ],
        )
        .await?;
    let mut stored: HashSet<Uuid> = rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
    Ok(places
        .iter()
        .map(|place| {
            let id = messages[*place].message.id;
            // Of two with one id in a call the first is stored.
            let result = if stored.remove(&id.0) { Ok(Appended::New(id)) } else { Err(Turned::IdTaken(id)) };
            (*place, result)
        })
        .collect())
}
