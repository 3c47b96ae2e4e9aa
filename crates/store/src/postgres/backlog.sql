SELECT (SELECT count(*) FROM outbox_events WHERE ready)
     + (SELECT count(*) FROM outbox_events WHERE NOT ready AND status IN ('pending', 'failed'))
