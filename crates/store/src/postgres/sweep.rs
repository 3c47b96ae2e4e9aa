//! Finding what the low-water marks hide: rows that somebody wrote by hand below them.

use tokio_postgres::types::Type;

use super::PostgresStore;
use super::connection::repeat;
use super::row::lane;

impl PostgresStore {
    /// Starts a sweep if it is time for one. It runs beside the turns, without a lock, and only ever lowers marks.
    pub(super) fn sweep_sometimes(&self) {
        if !self.marks.sweep() {
            return;
        }
        let Some(highest) = self.marks.highest() else { return };
        let store = self.clone();
        tokio::spawn(async move {
            if let Err(error) = store.sweep(highest).await {
                tracing::debug!(%error, "a sweep for messages written by hand failed; the next one is soon");
            }
        });
    }

    async fn sweep(&self, highest: i64) -> Result<(), crate::Error> {
        let topics = self.marks.topics();
        repeat(|| async {
            let tx = self.connections.transaction().await?;
            let (begun, rows) = tokio::join!(
                biased;
                tx.begin_reading(),
                async {
                    tx.query(
                        include_str!("sweep.sql"),
                        &[(&topics, Type::TEXT_ARRAY), (&highest, Type::INT8)],
                    )
                    .await
                },
            );
            for row in tx.end(begun.and(rows)).await? {
                self.marks.lower(row.try_get(0)?, lane(&row, 1)?, row.try_get(2)?);
            }
            Ok(())
        })
        .await
    }
}
