//! Keys whose later messages wait for an earlier one.
//!
//! A hold names the message that the others wait for. Followers are taken out of their bucket when a claim meets
//! them, so that they cost nothing while they wait. When the message is sent or given up, the hold is being drained:
//! each claim lets some go, in order, and whatever is newer goes on being parked until all older ones are out.
//!
//! Of several messages of a key in trouble the earliest holds it; the others are parked like followers, and each
//! becomes the holder when its turn comes. All of it is in `hold.lua`; here is how people see it.

use ::redis::Value;
use message::MessageId;

use super::RedisStore;
use super::reply::{Reader, status};
use super::script::script;
use crate::{Error, Hold};

script!(HOLDS: "prelude.lua", "holds.lua");

impl RedisStore {
    pub(super) async fn list_holds(&self, limit: usize) -> Result<Vec<Hold>, Error> {
        let mut call = self.script(&HOLDS);
        call.arg(limit);
        self.read(&call).await?.map(hold).collect()
    }
}

fn hold(item: Value) -> Result<Hold, Error> {
    let mut item = Reader::from(item);
    let (topic, key) = (item.text()?, item.text()?);
    let id = item.optional_text()?.and_then(|id| id.parse::<MessageId>().ok());
    let status = item.optional_text()?.as_deref().map(status).transpose()?;
    Ok(Hold { topic, key, id, status })
}
