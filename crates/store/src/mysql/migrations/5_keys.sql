-- The texts of messages that other programs wrote have any length, and an entry of an index at most 3,072 bytes: what is
-- looked for is a hash of topic and key, and whoever finds something compares the key itself.
ALTER TABLE inbox_ids MODIFY COLUMN `key` LONGTEXT;
-- Once: the step may have stopped behind it.
SET @keys = if(EXISTS (SELECT 1 FROM information_schema.columns
                       WHERE table_schema = database() AND table_name = 'inbox_parked' AND column_name = 'line'), 'DO 0',
    'ALTER TABLE inbox_parked
         MODIFY COLUMN `key` LONGBLOB, MODIFY COLUMN `type` LONGTEXT, MODIFY COLUMN content_type LONGTEXT NOT NULL,
         ADD COLUMN line BINARY(32)
             GENERATED ALWAYS AS (unhex(sha2(concat(cast(topic AS BINARY), 0x00, `key`), 256))) STORED,
         DROP INDEX inbox_parked_key, ADD INDEX inbox_parked_key (grp, line, position)');
PREPARE keys_step FROM @keys;
EXECUTE keys_step;
DEALLOCATE PREPARE keys_step;
