-- All groups share the tables: what a group takes of them is its part by the number of ids.
WITH kept AS (
    SELECT g.name, greatest(coalesce((SELECT sum(c.processed) FROM inbox_counters c WHERE c.grp = g.grp), 0)
                            - coalesce((SELECT f.ids FROM inbox_forgotten f WHERE f.grp = g.grp), 0), 0) AS ids
    FROM inbox_groups g)
SELECT coalesce(sum(ids) FILTER (WHERE name = $1), 0)::bigint,
       coalesce((pg_total_relation_size('inbox_ids') + pg_total_relation_size('inbox_done'))
                * sum(ids) FILTER (WHERE name = $1) / nullif(sum(ids), 0), 0)::bigint
FROM kept
