INSERT IGNORE INTO outbox_acknowledgements (seq, grp, acknowledged_at) VALUES (?, ?, utc_timestamp(3))
