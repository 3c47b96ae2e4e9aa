-- The keys of messages that other programs wrote have any length, and an entry of an index at most 2,704 bytes: what is
-- looked for is a hash, and whoever finds something compares the key itself.
DROP INDEX inbox_parked_key;
CREATE INDEX inbox_parked_key ON inbox_parked (grp, hashtextextended(key, hashtextextended(topic, 0)), position);
