-- {sign} and {order} are the direction of the page. Each call has an id at least, so no more of them are needed.
SELECT (d.call << 13) + o.place - 1, i.id, i.topic, i.key, i.seq, d.processed_at
FROM (SELECT * FROM inbox_done
      WHERE grp = (SELECT grp FROM inbox_groups WHERE name = $1) AND call {sign}= $2 >> 13
      ORDER BY call {order} LIMIT $3 + 1) d
CROSS JOIN LATERAL unnest(d.ids) WITH ORDINALITY AS o(id, place)
CROSS JOIN LATERAL (SELECT id, topic, key, seq FROM inbox_ids WHERE grp = d.grp AND id = o.id OFFSET 0) i
WHERE (d.call << 13) + o.place - 1 {sign} $2
ORDER BY d.call {order}, o.place {order} LIMIT $3
