DELETE FROM unacknowledged WHERE grp = ? AND seq = ?
