DELETE FROM outbox_unacknowledged WHERE grp = ? AND seq = ?
