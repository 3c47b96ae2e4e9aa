-- Everything that programs and people may rely on: columns, indexes, checks, triggers, views and functions. Words for types
-- are those of MariaDB.
SELECT line FROM (
    SELECT concat('column ', table_name, '.', column_name, ' ', column_type,
                  if(is_nullable = 'NO', ' not null', ''), if(extra = '', '', concat(' ', extra))) AS line
    FROM information_schema.columns WHERE table_schema = database()
    UNION ALL
    SELECT concat('index ', table_name, '.', index_name, if(non_unique = 0, ' unique', ''), ' (',
                  group_concat(column_name ORDER BY seq_in_index SEPARATOR ', '), ')')
    FROM information_schema.statistics WHERE table_schema = database() GROUP BY table_name, index_name, non_unique
    UNION ALL
    SELECT concat('check ', constraint_name) FROM information_schema.table_constraints
    WHERE table_schema = database() AND constraint_type = 'CHECK'
    UNION ALL
    SELECT concat('trigger ', trigger_name, ' on ', event_object_table) FROM information_schema.triggers
    WHERE trigger_schema = database()
    UNION ALL
    SELECT concat('view ', table_name) FROM information_schema.views WHERE table_schema = database()
    UNION ALL
    SELECT concat('function ', routine_name) FROM information_schema.routines WHERE routine_schema = database()
) shape ORDER BY cast(line AS BINARY)
