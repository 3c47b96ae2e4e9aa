-- For other languages, in their own transaction, and for rows that are deleted by hand. With the binary log on, a user
-- without SUPER may make these only under log_bin_trust_function_creators = 1; all else works without them.
-- READS SQL DATA is what lets any server with a binary log take a function. It binds nothing: uuid() and
-- connection_id() make the server log the rows, not the call; calls without them come to the same on a replica.
DELIMITER //
DROP FUNCTION IF EXISTS postrider_send //
-- Writes a message and answers its id: SELECT postrider_send('order-events', '42', '{"total": 10}').
CREATE FUNCTION postrider_send(
    send_topic   VARCHAR(249) CHARACTER SET utf8mb4,
    send_key     VARCHAR(1024) CHARACTER SET utf8mb4,
    send_payload LONGTEXT CHARACTER SET utf8mb4
) RETURNS VARCHAR(36) CHARACTER SET utf8mb4
    NOT DETERMINISTIC READS SQL DATA SQL SECURITY INVOKER
BEGIN
    DECLARE message_id VARCHAR(36) CHARACTER SET utf8mb4 DEFAULT lower(concat(
        lpad(hex(floor(unix_timestamp(now(3)) * 1000) >> 16), 8, '0'), '-',
        lpad(hex(floor(unix_timestamp(now(3)) * 1000) & 65535), 4, '0'), '-7',
        insert(insert(left(sha2(uuid(), 256), 18), 4, 0, '-8'), 9, 0, '-')));
    IF NOT json_valid(send_payload) THEN
        SIGNAL SQLSTATE '45000'
            SET MESSAGE_TEXT = 'postrider_send: the payload is no JSON; insert other content with INSERT INTO outbox_events';
    END IF;
    INSERT INTO outbox_events (id, topic, `key`, payload) VALUES (message_id, send_topic, send_key, send_payload);
    RETURN message_id;
END //
DROP FUNCTION IF EXISTS postrider_once //
-- Marks a message as done by a group. 1: it is new, do its work in this transaction; 0: it was done before.
CREATE FUNCTION postrider_once(
    once_group VARCHAR(249) CHARACTER SET utf8mb4,
    once_id    VARCHAR(36) CHARACTER SET utf8mb4
) RETURNS TINYINT
    NOT DETERMINISTIC READS SQL DATA SQL SECURITY INVOKER
BEGIN
    DECLARE is_new TINYINT DEFAULT 1;
    DECLARE number BIGINT;
    DECLARE CONTINUE HANDLER FOR 1062 SET is_new = 0;
    SET number = (SELECT grp FROM inbox_groups WHERE name = once_group);
    IF number IS NULL THEN
        INSERT INTO inbox_groups (name) VALUES (once_group);
        SET number = (SELECT grp FROM inbox_groups WHERE name = once_group LOCK IN SHARE MODE);
        SET is_new = 1;
    END IF;
    INSERT INTO inbox_ids (grp, id, digest, topic, processed_at)
    VALUES (number, lower(once_id), '', '', utc_timestamp(3));
    INSERT INTO inbox_counters (grp, part, processed, duplicates)
    VALUES (number, connection_id() & 63, is_new, 1 - is_new)
    ON DUPLICATE KEY UPDATE processed = processed + is_new, duplicates = duplicates + 1 - is_new;
    RETURN is_new;
END //
DROP FUNCTION IF EXISTS postrider_newer //
-- Whether this version is newer than any that was applied; if so, it is the newest from now on. Of two transactions that
-- ask at the same time one waits for the other.
CREATE FUNCTION postrider_newer(
    newer_scope   VARCHAR(249) CHARACTER SET utf8mb4,
    newer_entity  VARCHAR(1024) CHARACTER SET utf8mb4,
    newer_version BIGINT
) RETURNS TINYINT
    NOT DETERMINISTIC READS SQL DATA SQL SECURITY INVOKER
BEGIN
    DECLARE newest BIGINT;
    IF newer_version IS NULL THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'postrider_newer: the version is missing';
    END IF;
    INSERT INTO inbox_versions (scope, entity) VALUES (newer_scope, newer_entity)
    ON DUPLICATE KEY UPDATE version = version;
    SELECT version INTO newest FROM inbox_versions
    WHERE scope = newer_scope AND entity = CAST(newer_entity AS BINARY) FOR UPDATE;
    IF newest >= newer_version THEN
        RETURN 0;
    END IF;
    UPDATE inbox_versions SET version = newer_version
    WHERE scope = newer_scope AND entity = CAST(newer_entity AS BINARY);
    RETURN 1;
END //
DROP FUNCTION IF EXISTS postrider_swap //
-- Whether `swap_expected` was applied last (0: none); if so, it is `swap_version` from now on.
CREATE FUNCTION postrider_swap(
    swap_scope    VARCHAR(249) CHARACTER SET utf8mb4,
    swap_entity   VARCHAR(1024) CHARACTER SET utf8mb4,
    swap_expected BIGINT,
    swap_version  BIGINT
) RETURNS TINYINT
    NOT DETERMINISTIC READS SQL DATA SQL SECURITY INVOKER
BEGIN
    DECLARE newest BIGINT;
    IF swap_expected IS NULL OR swap_version IS NULL THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'postrider_swap: a version is missing';
    END IF;
    INSERT INTO inbox_versions (scope, entity) VALUES (swap_scope, swap_entity)
    ON DUPLICATE KEY UPDATE version = version;
    SELECT version INTO newest FROM inbox_versions
    WHERE scope = swap_scope AND entity = CAST(swap_entity AS BINARY) FOR UPDATE;
    IF coalesce(newest, 0) <> swap_expected THEN
        RETURN 0;
    END IF;
    UPDATE inbox_versions SET version = swap_version
    WHERE scope = swap_scope AND entity = CAST(swap_entity AS BINARY);
    RETURN 1;
END //
DROP TRIGGER IF EXISTS outbox_removed //
-- Nothing may wait for a record that is gone, and it no longer counts.
CREATE TRIGGER outbox_removed AFTER DELETE ON outbox_events FOR EACH ROW
BEGIN
    IF OLD.status = 'sent' THEN
        UPDATE outbox_counters SET sent = sent - 1 WHERE part = 1024 + (connection_id() & 63);
    -- One that was never tried holds nobody back.
    ELSEIF OLD.status <> 'pending' OR OLD.delivery_epoch > 0 THEN
        UPDATE outbox_holds SET draining = 1, seq = 0 WHERE seq = OLD.seq;
    END IF;
END //
DELIMITER ;
