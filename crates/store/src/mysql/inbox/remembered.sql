-- The ids of the group and of all, and the size of the table that all groups share, as the server estimates it.
SELECT cast(coalesce(sum(CASE WHEN kept.name = ? THEN kept.ids END), 0) AS SIGNED),
       cast(coalesce(sum(kept.ids), 0) AS SIGNED),
       (SELECT cast(data_length + index_length AS SIGNED) FROM information_schema.tables
        WHERE table_schema = database() AND table_name = 'inbox_ids')
FROM (SELECT g.name, greatest(coalesce((SELECT sum(c.processed) FROM inbox_counters c WHERE c.grp = g.grp), 0)
                              - coalesce((SELECT f.ids FROM inbox_forgotten f WHERE f.grp = g.grp), 0), 0) AS ids
      FROM inbox_groups g) kept
