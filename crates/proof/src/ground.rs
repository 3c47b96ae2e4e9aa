//! The ground of one run: a folder for the broker, and a database of its own on the store's server.
//!
//! It is cleared when the run went well. After a failure it stays, so that somebody can look.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use chrono::{DateTime, Utc};
use tempfile::TempDir;

use crate::shop::{Address, Shop};

/// See the module.
pub struct Ground {
    folder: TempDir,
    address: Address,
    shop: Arc<dyn Shop>,
    broker: OnceLock<String>,
    acknowledge: OnceLock<String>,
    began: DateTime<Utc>,
}

impl Ground {
    /// Fresh ground on the server at `store` (`sqlite:` needs none), for this many customers.
    ///
    /// # Errors
    /// When the server cannot be reached or does not let us make a database.
    pub async fn fresh(store: &str, customers: u64) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("proof-").tempdir()?;
        let name = match store.split(':').next() {
            Some("sqlite") => folder.path().join("shop.db").to_str().context("a plain path")?.to_owned(),
            Some("redis" | "rediss") => format!("{{proof-{:08x}}}", rand::random::<u32>()),
            _ => format!("proof_{:08x}", rand::random::<u32>()),
        };
        let address = Address { store: store.to_owned(), name };
        address.create().await.context("cannot make a database for the proof")?;
        let shop = address.open().await?;
        shop.furnish(customers).await.context("cannot make the tables of the shop")?;
        Ok(Self {
            folder,
            address,
            shop,
            broker: OnceLock::new(),
            acknowledge: OnceLock::new(),
            began: Utc::now(),
        })
    }

    /// Runs `work` and clears up behind it.
    ///
    /// # Errors
    /// What `work` says, with where to look.
    pub async fn during<T>(self, work: impl AsyncFnOnce(&Self) -> Result<T>) -> Result<T> {
        match work(&self).await {
            Ok(done) => {
                let Self { folder, address, shop, .. } = self;
                drop(shop);
                address.remove().await.context("cannot remove the database of the proof")?;
                folder.close()?;
                Ok(done)
            }
            Err(error) => {
                let (name, folder) = (self.address.name, self.folder.keep());
                Err(error.context(format!("broken; look at {name} and {}", folder.display())))
            }
        }
    }

    /// The application.
    pub fn shop(&self) -> &Arc<dyn Shop> {
        &self.shop
    }

    /// Where its database is.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Sends everything through the broker at `url` instead of the embedded one. Said once, before any worker starts.
    pub fn use_broker(&self, url: String) {
        let said = self.broker.set(url);
        debug_assert!(said.is_ok(), "a ground has one broker");
    }

    /// The URL of the broker, where it is not the embedded one.
    pub fn broker(&self) -> Option<&str> {
        self.broker.get().map(String::as_str)
    }

    /// Lets the group acknowledge so, instead of together with its work: see [`Work`](crate::worker::Work::acknowledge). Said
    /// once, before any worker starts.
    pub fn acknowledge_by(&self, way: String) {
        let said = self.acknowledge.set(way);
        debug_assert!(said.is_ok(), "a ground has one way to acknowledge");
    }

    /// How the group acknowledges.
    pub fn acknowledge(&self) -> &str {
        self.acknowledge.get().map_or("together", String::as_str)
    }

    /// When it was made.
    pub fn began(&self) -> DateTime<Utc> {
        self.began
    }

    /// The folder of the broker and the trails.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// The broker's log.
pub fn broker_path(folder: &Path) -> PathBuf {
    folder.join("broker.db")
}
