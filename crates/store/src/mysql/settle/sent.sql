UPDATE json_table(?, '$[*]' COLUMNS (
           number BIGINT PATH '$[0]',
           asked  LONGTEXT CHARACTER SET utf8mb4 PATH '$[1]')) j
STRAIGHT_JOIN outbox_events e FORCE INDEX (PRIMARY) ON e.seq = j.number
SET e.status = 'sent', e.ready = 0, e.held = 0, e.sent_at = ?, e.ack_groups = j.asked
