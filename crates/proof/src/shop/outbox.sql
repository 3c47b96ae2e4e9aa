-- All messages, those that are not Sent, and those that the proof's group has not acknowledged.
SELECT (SELECT count(*) FROM outbox_events),
       (SELECT count(*) FROM outbox_events WHERE status <> 'sent'),
       (SELECT count(*) FROM outbox_events e
        WHERE NOT EXISTS (SELECT 1 FROM outbox_acknowledgements a WHERE a.seq = e.seq AND a.grp = 'proof'))
