INSERT IGNORE INTO acknowledgements (seq, grp, acknowledged_at) VALUES (?, ?, utc_timestamp(3))
