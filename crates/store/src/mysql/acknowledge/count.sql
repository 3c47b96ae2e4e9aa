UPDATE outbox_counters SET acknowledged_total = acknowledged_total + 1 WHERE part = 1024 + (connection_id() & 63)
