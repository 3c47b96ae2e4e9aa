//! Where each group remembers what it has done: in the store, in Redis, in both, or nowhere.

use std::collections::BTreeMap;
use std::sync::Arc;

use store::{Forgetful, Inbox, Store};

use super::failure::Failure;
use crate::config::Config;
#[cfg(feature = "redis")]
use crate::config::{Dedup, Place};

/// The inboxes of groups that do not remember in the store itself.
pub(super) type Inboxes = BTreeMap<String, Arc<dyn Inbox>>;

/// Opens what the groups of the configuration need beside the store.
pub(super) async fn open(config: &Config, store: &Arc<dyn Store>) -> Result<Inboxes, Failure> {
    let mut inboxes = beside(config, store).await?;
    for (name, consumer) in &config.consumers {
        if consumer.semantics.bypasses_store() {
            inboxes.insert(name.clone(), Arc::new(Forgetful::default()));
        }
    }
    Ok(inboxes)
}

/// Those in Redis.
#[cfg(feature = "redis")]
async fn beside(config: &Config, store: &Arc<dyn Store>) -> Result<Inboxes, Failure> {
    let mut inboxes = Inboxes::new();
    let Some(url) = config.consumer.redis.as_ref().filter(|_| config.store.place != Place::Redis) else {
        return Ok(inboxes);
    };
    let mut redis: Option<Arc<dyn Inbox>> = None;
    for (name, consumer) in &config.consumers {
        let inbox: Arc<dyn Inbox> = match consumer.dedup {
            Dedup::Sql => continue,
            Dedup::Redis => match &redis {
                Some(opened) => opened.clone(),
                None => redis.insert(remembering(url).await?).clone(),
            },
            Dedup::Hybrid => {
                let scope = store.identity().await?;
                let settings = store::hybrid::Config {
                    keep: consumer.keep_ids,
                    ..store::hybrid::Config::new(url, scope)
                };
                Arc::new(store::hybrid::Hybrid::new(store.clone(), &settings)?)
            }
        };
        inboxes.insert(name.clone(), inbox);
    }
    Ok(inboxes)
}

/// A Redis that keeps marks, and messages that wait for another try: it must not lose them.
#[cfg(feature = "redis")]
async fn remembering(url: &str) -> Result<Arc<dyn Inbox>, Failure> {
    match store::redis::RedisStore::connect(store::redis::Config::new(url)).await {
        Ok(redis) => Ok(Arc::new(redis)),
        Err(error) => {
            let mut failure = Failure::from(error);
            failure.text.push_str(
                "; that is the Redis of consumer.redis: dedup = \"hybrid\" needs no more than a cache",
            );
            Err(failure)
        }
    }
}

/// Without Redis in the build there are none.
#[cfg(not(feature = "redis"))]
async fn beside(_: &Config, _: &Arc<dyn Store>) -> Result<Inboxes, Failure> {
    Ok(Inboxes::new())
}
