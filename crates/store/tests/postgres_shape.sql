-- Everything that programs and people may rely on: columns, indexes, triggers, views and functions.
SELECT line FROM (
    SELECT format('column %s.%s %s%s%s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
                  CASE WHEN a.attnotnull THEN ' not null' ELSE '' END,
                  coalesce(' = ' || pg_get_expr(d.adbin, d.adrelid), '')) AS line
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
    WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'p', 'v')
    UNION ALL
    SELECT 'index ' || regexp_replace(indexdef, ' ON \w+\.', ' ON ') FROM pg_indexes WHERE schemaname = current_schema()
    UNION ALL
    SELECT format('check %s: %s', conrelid::regclass, pg_get_constraintdef(oid)) FROM pg_constraint
    WHERE connamespace = current_schema()::regnamespace AND contype = 'c'
    UNION ALL
    SELECT format('trigger %s on %s', tgname, tgrelid::regclass) FROM pg_trigger WHERE NOT tgisinternal
    UNION ALL
    SELECT 'function ' || oid::regprocedure FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
) shape ORDER BY line COLLATE "C"
