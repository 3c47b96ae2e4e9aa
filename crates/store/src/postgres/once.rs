//! For applications that use tokio-postgres or deadpool: marks and acknowledgements in their own transaction.

use message::MessageId;
use tokio_postgres::GenericClient;
use tokio_postgres::types::Type;

use crate::Arrival;
use crate::column::digest;

/// Marks `arrival` as done by `group` in the caller's transaction. `false`: it was done before, so do nothing.
///
/// Of two transactions that try at the same time one waits for the other, and hears `false` if that commits.
///
/// # Errors
/// What the driver says.
///
/// # Cancel safety
/// A call that is dropped may have made the mark in the transaction: roll it back.
pub async fn once(
    client: &impl GenericClient,
    group: &str,
    arrival: &Arrival,
) -> Result<bool, tokio_postgres::Error> {
    let message = &arrival.message;
    let row = client
        .query_typed_one(
            include_str!("once.sql"),
            &[
                (&group, Type::TEXT),
                (&message.id.0, Type::UUID),
                (&digest(arrival), Type::BYTEA),
                (&message.topic, Type::TEXT),
                (&message.key, Type::TEXT),
                (&arrival.seq, Type::INT8),
            ],
        )
        .await?;
    row.try_get(0)
}

/// Acknowledges a message to its producer in the caller's transaction, when both share this database. What was
/// never sent, or asks other groups only, is left as it is.
///
/// # Errors
/// What the driver says.
///
/// # Cancel safety
/// A call that is dropped may have written the acknowledgement into the transaction: roll it back.
pub async fn acknowledge(
    client: &impl GenericClient,
    group: &str,
    id: MessageId,
) -> Result<(), tokio_postgres::Error> {
    let parameters = [(&group as _, Type::TEXT), (&id.0 as _, Type::UUID)];
    client.query_typed(include_str!("acknowledge.sql"), &parameters).await?;
    Ok(())
}
